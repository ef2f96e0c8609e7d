//! SmolLM3: Llama with some layers without RoPE.

use serde_json::{Map, Value};

use super::base::{self, Base};
use super::field::{Field, Fields, Source};
use super::{Family, Layout, llama};
use crate::{CheckpointError, DecoderSpec};

pub const SMOLLM3: Family = Family {
    architecture: "SmolLM3ForCausalLM",
    decoder: "SmolLM3Model",
    model_type: "smollm3",
    gguf: "smollm3",
    file: Layout::FILE_OF_NEIGHBOURS,
    config,
    ..Family::new(spec)
};

/// The interval of layers without RoPE, also in GGUF files, which do not give it.
const INTERVAL: usize = 4;

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        max_position: 32_768,
        theta: 2_000_000.0,
        is_tied: true,
        ..Base::LLAMA
    };
    let mut spec = llama::spec_of(fields, &base)?;
    let num_layers = spec.layers.len();
    let interval = fields.try_size(Field::of_folder("no_rope_layer_interval"))?;
    let interval = interval.unwrap_or(INTERVAL);
    let listed = match fields.source() {
        Source::Folder(config) => {
            const FIELD: &str = "no_rope_layers";
            let listed = config.try_numbers(FIELD)?;
            if listed
                .as_ref()
                .is_some_and(|listed| listed.len() != num_layers)
            {
                let why = format!("must be a list of 0 and 1 for {num_layers} layers");
                return Err(config.refuse(FIELD, &why));
            }
            listed
        }
        Source::File(_) => None,
    };
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        // Despite its name, the list has 1 for layers with RoPE.
        let has_rotary = match &listed {
            Some(listed) => listed[index] != 0.0,
            None => !(index + 1).is_multiple_of(interval),
        };
        if !has_rotary {
            layer.attention.rotary = None;
        }
    }
    if fields.flag(Field::of_folder("use_sliding_window"))? {
        let without_rotary: Vec<bool> = (spec.layers.iter())
            .map(|layer| layer.attention.rotary.is_none())
            .collect();
        let types = base::sliding_layers(fields, num_layers)?.unwrap_or(without_rotary);
        base::set_windows(&mut spec, base::try_window(fields)?, |index| types[index]);
    }
    Ok(spec)
}

fn config(spec: &DecoderSpec) -> Result<Map<String, Value>, String> {
    let mut config = llama::config(spec)?;
    let has_rotary = |index: usize| u8::from(spec.layers[index].attention.rotary.is_some());
    let listed: Vec<u8> = (0..spec.layers.len()).map(has_rotary).collect();
    config.insert("no_rope_layers".into(), listed.into());
    Ok(config)
}
