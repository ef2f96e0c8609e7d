//! The weights of a model in the form for the forward pass, checked and packed once.

mod encoder_ends;
mod format_plan;
mod grouped_matrix;
mod image_reader;
mod lane;
mod norm;
mod packed_adapter;
mod packed_draft_head;
mod packed_image;
mod packed_layer;
mod packed_recurrent;
mod packed_size;
mod packer;
mod panel;
mod per_layer_ends;
mod spec_check;

pub use self::encoder_ends::EncoderEnds;
pub use self::format_plan::{FormatPlan, Role};
pub use self::lane::Lane;
pub use self::norm::PackedNorm;
pub use self::packed_adapter::{
    AdaptedMatrix, AdapterPacking, PackedAdapter, PackedUpdate, RowAdapters,
};
pub use self::packed_draft_head::PackedDraftHead;
pub use self::packed_image::PackedImage;
pub use self::packed_layer::{
    PackedExperts, PackedFeedForward, PackedLayer, PackedMlp, PackedPerLayer,
};
pub use self::packed_recurrent::{MAX_KERNEL_LEN, PackedConvolution, PackedDelta, PackedRecurrent};
pub use self::packed_size::packed_bytes;
pub use self::panel::{PackedMatrix, Packing};
pub use self::per_layer_ends::PerLayerEnds;
pub use self::spec_check::check_spec;

use std::fs::File;
use std::sync::Arc;

use corella_model::{
    DType, DecoderSpec, DecoderWeights, DeviceError, FileWatch, LayerTensor, LayerWeights, OnLayer,
    StoredMatrices, StoredMatrix, Tensor, WeightFormat,
};

use crate::kernels::{Form, Kernels};
use crate::system::ThreadPool;

use self::encoder_ends::{add_row, first_position};
use self::image_reader::ImageReader;
use self::lane::elements;
use self::packer::{Packer, check_shape, optional};

/// The weights of a model, or of one pipeline stage's layers.
pub struct PackedWeights {
    pub layers: Vec<PackedLayer>,
    /// Shared by all pipeline stages.
    pub ends: Arc<PackedEnds>,
    /// The draft head, if one is loaded.
    pub draft_head: Option<Box<PackedDraftHead>>,
}

/// The weights before the first layer and after the last one.
pub struct PackedEnds {
    pub embedding: Embedding,
    /// The learned vector of each position, which is added to the embeddings of its tokens, `[position][hidden_size]`.
    pub positions: Option<Vec<f32>>,
    /// The other parts of an encoder's embeddings.
    pub encoder: EncoderEnds,
    /// The sources of the layers' own inputs.
    pub per_layer: Option<PerLayerEnds>,
    pub norm: PackedNorm,
    /// The output head, which the draft head shares; also a tied embedding.
    pub head: Arc<PackedMatrix>,
    /// Watches the files of tensors that are read in place.
    pub files: Option<FileWatch>,
}

/// The source of token embeddings.
#[derive(Clone)]
pub enum Embedding {
    /// The embedding is the output head.
    Tied,
    /// The checkpoint's own tensor, read in place.
    Own(Tensor),
}

/// The options of packing a checkpoint.
pub struct PackOptions<'a> {
    /// Overrides the checkpoint's own format.
    pub format: Option<WeightFormat>,
    /// Weights packed by an earlier start. From the first matrix that differs on, all matrices are packed anew.
    pub image: Option<File>,
    /// Called after each layer with the number of finished layers.
    pub on_layer: OnLayer<'a>,
}

