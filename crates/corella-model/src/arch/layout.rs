//! The places of a family's tensors in a format, and their conversions.

use std::borrow::Cow;

use crate::{HeadActivation, LayerTensor, Mlp};

/// The places of a model's tensors. Names are without `.weight` and `.bias`.
#[derive(Clone, Copy)]
pub struct Layout {
    /// The file or part that gives the tensors' shapes, for error messages.
    pub described_by: &'static str,
    /// Pairs of a prefix of all tensor names except the head's, and the head's name. Folders of multimodal models keep
    /// their decoder behind a prefix, and folders of embedding models may be a decoder alone, without a prefix. Empty
    /// for a family that is not read from this format.
    pub bodies: &'static [(&'static str, &'static str)],
    pub embed: &'static str,
    /// The table of learned positions.
    pub positions: &'static str,
    /// The table of vectors that are added to the tokens of first and second texts, in encoders.
    pub segments: &'static str,
    /// The norm of the embeddings, in encoders.
    pub embedding_norm: &'static str,
    /// The layers' own inputs: a table, the projection of embeddings and its norm.
    pub per_layer: [&'static str; 3],
    /// The norm before the head. `{last}` stands for the index of the last layer: in some families, its output norm is
    /// the norm before the head.
    pub norm: &'static str,
    /// The prefix before a layer's number and the name of one of its tensors.
    pub layers: &'static str,
    pub of_layer: fn(LayerTensor) -> Stored,
    /// Another place of a layer's tensor, used in files that have a tensor there. Some writers of the same models store
    /// the matrices of all experts as one tensor, and rename some other tensors.
    pub elsewhere: fn(LayerTensor) -> Option<Stored>,
    /// Whether norms multiply by 1 plus their weights.
    pub norms_lack_one: bool,
    /// Whether files store the value heads of gated delta networks in this order: the first value head of each key
    /// head, then the second value head of each key head, and so on.
    pub tiles_value_heads: bool,
    /// Whether files store the rates of gated delta networks as the factor of the projected decays, instead of the
    /// factor's logarithm.
    pub has_plain_rates: bool,
    /// Whether rows of queries and keys that RoPE rotates together are neighbours. Otherwise they are half of the
    /// rotated elements apart.
    pub rotates_neighbours: bool,
    /// The prefixes of tensors outside of the decoder.
    pub other_parts: &'static [&'static str],
    /// The prefix of a draft head's tensors. Empty for families without one.
    pub draft_head: &'static str,
    /// The layers that turn the pooled hidden state of a text into scores of classes, in order, in encoders. Empty for
    /// families without them.
    pub class_head: &'static [HeadPart],
    /// Whether layers after the decoder's last layer belong to a draft head.
    pub has_more_layers: bool,
    /// The suffixes of the names of tensors that are no weights.
    pub buffers: &'static [&'static str],
}

