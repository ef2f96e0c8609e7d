//! The memory of packed weights, from the shapes and types of a checkpoint's tensors.

use corella_model::{
    ByPart, DecoderSpec, DecoderWeights, DeviceError, ExpertSpec, FeedForward, LayerSpec,
    LayerTensor, LayerWeights, Mlp, MlpSpec, ModelPart, RecurrentSpec, StoredMatrices, Tensor,
    WeightFormat,
};

use crate::kernels::{Isa, PANEL_LANES, choose_kernels};

use super::check_spec;
use super::format_plan::{FormatPlan, Role};
use super::packed_layer::{OF_ALL, OF_EXPERTS, input_matrices, output_matrix, router_packing};

/// The packed bytes of each part of a model for an instruction set, by default the best one of this machine. Reads no
/// weights. Refuses the same models as packing.
pub fn packed_bytes(
    spec: &DecoderSpec,
    weights: &DecoderWeights,
    format: Option<WeightFormat>,
    isa: Option<Isa>,
) -> Result<ByPart, DeviceError> {
    check_spec(spec)?;
    let (_, kernels) = choose_kernels(isa)?;
    let head = weights.lm_head.as_ref().unwrap_or(&weights.embed);
    let stored = StoredMatrices::new(&weights.layers, head);
    let mut sizes = Sizes {
        plan: FormatPlan::new(format, &stored, kernels.tile_gemm.is_some())?,
        bytes: ByPart::default(),
    };
    let hidden = spec.hidden_size;
    for (layer, weights) in spec.layers.iter().zip(&weights.layers) {
        sizes.add_layer(layer, hidden, weights);
    }
    let head_bytes = sizes.matrix(Role::Head, &[head], spec.vocab_size, hidden);
    let (part, own) = match spec.tied_embeddings {
        true => (ModelPart::Embedding, 0),
        false => (ModelPart::Head, weights.embed.num_bytes()),
    };
    sizes.bytes.add(part, head_bytes);
    sizes.bytes.add(ModelPart::Embedding, own);
    let numbers = spec.num_parameters();
    // Learned positions, and the other additions to the embeddings of tokens.
    let tables = match &weights.per_layer {
        Some(ends) => {
            let projection = router_packing(&ends.projection, hidden);
            let num_bytes = projection.num_bytes(ends.projection.shape[0]);
            let num_bytes = ends.table.num_bytes() + num_bytes;
            sizes.bytes.add(ModelPart::Embedding, num_bytes);
            0
        }
        None => numbers.of(ModelPart::Embedding) as usize - spec.vocab_size * hidden,
    };
    sizes.add_floats(ModelPart::Embedding, tables);
    sizes.add_floats(ModelPart::Norm, numbers.of(ModelPart::Norm) as usize);
    Ok(sizes.bytes)
}

struct Sizes {
    plan: FormatPlan,
    bytes: ByPart,
}

impl Sizes {
    /// Adds vectors, which are f32 in memory.
    fn add_floats(&mut self, part: ModelPart, num_elements: usize) {
        self.bytes.add(part, num_elements * size_of::<f32>());
    }

    /// The size of a matrix that combines others.
    fn matrix(&self, role: Role, parts: &[&Tensor], num_lanes: usize, k: usize) -> usize {
        let stored: Vec<_> = parts.iter().map(|&part| part.into()).collect();
        self.plan.packing(role, &stored, k).num_bytes(num_lanes)
    }

    fn add_layer(&mut self, layer: &LayerSpec, hidden: usize, weights: &LayerWeights) {
        let tensors = input_matrices(layer).iter();
        let qkv: Vec<_> = tensors.map(|tensor| &weights[*tensor]).collect();
        let num_lanes = qkv.iter().map(|tensor| tensor.shape[0]).sum();
        let qkv = self.matrix(Role::Projection, &qkv, num_lanes, hidden);
        let gate = weights.get(LayerTensor::AttentionGate).map_or(0, |gate| {
            self.matrix(Role::Projection, &[gate], gate.shape[0], hidden)
        });
        let output = [&weights[output_matrix(layer)]];
        let output = self.matrix(Role::Projection, &output, hidden, layer.mixed_len());
        self.bytes.add(ModelPart::Attention, qkv + gate + output);
        let num_floats = match &layer.recurrent {
            None => 0,
            Some(RecurrentSpec::GatedDelta(spec)) => {
                spec.num_channels() * spec.kernel_len + 2 * spec.num_value_heads
            }
            Some(RecurrentSpec::ShortConvolution(spec)) => {
                spec.num_channels * (spec.kernel_len + usize::from(spec.bias))
            }
        };
        self.add_floats(ModelPart::Attention, num_floats);
        let (part, bytes) = match &layer.feed_forward {
            FeedForward::Mlp(mlp) => {
                let bytes = self.mlps(OF_ALL, mlp, hidden, weights, &[Mlp::Only]);
                (ModelPart::Mlp, bytes)
            }
            FeedForward::Experts(experts) => {
                (ModelPart::Experts, self.experts(experts, hidden, weights))
            }
        };
        self.bytes.add(part, bytes);
        if let Some(spec) = &layer.per_layer {
            let gate = [&weights[LayerTensor::PerLayerGate]];
            let gate = self.matrix(Role::Projection, &gate, spec.len, hidden);
            let output = [&weights[LayerTensor::PerLayerOutput]];
            let output = self.matrix(Role::Projection, &output, hidden, spec.len);
            self.bytes.add(ModelPart::Embedding, gate + output);
        }
    }

