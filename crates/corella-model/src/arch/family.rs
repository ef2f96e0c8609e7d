//! A family of models.

use serde_json::{Map, Value};

use super::base::ReadSpec;
use crate::arch::{FileFields, Layout};
use crate::{CheckpointError, DecoderSpec};

/// The definition of a family of models.
pub struct Family {
    /// The name of the family's class, in `architectures` of config.json.
    pub architecture: &'static str,
    /// The name of the family's class without a head, which embedding models have in `architectures`.
    pub decoder: &'static str,
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// `general.architecture` in GGUF files.
    pub gguf: &'static str,
    /// Whether a GGUF file with the name `gguf` is of this family: families share some names.
    pub claims: fn(&FileFields<'_>) -> Result<bool, CheckpointError>,
    pub spec: ReadSpec,
    pub folder: Layout,
    pub file: Layout,
    /// The fields of config.json that describe a shape; `Err` names the parts of the shape that config.json cannot
    /// express.
    pub config: fn(&DecoderSpec) -> Result<Map<String, Value>, String>,
}

impl Family {
    /// A family with the usual names of tensors, a name of its own in GGUF files, and folders that are never written.
    pub const fn new(spec: ReadSpec) -> Self {
        Self {
            architecture: "",
            decoder: "",
            model_type: "",
            gguf: "",
            claims: |_| Ok(true),
            spec,
            folder: Layout::FOLDER,
            file: Layout::FILE,
            config: |_| Err("GGUF files of this family cannot become folders yet".into()),
        }
    }
}
