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
    file: Layout::FILE_OF_NEIGHBOURS,
    ..Family::new(spec)
};

/// The size of windows if config.json does not give it.
const DEFAULT_WINDOW: usize = 4096;

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 131_072,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    let window = base::window_or(fields, DEFAULT_WINDOW)?;
    base::set_windows(&mut spec, window, |_| true);
    Ok(spec)
}
