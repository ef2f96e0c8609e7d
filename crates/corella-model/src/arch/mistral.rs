//! Mistral: Llama with a sliding window in every layer, unless the window is `null`. Its GGUF files declare Llama.

use super::base::{self, Base};
use super::field::Fields;
use super::{Family, Layout};
use crate::{CheckpointError, DecoderSpec};

pub const MISTRAL: Family = Family {
    architecture: "MistralForCausalLM",
    decoder: "MistralModel",
    model_type: "mistral",
    gguf: "llama",
    claims: |_| Ok(false),
    spec,
    folder: Layout::FOLDER,
    file: Layout::FILE_OF_NEIGHBOURS,
    config: base::no_config,
};

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 131_072,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    base::set_windows(&mut spec, base::try_window(fields)?, |_| true);
    Ok(spec)
}
