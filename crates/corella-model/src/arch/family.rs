//! A family of models.

use serde_json::{Map, Value};

use crate::arch::{Fields, FileFields, Layout};
use crate::{CheckpointError, DecoderSpec};

/// The definition of a family of models.
pub struct Family {
    /// The name of its class, in `architectures` of config.json.
    pub architecture: &'static str,
    /// The name of its class without a head, which embedding models use there.
    pub decoder: &'static str,
    /// `model_type` in config.json.
    pub model_type: &'static str,
    /// `general.architecture` in GGUF files.
    pub gguf: &'static str,
    /// Whether a GGUF file with that name is of this family: families share some names.
    pub claims: fn(&FileFields<'_>) -> Result<bool, CheckpointError>,
    pub spec: fn(&dyn Fields) -> Result<DecoderSpec, CheckpointError>,
    pub folder: Layout,
    pub file: Layout,
    /// The fields of config.json that describe a shape; `Err` names the parts that they cannot express.
    pub config: fn(&DecoderSpec) -> Result<Map<String, Value>, String>,
}

/// A family whose name in GGUF files is its own.
pub fn claims_all(_: &FileFields<'_>) -> Result<bool, CheckpointError> {
    Ok(true)
}
