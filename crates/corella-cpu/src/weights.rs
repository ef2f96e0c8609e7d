//! The weights of a model in the form that the forward pass reads, checked and packed once.

mod format_plan;
mod grouped_matrix;
mod image_reader;
mod lane;
mod packed_image;
mod panel;

pub use self::format_plan::{FormatPlan, Role, StoredMatrices, StoredMatrix, weight_format};
pub use self::lane::Lane;
pub use self::packed_image::PackedImage;
pub use self::panel::PackedMatrix;

use std::fs::File;
use std::io;
use std::sync::Arc;

use corella_model::{
    Activation, AttentionSpec, DType, DecoderSpec, DecoderWeights, FeedForward, LayerInput,
    LayerSpec, LayerTensor, LayerWeights, NormKind, NormSpec, QkNorm, RotaryScaling, Tensor,
    WeightFormat,
};

use crate::cpu_error::CpuError;
use crate::kernels::{Form, Kernels};
use crate::system::ThreadPool;

use self::image_reader::ImageReader;
use self::lane::elements;
use self::panel::Packing;

/// The weights of a model, or of one pipeline stage's layers.
pub struct PackedWeights {
    pub layers: Vec<PackedLayer>,
    /// Shared by all pipeline stages.
    pub ends: Arc<PackedEnds>,
}

/// The weights before the first layer and after the last one.
pub struct PackedEnds {
    pub embedding: Embedding,
    pub norm: Vec<f32>,
    /// The output head; also the embedding if the two are tied.
    pub head: PackedMatrix,
}

/// Where token embeddings are read from.
pub enum Embedding {
    /// The embedding is the output head.
    Tied,
    /// The checkpoint's own tensor, read in place.
    Own(Tensor),
}

/// The weights of one layer.
pub struct PackedLayer {
    pub attention_norm: Vec<f32>,
    /// The projections to queries, keys and values.
    pub qkv: PackedMatrix,
    pub q_norm: Option<Vec<f32>>,
    pub k_norm: Option<Vec<f32>>,
    pub output: PackedMatrix,
    pub mlp_norm: Vec<f32>,
    /// The projections to gates and gated values: each panel has 16 gates, then the 16 values they
    /// gate.
    pub gate_up: PackedMatrix,
    pub down: PackedMatrix,
}