    fn experts(&self, spec: &ExpertSpec, hidden: usize, weights: &LayerWeights) -> usize {
        let weighed = weights.get(LayerTensor::SharedWeight).map_or(0, |_| 1);
        let router = router_packing(&weights[LayerTensor::Router], hidden);
        let experts: Vec<_> = (0..spec.num_experts).map(Mlp::Expert).collect();
        let shared = spec.shared.as_ref().map_or(0, |shared| {
            self.mlps(OF_ALL, &shared.mlp, hidden, weights, &[Mlp::Shared])
        });
        router.num_bytes(spec.num_experts + weighed)
            + self.mlps(OF_EXPERTS, &spec.expert, hidden, weights, &experts)
            + shared
    }

    /// The size of MLPs of the same shape, each of which begins with a panel of its own.
    fn mlps(
        &self,
        [first, down]: [Role; 2],
        spec: &MlpSpec,
        hidden: usize,
        weights: &LayerWeights,
        mlps: &[Mlp],
    ) -> usize {
        let inner = spec.intermediate_size;
        let tensors = |of: fn(Mlp) -> LayerTensor| {
            let tensors = mlps.iter().map(move |&mlp| &weights[of(mlp)]);
            tensors.collect::<Vec<_>>()
        };
        let mut ups = tensors(LayerTensor::Up);
        let mut num_lanes = inner;
        if spec.is_gated {
            ups.extend(tensors(LayerTensor::Gate));
            num_lanes = 2 * inner.next_multiple_of(PANEL_LANES / 2);
        }
        let lanes_of_all = |num_lanes: usize| mlps.len() * num_lanes.next_multiple_of(PANEL_LANES);
        let downs = tensors(LayerTensor::Down);
        self.matrix(first, &ups, lanes_of_all(num_lanes), hidden)
            + self.matrix(down, &downs, lanes_of_all(hidden), inner)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use corella_model::{Checkpoint, DType};

    use super::*;
    use crate::kernels::kernels;
    use crate::system::ThreadPool;
    use crate::weights::{PackOptions, PackedWeights};

    /// Every test model, in every format, takes the predicted memory.
    #[test]
    fn packed_weights_take_what_was_foretold() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
        let folders = ["golden", "quantized", "gguf", "gguf/family"];
        let entries = folders
            .iter()
            .flat_map(|name| fs::read_dir(tests.join(name)).unwrap());
        let checkpoints = entries.filter_map(|entry| Checkpoint::open(entry.unwrap().path()).ok());
        let isa = Isa::Portable;
        let mut pool = ThreadPool::new(1).unwrap();
        let mut num_models = 0;
        for checkpoint in checkpoints {
            let spec = &checkpoint.config().spec;
            let weights = checkpoint.weights().unwrap();
            num_models += 1;
            for format in [
                None,
                Some(WeightFormat::Float(DType::Bf16)),
                Some(WeightFormat::Int8),
                Some(WeightFormat::INT8_GROUPED),
                Some(WeightFormat::INT4),
            ] {
                let foretold = packed_bytes(spec, &weights, format, Some(isa)).unwrap();
                let kernels = kernels(isa).unwrap();
                let options = PackOptions {
                    format,
                    image: None,
                    on_layer: &|_| (),
                };
                let packed = PackedWeights::pack(spec, &weights, options, kernels, &mut pool);
                let found = packed.unwrap().num_bytes() as u64;
                let norms = foretold.of(ModelPart::Norm);
                let name = checkpoint.config().architecture;
                assert_eq!(foretold.total() - norms, found, "{name:?} {format:?}");
            }
        }
        assert!(num_models > 30, "{num_models}");
    }
}