impl PackedWeights {
    /// Checks and packs a checkpoint's weights.
    pub fn pack(
        spec: &DecoderSpec,
        weights: &DecoderWeights,
        options: PackOptions<'_>,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> Result<Self, DeviceError> {
        check_spec(spec)?;
        if weights.layers.len() != spec.layers.len() {
            return Err(DeviceError(format!(
                "the model has {} layers, but the checkpoint has {}",
                spec.layers.len(),
                weights.layers.len()
            )));
        }
        let embedding_shape = [spec.vocab_size, spec.hidden_size];
        check_shape("embed", &weights.embed, &embedding_shape)?;
        let hidden_shape = [spec.hidden_size];
        check_shape("norm", &weights.norm, &hidden_shape)?;
        let norm_bias = &weights.norm_bias;
        let norm_bias = optional("norm_bias", norm_bias, spec.norm.has_bias(), &hidden_shape)?;
        let norm = PackedNorm::new(spec.norm, &weights.norm, norm_bias);
        let positions = optional(
            "positions",
            &weights.positions,
            spec.learned_positions,
            &[first_position(spec) + spec.max_position, spec.hidden_size],
        )?;
        let encoder = EncoderEnds::pack(spec, &weights.encoder)?;
        let head = match &weights.lm_head {
            _ if spec.tied_embeddings => &weights.embed,
            Some(head) => head,
            None => {
                return Err(DeviceError(String::from(
                    "the checkpoint has no lm_head, and the model does not tie its embeddings",
                )));
            }
        };
        check_shape("lm_head", head, &embedding_shape)?;
        let stored = StoredMatrices::new(&weights.layers, head);
        let mut packer = Packer {
            plan: FormatPlan::new(options.format, &stored, kernels.tile_gemm.is_some())?,
            image: options.image.map(ImageReader::new),
            kernels,
            pool,
        };
        let layers = weights.layers.iter().enumerate().map(|(index, layer)| {
            let packed = packer
                .layer(&spec.layers[index], spec.hidden_size, layer)
                .map_err(|error| DeviceError(format!("layer {index}: {error}")))?;
            (options.on_layer)(index + 1);
            Ok(packed)
        });
        let layers = layers.collect::<Result<_, DeviceError>>()?;
        let ends = PackedEnds {
            embedding: if spec.tied_embeddings {
                Embedding::Tied
            } else {
                Embedding::Own(weights.embed.clone())
            },
            positions: positions.map(elements),
            encoder,
            per_layer: packer.per_layer_ends(spec, weights)?,
            norm,
            head: Arc::new(packer.matrix(Role::Head, &[(head, None)], spec.hidden_size)?),
            files: weights.files.clone(),
        };
        Ok(Self {
            draft_head: packer.draft_head(spec, weights, &ends)?,
            layers,
            ends: Arc::new(ends),
        })
    }

    /// Packs one layer alone, as floats. The parts before and after it stay empty: the residual stream enters and
    /// leaves unchanged.
    pub fn pack_layer(
        spec: &DecoderSpec,
        layer: &LayerWeights,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> Result<Self, DeviceError> {
        let stored = StoredMatrices {
            head: StoredMatrix::floats(DType::F32),
            ..StoredMatrices::new([layer], &layer[LayerTensor::O])
        };
        let mut packer = Packer {
            plan: FormatPlan::floats(&stored, kernels.tile_gemm.is_some()),
            image: None,
            kernels,
            pool,
        };
        let layer = packer.layer(&spec.layers[0], spec.hidden_size, layer)?;
        let ends = PackedEnds {
            embedding: Embedding::Tied,
            positions: None,
            encoder: EncoderEnds::default(),
            per_layer: None,
            norm: PackedNorm {
                spec: spec.norm,
                weight: Vec::new(),
                bias: Vec::new(),
            },
            head: Arc::new(packer.matrix(Role::Head, &[], spec.hidden_size)?),
            files: None,
        };
        Ok(Self {
            layers: vec![layer],
            ends: Arc::new(ends),
            draft_head: None,
        })
    }

    /// Splits off the first `num_layers` layers, for a pipeline stage of its own.
    pub fn take_layers(&mut self, num_layers: usize) -> Self {
        Self {
            layers: self.layers.drain(..num_layers).collect(),
            ends: Arc::clone(&self.ends),
            draft_head: None,
        }
    }

    /// The form of the layers' matrices; without layers, the head's.
    pub fn form(&self) -> Form {
        let layer = self.layers.first();
        layer.map_or(self.ends.head.form, PackedLayer::form)
    }

    /// The form of the experts' matrices; without experts, the form of all others.
    pub fn expert_form(&self) -> Form {
        let mut forms = self.layers.iter().filter_map(PackedLayer::expert_form);
        forms.next().unwrap_or(self.form())
    }

    /// All matrices except the draft head's, in the order of their packing.
    fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let layers = self.layers.iter().flat_map(PackedLayer::matrices);
        let per_layer = self.ends.per_layer.iter().map(|ends| &ends.projection);
        layers.chain(per_layer).chain([&*self.ends.head])
    }