impl PackedWeights {
    /// Checks and packs a checkpoint's weights. `format` overrides the checkpoint's own. `image`,
    /// if given, holds weights packed by an earlier start; matrices that it does not match are
    /// packed anew.
    pub fn pack(
        spec: &DecoderSpec,
        weights: &DecoderWeights,
        format: Option<WeightFormat>,
        image: Option<File>,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> Result<Self, CpuError> {
        check_spec(spec)?;
        if weights.layers.len() != spec.layers.len() {
            return Err(CpuError(format!(
                "the model has {} layers, but the checkpoint has {}",
                spec.layers.len(),
                weights.layers.len()
            )));
        }
        let embedding_shape = [spec.vocab_size, spec.hidden_size];
        weights
            .embed
            .check_shape("embed", &embedding_shape)
            .map_err(CpuError)?;
        weights
            .norm
            .check_shape("norm", &[spec.hidden_size])
            .map_err(CpuError)?;
        let head = match &weights.lm_head {
            _ if spec.tied_embeddings => &weights.embed,
            Some(head) => head,
            None => {
                return Err(CpuError(String::from(
                    "the checkpoint has no lm_head, and the model does not tie its embeddings",
                )));
            }
        };
        head.check_shape("lm_head", &embedding_shape)
            .map_err(CpuError)?;
        let stored = StoredMatrices::new(&weights.layers, head);
        let mut packer = Packer {
            plan: FormatPlan::new(format, &stored, kernels.tile_gemm.is_some())?,
            image: image.map(ImageReader::new),
            kernels,
            pool,
        };
        let layers = weights.layers.iter().enumerate().map(|(index, layer)| {
            packer
                .layer(&spec.layers[index], spec.hidden_size, layer)
                .map_err(|error| CpuError(format!("layer {index}: {error}")))
        });
        let layers = layers.collect::<Result<_, _>>()?;
        let ends = PackedEnds {
            embedding: if spec.tied_embeddings {
                Embedding::Tied
            } else {
                Embedding::Own(weights.embed.clone())
            },
            norm: elements(&weights.norm),
            head: packer.matrix(Role::Head, &[(head, None)], spec.hidden_size)?,
        };
        Ok(Self {
            layers,
            ends: Arc::new(ends),
        })
    }

    /// Packs one layer alone, as floats. What stands before and after it is left empty: the residual
    /// stream enters and leaves as it is.
    pub fn pack_layer(
        spec: &DecoderSpec,
        layer: &LayerWeights,
        kernels: &Kernels,
        pool: &mut ThreadPool,
    ) -> Result<Self, CpuError> {
        let stored = StoredMatrices {
            layers: layer.matrices().map(StoredMatrix::from).collect(),
            head: StoredMatrix::floats(DType::F32),
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
            norm: Vec::new(),
            head: packer.matrix(Role::Head, &[], spec.hidden_size)?,
        };
        Ok(Self {
            layers: vec![layer],
            ends: Arc::new(ends),
        })
    }

    /// Splits off the first `num_layers` layers, for a pipeline stage of its own.
    pub fn take_layers(&mut self, num_layers: usize) -> Self {
        Self {
            layers: self.layers.drain(..num_layers).collect(),
            ends: Arc::clone(&self.ends),
        }
    }

    /// All matrices, in the order in which they are packed.
    fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let layers = self.layers.iter().flat_map(PackedLayer::matrices);
        layers.chain([&self.ends.head])
    }

    pub fn image(&self) -> PackedImage {
        PackedImage::new(self.matrices())
    }

    pub fn num_bytes(&self) -> usize {
        let embedding = match &self.ends.embedding {
            Embedding::Tied => 0,
            Embedding::Own(tensor) => tensor.num_bytes(),
        };
        self.matrices().map(PackedMatrix::num_bytes).sum::<usize>() + embedding
    }
}

impl PackedLayer {
    /// The form of all of the layer's matrices, and of their input rows.
    pub fn form(&self) -> Form {
        self.qkv.form
    }

    /// The layer's matrices, in the order in which they are packed.
    fn matrices(&self) -> [&PackedMatrix; 4] {
        [&self.qkv, &self.output, &self.gate_up, &self.down]
    }

    pub fn has_groups(&self) -> bool {
        self.matrices().into_iter().any(PackedMatrix::is_grouped)
    }
}

impl PackedEnds {
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

struct Packer<'a> {
    plan: FormatPlan,
    /// The image of packed weights; `None` once it turned out to hold other weights.
    image: Option<ImageReader>,
    kernels: &'a Kernels,
    pool: &'a mut ThreadPool,
}

