//! EXAONE 4: norms after attention and MLP instead of in front of them, and a norm for each query and key head. Larger
//! models have a sliding window in most layers, and no RoPE in the others.

use super::base::{self, Base};
use super::field::{Fields, Source};
use super::{Family, Layout, olmo2};
use crate::{BranchNorms, CheckpointError, DecoderSpec, QkNorm};

pub const EXAONE4: Family = Family {
    architecture: "Exaone4ForCausalLM",
    decoder: "Exaone4Model",
    model_type: "exaone4",
    gguf: "exaone4",
    folder: Layout::FOLDER.named(olmo2::name),
    ..Family::new(spec)
};

/// Defaults of config.json.
const DEFAULT_WINDOW: usize = 4096;
/// The interval of layers without a window.
const INTERVAL: usize = 4;

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let base = Base {
        eps: 1e-5,
        ..Base::LLAMA
    };
    let mut spec = base.spec(fields)?;
    let (before, after) = (None, Some(spec.norm));
    base::set_norms(&mut spec, BranchNorms { before, after });
    for layer in &mut spec.layers {
        layer.attention.qk_norm = Some(QkNorm::Heads(spec.norm));
    }
    let Some(window) = base::window_or(fields, DEFAULT_WINDOW)? else {
        // Models without windows have RoPE in all layers.
        return Ok(spec);
    };
    let num_layers = spec.layers.len();
    let types = match base::sliding_layers(fields, num_layers)? {
        Some(types) => types,
        None => pattern(fields, num_layers)?,
    };
    base::set_windows(&mut spec, Some(window), |index| types[index]);
    for (layer, is_sliding) in spec.layers.iter_mut().zip(types) {
        if !is_sliding {
            layer.attention.rotary = None;
        }
    }
    Ok(spec)
}

/// The layers with a window, for files without a list of layer types.
fn pattern(fields: &dyn Fields, num_layers: usize) -> Result<Vec<bool>, CheckpointError> {
    const FIELD: &str = "sliding_window_pattern";
    let Source::Folder(config) = fields.source() else {
        return Ok(base::all_but_every(INTERVAL, num_layers));
    };
    match config.get(FIELD).and_then(|value| value.as_str()) {
        Some(letters) => {
            let are_known = letters.chars().all(|letter| matches!(letter, 'L' | 'G'));
            if letters.is_empty() || !are_known {
                let why = "must be made of L for layers with a window and G for those without";
                return Err(config.refuse(FIELD, why));
            }
            // The last layer has no window, under any pattern.
            let letters = letters.chars().cycle().enumerate().take(num_layers);
            let is_sliding =
                |(index, letter): (usize, char)| letter == 'L' && index + 1 < num_layers;
            Ok(letters.map(is_sliding).collect())
        }
        None => {
            let interval = config.try_size(FIELD)?.unwrap_or(INTERVAL);
            Ok(base::all_but_every(interval, num_layers))
        }
    }
}
