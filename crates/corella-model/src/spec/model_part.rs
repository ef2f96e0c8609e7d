//! The parts of a decoder in reports of its size: the parameters of each, and their bytes.

use strum::VariantArray;

use crate::{
    DecoderSpec, DecoderWeights, FeedForward, LayerTensor, Mlp, NormSpec, Tensor, TensorSpec,
};

/// A part of a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, VariantArray)]
pub enum ModelPart {
    /// The embeddings of tokens, and learned embeddings of positions. A tied head is counted here.
    Embedding,
    Attention,
    /// The feed-forward parts of layers without experts.
    Mlp,
    /// The feed-forward parts of layers with experts, including their routers and shared experts.
    Experts,
    Norm,
    Head,
}

/// An amount for each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByPart([u64; ModelPart::ALL.len()]);

impl ModelPart {
    pub const ALL: &'static [Self] = Self::VARIANTS;
}

impl ByPart {
    pub fn add(&mut self, part: ModelPart, amount: usize) {
        self.0[part as usize] += amount as u64;
    }

    pub fn of(&self, part: ModelPart) -> u64 {
        self.0[part as usize]
    }

    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl LayerTensor {
    /// The part of a layer's tensor.
    fn part(self, feed_forward: &FeedForward) -> ModelPart {
        let owner = self.owner().unwrap_or(self);
        match owner {
            _ if owner.is_norm() || owner == Self::DeltaNorm => ModelPart::Norm,
            Self::Q | Self::K | Self::V | Self::O | Self::AttentionGate => ModelPart::Attention,
            Self::DeltaQ | Self::DeltaK | Self::DeltaV | Self::DeltaO => ModelPart::Attention,
            Self::DeltaGate | Self::DeltaStrength | Self::DeltaDecay => ModelPart::Attention,
            Self::PerLayerGate | Self::PerLayerOutput => ModelPart::Embedding,
            Self::DeltaConvolution | Self::DeltaDecayBias | Self::DeltaRate => ModelPart::Attention,
            Self::ConvolutionInput | Self::Convolution | Self::ConvolutionOutput => {
                ModelPart::Attention
            }
            _ => match feed_forward {
                FeedForward::Mlp(_) => ModelPart::Mlp,
                FeedForward::Experts(_) => ModelPart::Experts,
            },
        }
    }
}

impl NormSpec {
    /// The number of the norm's vectors: weights and, if present, a bias.
    fn num_vectors(&self) -> usize {
        1 + usize::from(self.has_bias())
    }
}

impl DecoderSpec {
    /// The number of parameters.
    pub fn num_parameters(&self) -> ByPart {
        self.count(|_, _| true)
    }

    /// The number of parameters that one token uses: all parameters except the unchosen experts'.
    pub fn num_active_parameters(&self) -> ByPart {
        self.count(|feed_forward, tensor| match (feed_forward, tensor) {
            (
                FeedForward::Experts(experts),
                LayerTensor::Gate(Mlp::Expert(expert))
                | LayerTensor::Up(Mlp::Expert(expert))
                | LayerTensor::Down(Mlp::Expert(expert)),
            ) => expert < experts.num_experts_per_token,
            _ => true,
        })
    }

