//! The outline of a model whose family is unknown, or whose configuration is refused: the sizes under names that nearly
//! all families share.

use std::borrow::Cow;
use std::path::Path;

use serde_json::Value;

use crate::arch::base::{
    HEAD_DIM, HIDDEN_SIZE, INTERMEDIATE_SIZE, MAX_POSITION, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS,
    VOCAB_SIZE, WINDOW, vocab_size,
};
use crate::arch::field::Field;
use crate::arch::{FAMILIES, Fields, FileFields, FolderFields, closest};
use crate::checkpoint::Source;
use crate::file::gguf::TOKENS;
use crate::json::file_name::CONFIG;
use crate::json::json_object::{self, JsonObject};
use crate::{Checkpoint, CheckpointError, TensorTotals};

/// A model by its files alone.
pub struct Outline {
    source: Source,
    /// The name of the architecture in the model's files.
    pub architecture: Option<String>,
    /// The supported architecture with the closest name, if the model's own is not supported.
    pub closest: Option<&'static str>,
    pub sizes: OutlineSizes,
}

/// Sizes of a decoder; `None` for a size without a common name in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OutlineSizes {
    pub num_layers: Option<usize>,
    pub hidden_size: Option<usize>,
    pub intermediate_size: Option<usize>,
    pub num_heads: Option<usize>,
    pub num_kv_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub window: Option<usize>,
    pub num_experts: Option<usize>,
    pub num_experts_per_token: Option<usize>,
    pub vocab_size: Option<usize>,
    pub max_position: Option<usize>,
}

/// The families' names of one size, the most common one first.
type Names = &'static [Field];

const LAYERS: Names = &[
    NUM_LAYERS,
    Field::of_folder("n_layer"),
    Field::of_folder("n_layers"),
    Field::of_folder("num_layers"),
];
const HIDDEN: Names = &[
    HIDDEN_SIZE,
    Field::of_folder("n_embd"),
    Field::of_folder("d_model"),
];
const INTERMEDIATE: Names = &[
    INTERMEDIATE_SIZE,
    Field::of_folder("ffn_hidden_size"),
    Field::of_folder("ffn_dim"),
    Field::of_folder("n_inner"),
];
const HEADS: Names = &[
    NUM_HEADS,
    Field::of_folder("n_head"),
    Field::of_folder("n_heads"),
];
const KV_HEADS: Names = &[
    NUM_KV_HEADS,
    Field::of_folder("n_head_kv"),
    Field::of_folder("num_kv_heads"),
    Field::of_folder("multi_query_group_num"),
];
const EXPERTS: Names = &[
    Field::new("num_experts", "expert_count"),
    Field::of_folder("num_local_experts"),
    Field::of_folder("n_routed_experts"),
    Field::of_folder("moe_num_experts"),
];
const CHOSEN: Names = &[
    Field::new("num_experts_per_tok", "expert_used_count"),
    Field::of_folder("num_experts_per_token"),
    Field::of_folder("moe_topk"),
    Field::of_folder("moe_k"),
];
const CONTEXT: Names = &[
    MAX_POSITION,
    Field::of_folder("n_positions"),
    Field::of_folder("max_seq_len"),
    Field::of_folder("seq_length"),
];

