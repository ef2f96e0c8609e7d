//! Detects a checkpoint's draft head and its layer.

use super::{Source, TensorFiles};
use crate::file::file_tensor::TensorSource;
use crate::json::file_name::CONFIG;
use crate::json::json_object::{self, JsonObject};
use crate::{CheckpointError, LayerSpec, ModelConfig};

/// The layer of the draft head. It has the shape of the model's attention layers.
pub fn layer(config: &ModelConfig, source: &Source) -> Result<LayerSpec, CheckpointError> {
    if let Source::Gguf(file) = source {
        let problem = "GGUF files are read without the head that guesses further tokens: load the folder in \
                       safetensors";
        return Err(CheckpointError::new(file.label(), problem));
    }
    let label = source.label(CONFIG);
    let prefix = config.architecture.folder_layout().draft_head;
    let attends = |layer: &&LayerSpec| layer.has_kv();
    let layer = config.spec.layers.iter().rfind(attends).cloned();
    let Some(mut layer) = layer.filter(|_| !prefix.is_empty()) else {
        let architecture = config.architecture;
        let problem = format!("{architecture} is read without a head that guesses further tokens");
        return Err(CheckpointError::new(&label, problem));
    };
    let fields = json_object::parse(&label, &source.config()?)?;
    let fields = JsonObject::new(&label, &fields);
    // Multimodal models describe their decoder in an object of its own.
    check(&fields.try_object("text_config")?.unwrap_or(fields))?;
    let TensorFiles::Safetensors { files, label } = source.tensors()? else {
        unreachable!("a folder has its tensors in safetensors");
    };
    let mut names = files.iter().flat_map(TensorSource::names);
    if !names.any(|name| name.starts_with(prefix)) {
        let problem = format!(
            "no tensor begins with {prefix}, so the checkpoint lacks the head that guesses further tokens; \
             conversions often leave it out"
        );
        return Err(CheckpointError::new(&label, problem));
    }
    layer.attention.skips_first = true;
    Ok(layer)
}

/// Refuses draft heads with several layers, or with embeddings of their own.
fn check(config: &JsonObject<'_>) -> Result<(), CheckpointError> {
    for field in ["mtp_num_hidden_layers", "num_nextn_predict_layers"] {
        if config.try_size(field)?.is_some_and(|number| number != 1) {
            let why = "only heads of one layer are read";
            return Err(config.refuse(field, why));
        }
    }
    const OWN_EMBEDDINGS: &str = "mtp_use_dedicated_embeddings";
    match config.flag(OWN_EMBEDDINGS)? {
        true => Err(config.refuse(
            OWN_EMBEDDINGS,
            "only heads with the model's embeddings are read",
        )),
        false => Ok(()),
    }
}