    fn count(&self, counts: impl Fn(&FeedForward, LayerTensor) -> bool) -> ByPart {
        let mut numbers = ByPart::default();
        let embedding = self.vocab_size * self.hidden_size;
        numbers.add(ModelPart::Embedding, embedding);
        if self.learned_positions {
            numbers.add(ModelPart::Embedding, self.max_position * self.hidden_size);
        }
        if let Some(spec) = self.per_layer() {
            let num_elements = self.layers.len() * spec.len;
            let num_rows = self.vocab_size + self.hidden_size;
            numbers.add(ModelPart::Embedding, num_rows * num_elements);
            numbers.add(ModelPart::Norm, spec.len);
        }
        if let Some(encoder) = &self.encoder {
            let num_rows = encoder.first_position * usize::from(self.learned_positions);
            let num_rows = num_rows + encoder.num_segments;
            numbers.add(ModelPart::Embedding, num_rows * self.hidden_size);
            let norm = encoder.embedding_norm.map_or(0, |norm| norm.num_vectors());
            numbers.add(ModelPart::Norm, norm * self.hidden_size);
        }
        if !self.tied_embeddings {
            numbers.add(ModelPart::Head, embedding);
        }
        numbers.add(ModelPart::Norm, self.norm.num_vectors() * self.hidden_size);
        for layer in &self.layers {
            for TensorSpec { tensor, shape } in layer.tensors(self.hidden_size) {
                let owner = tensor.owner().unwrap_or(tensor);
                if counts(&layer.feed_forward, owner) {
                    let part = tensor.part(&layer.feed_forward);
                    numbers.add(part, shape.iter().product());
                }
            }
        }
        numbers
    }
}

impl DecoderWeights {
    /// The bytes of each part in the checkpoint's files.
    pub fn stored_bytes(&self, spec: &DecoderSpec) -> ByPart {
        let mut bytes = ByPart::default();
        let ends = [
            (ModelPart::Embedding, Some(&self.embed)),
            (ModelPart::Embedding, self.positions.as_ref()),
            (ModelPart::Norm, Some(&self.norm)),
            (ModelPart::Norm, self.norm_bias.as_ref()),
            (ModelPart::Head, self.lm_head.as_ref()),
            (
                ModelPart::Embedding,
                self.per_layer.as_ref().map(|it| &it.table),
            ),
            (
                ModelPart::Embedding,
                self.per_layer.as_ref().map(|it| &it.projection),
            ),
            (ModelPart::Norm, self.per_layer.as_ref().map(|it| &it.norm)),
        ];
        for (part, tensor) in ends {
            bytes.add(part, tensor.map_or(0, |tensor| tensor.stored_bytes()));
        }
        let encoder = &self.encoder;
        for (part, tensor) in [
            (ModelPart::Embedding, &encoder.segments),
            (ModelPart::Norm, &encoder.embedding_norm),
            (ModelPart::Norm, &encoder.embedding_norm_bias),
        ] {
            bytes.add(part, tensor.as_ref().map_or(0, Tensor::stored_bytes));
        }
        for (layer, weights) in spec.layers.iter().zip(&self.layers) {
            for (tensor, values) in weights.iter() {
                bytes.add(tensor.part(&layer.feed_forward), values.stored_bytes());
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Checkpoint;

    /// Gemma's norms, GPT-2's transposed matrices, Phi-3's fused ones and GGUF's experts are stored in another form
    /// than they are used in; all tensors are counted in their stored form.
    #[test]
    fn all_bytes_and_parameters_of_files_are_counted_once() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests");
        for (name, is_quantised) in [
            ("encoder/modernbert-mean", false),
            ("encoder/nomic-bert-mean", false),
            ("golden/cohere", false),
            ("golden/gemma3", false),
            ("golden/gemma4", false),
            ("golden/gemma4-per-layer", false),
            ("golden/gemma4-experts", false),
            ("golden/gpt2", false),
            ("golden/llama-gqa-untied-f16", false),
            ("golden/ernie4-5-moe", false),
            ("golden/glm4-moe", false),
            ("golden/lfm2", false),
            ("golden/lfm2-moe", false),
            ("golden/ministral3", false),
            ("golden/mixtral", false),
            ("golden/olmo2", false),
            ("golden/phi3", false),
            ("golden/qwen2-moe", false),
            ("golden/qwen3-gqa-tied-sharded", false),
            ("golden/qwen3-5", false),
            ("golden/qwen3-moe", false),
            ("golden/qwen3-next", false),
            ("gguf/family/gemma3.gguf", false),
            ("gguf/family/mixtral.gguf", false),
            ("gguf/family/phi3.gguf", false),
            ("quantized/int8", true),
            ("quantized/awq", true),
        ] {
            let checkpoint = Checkpoint::open(tests.join(name)).unwrap();
            let spec = &checkpoint.config().spec;
            let totals = checkpoint.totals().unwrap();
            let stored = checkpoint.weights().unwrap().stored_bytes(spec);
            let others = totals.num_bytes - stored.total();
            // Converters of GGUF store the divisors of RoPE beside the decoder's tensors, and quantisers
            // the shapes of matrices.
            assert!(
                others == 0 || others < totals.num_bytes / 20,
                "{name}: {others}"
            );
            if !is_quantised && !name.ends_with("phi3.gguf") {
                assert_eq!(others, 0, "{name}");
                assert_eq!(spec.num_parameters().total(), totals.num_elements, "{name}");
            }
        }
    }

    #[test]
    fn a_token_meets_the_experts_that_it_chooses() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let checkpoint = Checkpoint::open(tests.join("qwen3-moe")).unwrap();
        let spec = &checkpoint.config().spec;
        let (all, active) = (spec.num_parameters(), spec.num_active_parameters());
        let num_idle = spec.layers.iter().map(|layer| match &layer.feed_forward {
            FeedForward::Experts(experts) => {
                let num_idle = experts.num_experts - experts.num_experts_per_token;
                num_idle * 3 * experts.expert.intermediate_size * spec.hidden_size
            }
            FeedForward::Mlp(_) => 0,
        });
        let idle = num_idle.sum::<usize>() as u64;
        assert!(idle > 0);
        assert_eq!(all.total() - active.total(), idle);
        assert_eq!(
            all.of(ModelPart::Experts) - active.of(ModelPart::Experts),
            idle
        );
    }
}
