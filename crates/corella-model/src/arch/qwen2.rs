//! Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and perhaps a sliding window in the
//! upper layers.

use serde_json::{Map, Value};

use super::Family;
use super::base::{self, Base, Biases};
use super::field::{Field, Fields};
use crate::{CheckpointError, DecoderSpec};

pub const QWEN2: Family = Family {
    architecture: "Qwen2ForCausalLM",
    decoder: "Qwen2Model",
    model_type: "qwen2",
    gguf: "qwen2",
    config,
    ..Family::new(spec)
};

/// The common parts of Qwen2 and Qwen3.
pub const BASE: Base = Base {
    max_position: 32_768,
    ..Base::LLAMA
};

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = BASE.spec(fields)?;
    let biases = Biases {
        qkv: true,
        ..Biases::default()
    };
    biases.set(fields, &mut spec);
    set_windows(fields, &mut spec, |index, first| index >= first)?;
    Ok(spec)
}

/// The size of windows if config.json does not give it.
pub const DEFAULT_WINDOW: usize = 4096;
/// Whether any layer has a window.
pub const USES_WINDOWS: Field = Field::of_folder("use_sliding_window");

/// Gives layers a window, if windows are in use. If config.json does not list these layers, `has_window` chooses them
/// by the index and `max_window_layers`.
pub fn set_windows(
    fields: &dyn Fields,
    spec: &mut DecoderSpec,
    has_window: impl Fn(usize, usize) -> bool,
) -> Result<(), CheckpointError> {
    if !fields.flag(USES_WINDOWS)? {
        return Ok(());
    }
    let limit = fields.try_number(Field::of_folder("max_window_layers"))?;
    let limit = limit.map_or(28, |limit| limit as usize);
    let types = base::sliding_layers(fields, spec.layers.len())?;
    let window = base::window_or(fields, DEFAULT_WINDOW)?;
    base::set_windows(spec, window, |index| match &types {
        Some(types) => types[index],
        None => has_window(index, limit),
    });
    Ok(())
}

fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let attention = &spec.layers[0].attention;
    if !attention.qkv_bias || attention.output_bias {
        return Err(
            "config.json cannot give biases to other matrices than those of queries, keys \
                    and values"
                .into(),
        );
    }
    base::refuse_mlp_bias(spec)?;
    base::config(spec)
}