impl Packer<'_> {
    fn layer(
        &mut self,
        spec: &LayerSpec,
        hidden: usize,
        layer: &LayerWeights,
    ) -> Result<PackedLayer, CpuError> {
        layer.check(spec, hidden).map_err(CpuError)?;
        let vector = |tensor| layer.get(tensor).map(elements);
        let with_bias = |matrix: LayerTensor| {
            let bias = matrix.bias().and_then(|bias| layer.get(bias));
            (&layer[matrix], bias)
        };
        let (gate, up) = (with_bias(LayerTensor::GATE), with_bias(LayerTensor::UP));
        let qkv = [LayerTensor::Q, LayerTensor::K, LayerTensor::V].map(with_bias);
        let input_len = |input: LayerInput| input.len(spec, hidden);
        Ok(PackedLayer {
            attention_norm: elements(&layer[LayerTensor::AttentionNorm]),
            qkv: self.matrix(Role::Projection, &qkv, hidden)?,
            q_norm: vector(LayerTensor::QNorm),
            k_norm: vector(LayerTensor::KNorm),
            output: self.matrix(
                Role::Projection,
                &[with_bias(LayerTensor::O)],
                input_len(LayerInput::AttentionOutput),
            )?,
            mlp_norm: elements(&layer[LayerTensor::MlpNorm]),
            gate_up: self.pairs(gate, up, hidden)?,
            down: self.matrix(
                Role::Down,
                &[with_bias(LayerTensor::DOWN)],
                input_len(LayerInput::MlpOutput),
            )?,
        })
    }

    /// Packs a matrix whose output channels are those of all parts, one after the other.
    fn matrix(
        &mut self,
        role: Role,
        parts: &[(&Tensor, Option<&Tensor>)],
        k: usize,
    ) -> Result<PackedMatrix, CpuError> {
        let lanes = parts.iter().flat_map(|&(weight, bias)| {
            (0..weight.shape[0]).map(move |row| Some(Lane { weight, bias, row }))
        });
        let lanes: Vec<_> = lanes.collect();
        self.pack(role, parts, &lanes, k)
    }

    /// Packs gate and up projections into common panels: 16 output channels of each in turn.
    fn pairs(
        &mut self,
        gate: (&Tensor, Option<&Tensor>),
        up: (&Tensor, Option<&Tensor>),
        k: usize,
    ) -> Result<PackedMatrix, CpuError> {
        let num_outputs = gate.0.shape[0];
        let lanes = (0..num_outputs).step_by(16).flat_map(|first| {
            [gate, up].into_iter().flat_map(move |(weight, bias)| {
                (first..first + 16)
                    .map(move |row| (row < num_outputs).then_some(Lane { weight, bias, row }))
            })
        });
        let lanes: Vec<_> = lanes.collect();
        self.pack(Role::Projection, &[gate, up], &lanes, k)
    }

    /// Packs the rows of `parts` in the order of `lanes`, or reads what an earlier start packed.
    fn pack(
        &mut self,
        role: Role,
        parts: &[(&Tensor, Option<&Tensor>)],
        lanes: &[Option<Lane<'_>>],
        k: usize,
    ) -> Result<PackedMatrix, CpuError> {
        let stored: Vec<_> = parts.iter().map(|(weight, _)| (*weight).into()).collect();
        let packing = self.plan.packing(role, &stored, k);
        let packed = self.pack_or_read(lanes, packing);
        parts.iter().for_each(|(weight, _)| weight.release());
        packed
    }

    fn pack_or_read(
        &mut self,
        lanes: &[Option<Lane<'_>>],
        packing: Packing,
    ) -> Result<PackedMatrix, CpuError> {
        let (kernels, pool) = (self.kernels, &mut *self.pool);
        if let Some(image) = self.image.as_mut().filter(|_| !packing.copies(lanes)) {
            let read = PackedMatrix::read(lanes, packing, image, kernels, pool);
            if let Some(matrix) = read.map_err(out_of_memory)? {
                return Ok(matrix);
            }
            self.image = None;
        }
        PackedMatrix::pack(lanes, packing, kernels, pool).map_err(out_of_memory)
    }
}

fn out_of_memory(error: io::Error) -> CpuError {
    CpuError(format!("no memory for the weights: {error}"))
}

/// Refuses models that the forward pass cannot compute.
pub fn check_spec(spec: &DecoderSpec) -> Result<(), CpuError> {
    let Some(first) = spec.layers.first() else {
        return Err(CpuError(String::from("the model has no layers")));
    };
    if spec.vocab_size == 0 || spec.hidden_size == 0 {
        return Err(CpuError(String::from(
            "vocab_size and hidden_size must not be 0",
        )));
    }
    let refused = [
        (spec.learned_positions, "learned positions"),
        (spec.embedding_scale != 1.0, "scaled embeddings"),
        (spec.norm.kind != NormKind::Rms, NOT_RMS),
        (spec.logit_scale != 1.0, "scaled logits"),
        (spec.logit_soft_cap.is_some(), "soft-capped logits"),
    ];
    if let Some((_, what)) = refused.into_iter().find(|(is_refused, _)| *is_refused) {
        return Err(not_computed("the model", what));
    }
    for (index, layer) in spec.layers.iter().enumerate() {
        check_layer(layer, &format!("layer {index}"))?;
        if layer != first {
            return Err(not_computed(
                &format!("layer {index}"),
                "another shape than layer 0",
            ));
        }
    }
    Ok(())
}

const NOT_RMS: &str = "norms other than RMS norms";

fn not_computed(who: &str, what: &str) -> CpuError {
    CpuError(format!(
        "{who} has {what}, which the CPU executor does not compute yet"
    ))
}

fn check_layer(layer: &LayerSpec, name: &str) -> Result<(), CpuError> {
    let attention = &layer.attention;
    let wrong = |what: String| Err(CpuError(format!("{name}: {what}")));
    if attention.num_kv_heads == 0 || !attention.num_heads.is_multiple_of(attention.num_kv_heads) {
        return wrong(format!(
            "{} query heads cannot share {} KV heads",
            attention.num_heads, attention.num_kv_heads
        ));
    }
    if attention.head_dim == 0 || !attention.head_dim.is_multiple_of(2) {
        return wrong(format!(
            "head_dim is {}; rotary embedding needs a positive even number",
            attention.head_dim
        ));
    }
    let mlp = match &layer.feed_forward {
        FeedForward::Mlp(mlp) => mlp,
        FeedForward::Experts(_) => return Err(not_computed(name, "experts")),
    };
    if mlp.intermediate_size == 0 {
        return wrong(String::from("intermediate_size must not be 0"));
    }
    let norms = [layer.attention_norms, layer.feed_forward_norms];
    let depends_on_context = attention.rotary.as_ref().is_some_and(|rotary| {
        use RotaryScaling::{Dynamic, LongRope};
        matches!(rotary.scaling, Dynamic { .. } | LongRope { .. })
    });
    let is_rms = |norm: &NormSpec| norm.kind == NormKind::Rms;
    let usual_scale = AttentionSpec::usual_scale(attention.head_dim);
    let refused = [
        (attention.window.is_some(), "a sliding window"),
        (attention.soft_cap.is_some(), "soft-capped attention"),
        (attention.scale != usual_scale, "an unusual attention scale"),
        (
            matches!(attention.qk_norm, Some(QkNorm::Whole(_))),
            "a norm over all heads together",
        ),
        (
            matches!(attention.qk_norm, Some(QkNorm::Heads(norm)) if !is_rms(&norm)),
            NOT_RMS,
        ),
        (
            depends_on_context,
            "rotary frequencies that depend on the context's length",
        ),
        (
            norms.iter().any(|norms| norms.before.is_none()),
            "a part whose input has no norm",
        ),
        (
            norms.iter().any(|norms| norms.after.is_some()),
            "a norm behind a part",
        ),
        (
            !norms
                .iter()
                .filter_map(|norms| norms.before.as_ref())
                .all(is_rms),
            NOT_RMS,
        ),
        (layer.residual_scale != 1.0, "a scaled residual stream"),
        (layer.is_parallel, "attention and MLP side by side"),
        (!mlp.is_gated, "an MLP without gates"),
        (
            mlp.activation != Activation::Silu,
            "an activation other than SiLU",
        ),
    ];
    match refused.into_iter().find(|(is_refused, _)| *is_refused) {
        Some((_, what)) => Err(not_computed(name, what)),
        None => Ok(()),
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
            let packed =
                PackedWeights::pack(spec, &weights, format, None, kernels, &mut pool).unwrap();
            let layer = &packed.layers[0];
            assert!(layer.down.hadamard, "{format:?}");
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