    pub fn image(&self) -> PackedImage {
        PackedImage::new(self.matrices())
    }

    pub fn num_bytes(&self) -> usize {
        let embedding = match &self.ends.embedding {
            Embedding::Tied => 0,
            Embedding::Own(tensor) => tensor.num_bytes(),
        };
        let positions = self.ends.positions.as_deref().map_or(0, size_of_val);
        let positions = positions + self.ends.encoder.num_bytes();
        let per_layer = self.ends.per_layer.as_ref();
        let positions = positions + per_layer.map_or(0, |ends| ends.table.num_bytes());
        let recurrent = self
            .layers
            .iter()
            .filter_map(|layer| layer.recurrent.as_ref());
        let recurrent: usize = recurrent.map(PackedRecurrent::num_bytes).sum();
        let matrices: usize = self.matrices().map(PackedMatrix::num_bytes).sum();
        let draft_head = self.draft_head.as_ref();
        let draft_head = draft_head.map_or(0, |head| head.num_bytes());
        matrices + embedding + positions + recurrent + draft_head
    }
}

impl PackedEnds {
    /// Fails if a row was read that a file no longer had. All steps since then, and all later ones, are void.
    pub fn check_files(&self) -> Result<(), String> {
        self.files.as_ref().map_or(Ok(()), FileWatch::check)
    }

    /// Adds the vector of a position, for learned positions.
    pub fn add_position(&self, position: usize, out: &mut [f32]) {
        if let Some(positions) = &self.positions {
            add_row(positions, self.encoder.first_position + position, out);
        }
    }

    /// The embedding of a token.
    pub fn embed(&self, token: usize, out: &mut [f32]) {
        match &self.embedding {
            Embedding::Tied => self.head.read_row(token, out),
            Embedding::Own(tensor) => {
                // Rows of a quantised tensor are dequantised into this memory.
                let mut scratch = Vec::new();
                tensor.read_row(token, &mut scratch, out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use corella_model::{Checkpoint, GroupedRow};

    use super::*;
    use crate::kernels::{Isa, kernels};

    #[test]
    fn integers_of_a_checkpoint_are_not_rounded_again() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/quantized/int8");
        let checkpoint = Checkpoint::open(folder).unwrap();
        let (spec, weights) = (&checkpoint.config().spec, checkpoint.weights().unwrap());
        let kernels = kernels(Isa::Portable).unwrap();
        let mut pool = ThreadPool::new(1).unwrap();
        for format in [None, Some(WeightFormat::Int8)] {
            let options = PackOptions {
                format,
                image: None,
                on_layer: &|_| (),
            };
            let packed = PackedWeights::pack(spec, &weights, options, kernels, &mut pool).unwrap();
            let layer = &packed.layers[0];
            let PackedFeedForward::Mlp(mlp) = &layer.feed_forward else {
                panic!("the model has no experts");
            };
            assert!(mlp.down.hadamard, "{format:?}");
            let weight = &weights.layers[0][LayerTensor::O];
            let mut row = vec![0.0; weight.shape[1]];
            let mut stored = GroupedRow::default();
            for output in 0..weight.shape[0] {
                layer.output.read_row(output, &mut row);
                weight.read_groups(output, &mut stored);
                let scale = stored.scales[0];
                let values = stored.quants.iter().map(|&q| f32::from(q) * scale);
                assert!(values.eq(row.iter().copied()), "output {output}");
            }
            let head_form = packed.ends.head.form;
            assert_eq!(head_form == Form::Int8, format.is_some(), "{format:?}");
        }
    }
}