impl Outline {
    /// Reads a folder or a GGUF file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::from_source(Source::open(path.as_ref(), None)?)
    }

    /// Reads files that are part of the binary.
    pub fn from_static(files: &[(&str, &'static [u8])]) -> Result<Self, CheckpointError> {
        Self::from_source(Source::from_static(files))
    }

    fn from_source(source: Source) -> Result<Self, CheckpointError> {
        let (architecture, closest, sizes) = match &source {
            Source::Gguf(file) => {
                let fields = FileFields::new(file)?;
                let name = fields.architecture();
                let names = FAMILIES.map(|family| family.gguf);
                let mut sizes = OutlineSizes::read(&fields);
                let tokens = file.metadata.texts(TOKENS).ok().map(|tokens| tokens.len());
                let rows = vocab_size(&fields).ok();
                sizes.vocab_size = rows.or(tokens);
                (Some(name.to_owned()), close_to(&names, name), sizes)
            }
            _ => {
                let config = json_object::parse(&source.label(CONFIG), &source.config()?)?;
                let named = config.get("architectures").and_then(|list| list.get(0));
                let named = named.and_then(Value::as_str);
                let names = FAMILIES.map(|family| family.architecture);
                // Multimodal models describe their decoder in an object of its own.
                let text = config.get("text_config").and_then(Value::as_object);
                let object = JsonObject::new(CONFIG, text.unwrap_or(&config));
                let sizes = OutlineSizes::read(&FolderFields::new(object));
                let is_decoder =
                    |name: &&str| FAMILIES.iter().any(|family| family.decoder == *name);
                let unknown = named.filter(|name| !is_decoder(name));
                let closest = unknown.and_then(|name| close_to(&names, name));
                (named.map(str::to_owned), closest, sizes)
            }
        };
        Ok(Self {
            source,
            architecture,
            closest,
            sizes,
        })
    }

    /// Reads a file of the checkpoint, as [`Checkpoint::file`] does.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        self.source.read(name)
    }

    /// Reads a file that every model has.
    pub fn required_file(&self, name: &str) -> Result<Cow<'static, [u8]>, CheckpointError> {
        self.source.required(name)
    }

    /// Counts the tensors of all files.
    pub fn totals(&self) -> Result<TensorTotals, CheckpointError> {
        Ok(self.source.tensors()?.totals())
    }

    /// Whether the model is one GGUF file, or several that belong together.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf(_))
    }

    /// The checkpoint, if Corella can read its configuration.
    pub fn into_checkpoint(self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::from_source(self.source)
    }
}

/// The closest supported name, unless the name itself is supported.
fn close_to(names: &[&'static str], name: &str) -> Option<&'static str> {
    let is_known = names.contains(&name);
    closest(names, name).filter(|_| !is_known)
}

impl OutlineSizes {
    /// Reads the present fields that are sizes. A missing size is an error only where it is needed.
    fn read(fields: &dyn Fields) -> Self {
        let size = |names: Names| {
            let mut sizes = names
                .iter()
                .filter_map(|&field| fields.try_size(field).ok());
            sizes.find_map(|size| size)
        };
        Self {
            num_layers: size(LAYERS),
            hidden_size: size(HIDDEN),
            intermediate_size: size(INTERMEDIATE),
            num_heads: size(HEADS),
            num_kv_heads: size(KV_HEADS),
            head_dim: size(&[HEAD_DIM]),
            window: size(&[WINDOW]),
            num_experts: size(EXPERTS),
            num_experts_per_token: size(CHOSEN),
            vocab_size: size(&[VOCAB_SIZE]),
            max_position: size(CONTEXT),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn outline(config: Value) -> Outline {
        let bytes: &'static [u8] = config.to_string().into_bytes().leak();
        Outline::from_static(&[(CONFIG, bytes)]).unwrap()
    }

    #[test]
    fn sizes_of_an_unknown_family_are_read_by_any_of_their_names() {
        let bloom = outline(json!({
            "architectures": ["BloomForCausalLM"],
            "n_layer": 30,
            "n_head": 32,
            "hidden_size": 4096,
            "seq_length": 2048,
            "vocab_size": 250_880,
        }));
        assert_eq!(bloom.architecture.as_deref(), Some("BloomForCausalLM"));
        assert_eq!(bloom.closest, None);
        let expected = OutlineSizes {
            num_layers: Some(30),
            hidden_size: Some(4096),
            num_heads: Some(32),
            max_position: Some(2048),
            vocab_size: Some(250_880),
            ..OutlineSizes::default()
        };
        assert_eq!(bloom.sizes, expected);
        assert!(bloom.into_checkpoint().is_err());

        let seeing = outline(json!({
            "architectures": ["Llama4ForConditionalGeneration"],
            "hidden_size": "of something else",
            "text_config": {
                "num_hidden_layers": 48,
                "hidden_size": 5120,
                "num_local_experts": 16,
                "num_experts_per_tok": 1,
            },
        }));
        assert_eq!(seeing.closest, Some("LlamaForCausalLM"));
        assert_eq!(seeing.sizes.num_layers, Some(48));
        assert_eq!(seeing.sizes.hidden_size, Some(5120));
        assert_eq!(seeing.sizes.num_experts, Some(16));
        assert_eq!(seeing.sizes.num_experts_per_token, Some(1));
    }

    #[test]
    fn a_known_architecture_is_not_close_to_another() {
        let known = outline(json!({"architectures": ["Qwen3ForCausalLM"], "head_dim": true}));
        assert_eq!(known.closest, None);
        assert_eq!(known.sizes, OutlineSizes::default());
    }
}