/// A layer of the class head, which follows an encoder and makes scores of classes.
#[derive(Clone, Copy)]
pub enum HeadPart {
    /// A matrix, with a bias if the files have one, and an activation function.
    Dense(&'static str, HeadActivation),
    /// A norm, with a bias if the files have one.
    Norm(&'static str),
}

/// The place of a layer's tensor.
#[derive(Default)]
pub struct Stored {
    pub name: Cow<'static, str>,
    /// The matrices that are stored as one, from the first output on. Empty for a separate matrix.
    pub parts: &'static [LayerTensor],
    /// Whether the matrix is stored as `[in, out]`.
    pub is_transposed: bool,
    /// The index of the expert, if the matrices of all experts are stored as one tensor.
    pub expert: Option<usize>,
    /// The matrix's place, 0 or 1, if the outputs of two matrices alternate.
    pub alternate: Option<usize>,
    /// Whether the parts alternate head by head, instead of lying one after the other.
    pub takes_turns: bool,
    /// Whether the name is complete, without `.weight`. A bias then ends in `_bias`.
    pub is_complete: bool,
    /// The index of a size of 1 in the shape. The tensor is read with and without it.
    pub one_at: Option<usize>,
}

impl Layout {
    /// Hugging Face folders, in the layout of Llama and its many relatives.
    pub const FOLDER: Self = Self {
        described_by: "config.json",
        bodies: &[("model.", "lm_head"), ("", "lm_head")],
        embed: "embed_tokens",
        positions: "embed_positions",
        segments: "embeddings.token_type_embeddings",
        embedding_norm: "embeddings.LayerNorm",
        per_layer: [
            "embed_tokens_per_layer",
            "per_layer_model_projection",
            "per_layer_projection_norm",
        ],
        norm: "norm",
        layers: "layers",
        of_layer: folder_name,
        elsewhere: |tensor| fused_expert(tensor, "mlp.experts"),
        norms_lack_one: false,
        tiles_value_heads: false,
        has_plain_rates: false,
        rotates_neighbours: false,
        other_parts: &[],
        draft_head: "",
        class_head: &[],
        has_more_layers: false,
        // Older exporters stored the frequencies of RoPE.
        buffers: &[".rotary_emb.inv_freq"],
    };

    /// GGUF files. Their converter has one name for each tensor, in all families.
    pub const FILE: Self = Self {
        described_by: "the metadata",
        bodies: &[("", "output")],
        embed: "token_embd",
        positions: "position_embd",
        segments: "token_types",
        embedding_norm: "token_embd_norm",
        per_layer: [
            "per_layer_token_embd",
            "per_layer_model_proj",
            "per_layer_proj_norm",
        ],
        norm: "output_norm",
        layers: "blk",
        of_layer: file_name,
        elsewhere: fused_expert_in_file,
        // The configuration reader uses these.
        buffers: &[
            super::rotary::DIVISORS,
            super::rotary::SHORT_DIVISORS,
            super::rotary::LONG_DIVISORS,
        ],
        ..Self::FOLDER
    };

    /// For families that are not read from files.
    pub const NO_FILE: Self = Self {
        bodies: &[],
        ..Self::FILE
    };

    /// GGUF files in which RoPE rotates neighbours. For most of these families, the converter has reordered the rows.
    pub const FILE_OF_NEIGHBOURS: Self = Self {
        rotates_neighbours: true,
        ..Self::FILE
    };

    /// The same layout with other places of layers' tensors.
    pub const fn named(self, of_layer: fn(LayerTensor) -> Stored) -> Self {
        Self { of_layer, ..self }
    }

    /// The same layout with other places of tensors in some files.
    pub const fn named_elsewhere(self, elsewhere: fn(LayerTensor) -> Option<Stored>) -> Self {
        Self { elsewhere, ..self }
    }

    /// Folders of a multimodal model with this decoder, under all names that Transformers has written.
    pub const fn of_seeing(self) -> Self {
        Self {
            bodies: &[
                ("language_model.model.", "language_model.lm_head"),
                ("model.language_model.", "lm_head"),
                ("language_model.", "lm_head"),
            ],
            other_parts: &[
                "vision_tower.",
                "multi_modal_projector.",
                "model.vision_tower.",
                "model.multi_modal_projector.",
            ],
            ..self
        }
    }

    /// The name of the norm before the head, in a model of `num_layers` layers.
    pub fn norm_name(&self, num_layers: usize) -> String {
        let last = num_layers.saturating_sub(1).to_string();
        self.norm.replace("{last}", &last)
    }

    /// The prefix of the names of a layer's tensors. It begins with `body`.
    pub fn prefix(&self, body: &str, layer: usize) -> String {
        format!("{body}{}.{layer}.", self.layers)
    }

    /// The name of a layer's tensor, with `body` and without `.weight`. For a bias, the name of the biased tensor.
    pub fn name(&self, body: &str, layer: usize, tensor: LayerTensor) -> String {
        let stored = (self.of_layer)(tensor.owner().unwrap_or(tensor));
        self.prefix(body, layer) + &stored.name
    }

    /// The whole name of a layer's tensor, with `body`.
    pub fn full_name(&self, body: &str, layer: usize, tensor: LayerTensor) -> String {
        let stored = (self.of_layer)(tensor.owner().unwrap_or(tensor));
        self.prefix(body, layer) + &stored.full_name(tensor.owner().is_some())
    }
}

impl Stored {
    pub fn whole(name: impl Into<Cow<'static, str>>) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// A tensor whose name does not end in `.weight`.
    pub fn complete(name: impl Into<Cow<'static, str>>) -> Self {
        Self {
            is_complete: true,
            ..Self::whole(name)
        }
    }

    /// A vector that is written as a matrix of one row.
    pub fn row(self) -> Self {
        Self {
            one_at: Some(0),
            ..self
        }
    }

    /// A convolution of single channels, which is written with a size of 1 between channels and tokens.
    pub fn by_channel(self) -> Self {
        Self {
            one_at: Some(1),
            ..self
        }
    }

    /// Several matrices stored as one. The requested matrix is among `parts`.
    pub fn fused(name: &'static str, parts: &'static [LayerTensor]) -> Self {
        Self {
            parts,
            ..Self::whole(name)
        }
    }

    /// Several matrices stored as one. Their rows alternate head by head: a block of each matrix for the first head,
    /// then for the second.
    pub fn by_head(name: &'static str, parts: &'static [LayerTensor]) -> Self {
        Self {
            takes_turns: true,
            ..Self::fused(name, parts)
        }
    }

    pub fn transposed(self) -> Self {
        Self {
            is_transposed: true,
            ..self
        }
    }

    /// One of two matrices of the same shape whose outputs alternate.
    pub fn alternating(self, place: usize) -> Self {
        Self {
            alternate: Some(place),
            ..self
        }
    }

    /// The matrix of an expert in the tensor of all experts of the layer.
    fn of_expert(self, expert: usize) -> Self {
        Self {
            expert: Some(expert),
            ..self
        }
    }

    /// The name in a file, of the tensor or of its bias.
    pub fn full_name(&self, is_bias: bool) -> String {
        let name = &self.name;
        match (is_bias, self.is_complete) {
            (true, false) => format!("{name}.bias"),
            (true, true) => format!("{name}_bias"),
            (false, false) => format!("{name}.weight"),
            (false, true) => name.to_string(),
        }
    }

    /// Whether the tensor is stored unchanged as a tensor of the file.
    pub fn is_plain(&self) -> bool {
        self.parts.is_empty() && !self.is_transposed && self.expert.is_none()
    }
}

/// Matrices that some families store as one.
pub const QKV: &[LayerTensor] = &[LayerTensor::Q, LayerTensor::K, LayerTensor::V];
pub const GATE_UP: &[LayerTensor] = &[LayerTensor::GATE, LayerTensor::UP];

/// The names that most families have in folders.
pub fn folder_name(tensor: LayerTensor) -> Stored {
    let of_mlp = |mlp, name: &str| {
        Stored::whole(match mlp {
            Mlp::Only => format!("mlp.{name}_proj"),
            Mlp::Shared => format!("mlp.shared_expert.{name}_proj"),
            Mlp::Expert(expert) => format!("mlp.experts.{expert}.{name}_proj"),
        })
    };
    Stored::whole(match tensor {
        LayerTensor::AttentionNorm => "input_layernorm",
        LayerTensor::Q => "self_attn.q_proj",
        LayerTensor::K => "self_attn.k_proj",
        LayerTensor::V => "self_attn.v_proj",
        LayerTensor::O => "self_attn.o_proj",
        LayerTensor::QNorm => "self_attn.q_norm",
        LayerTensor::KNorm => "self_attn.k_norm",
        LayerTensor::MlpNorm => "post_attention_layernorm",
        LayerTensor::Gate(mlp) => return of_mlp(mlp, "gate"),
        LayerTensor::Up(mlp) => return of_mlp(mlp, "up"),
        LayerTensor::Down(mlp) => return of_mlp(mlp, "down"),
        LayerTensor::Router => "mlp.gate",
        LayerTensor::Sinks => return Stored::complete("self_attn.sinks"),
        LayerTensor::SelectionBias => {
            return Stored::complete("mlp.gate.e_score_correction_bias");
        }
        LayerTensor::SharedWeight => return Stored::whole("mlp.shared_expert_gate").row(),
        other => return Stored::whole(other.to_string()),
    })
}

/// The place of an expert's matrix in the modules of Transformers 5. `save_pretrained` can store the modules in this
/// form. `experts` is the name of the module with all experts of the layer.
pub fn fused_expert(tensor: LayerTensor, experts: &str) -> Option<Stored> {
    use LayerTensor::{Down, Gate, Up};
    Some(match tensor {
        Gate(Mlp::Expert(expert)) | Up(Mlp::Expert(expert)) => Stored {
            parts: GATE_UP_OF_EXPERTS,
            ..Stored::complete(format!("{experts}.gate_up_proj")).of_expert(expert)
        },
        Down(Mlp::Expert(expert)) => {
            Stored::complete(format!("{experts}.down_proj")).of_expert(expert)
        }
        _ => return None,
    })
}

/// The place of an expert's gate and up matrices in GGUF files whose converter has stacked them.
fn fused_expert_in_file(tensor: LayerTensor) -> Option<Stored> {
    match tensor {
        LayerTensor::Gate(Mlp::Expert(expert)) | LayerTensor::Up(Mlp::Expert(expert)) => {
            Some(Stored::fused("ffn_gate_up_exps", GATE_UP_OF_EXPERTS).of_expert(expert))
        }
        _ => None,
    }
}

/// The parts of the tensor that holds the gate and up matrices of all experts. Expert 0 stands for each expert.
const GATE_UP_OF_EXPERTS: &[LayerTensor] = &[
    LayerTensor::Gate(Mlp::Expert(0)),
    LayerTensor::Up(Mlp::Expert(0)),
];

/// The names in GGUF files.
pub fn file_name(tensor: LayerTensor) -> Stored {
    let of_mlp = |mlp, name: &str| match mlp {
        Mlp::Only => Stored::whole(format!("ffn_{name}")),
        Mlp::Shared => Stored::whole(format!("ffn_{name}_shexp")),
        Mlp::Expert(expert) => Stored::whole(format!("ffn_{name}_exps")).of_expert(expert),
    };
    Stored::whole(match tensor {
        LayerTensor::AttentionNorm => "attn_norm",
        LayerTensor::Q => "attn_q",
        LayerTensor::K => "attn_k",
        LayerTensor::V => "attn_v",
        LayerTensor::O => "attn_output",
        LayerTensor::QNorm => "attn_q_norm",
        LayerTensor::KNorm => "attn_k_norm",
        LayerTensor::AttentionOutputNorm => "post_attention_norm",
        LayerTensor::MlpNorm => "ffn_norm",
        LayerTensor::MlpOutputNorm => "post_ffw_norm",
        LayerTensor::Gate(mlp) => return of_mlp(mlp, "gate"),
        LayerTensor::Up(mlp) => return of_mlp(mlp, "up"),
        LayerTensor::Down(mlp) => return of_mlp(mlp, "down"),
        LayerTensor::Router => "ffn_gate_inp",
        LayerTensor::SelectionBias => return Stored::complete("exp_probs_b.bias"),
        LayerTensor::Sinks => "attn_sinks",
        LayerTensor::SharedWeight => "ffn_gate_inp_shexp",
        other => return Stored::whole(other.to_string()),
    })
}
