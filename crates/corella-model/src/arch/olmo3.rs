//! OLMo 3: OLMo 2 with a sliding window in three of four layers. RoPE is scaled only in the layers without a window.
//! Its GGUF files declare OLMo 2.

use super::base;
use super::field::{Field, Fields, Source};
use super::{Family, olmo2, rotary};
use crate::{CheckpointError, DecoderSpec, RotaryScaling, RotarySpec};

pub const OLMO3: Family = Family {
    architecture: "Olmo3ForCausalLM",
    decoder: "Olmo3Model",
    model_type: "olmo3",
    gguf: olmo2::OLMO2.gguf,
    claims: |file| Ok(base::try_window(file)?.is_some()),
    folder: olmo2::OLMO2.folder,
    ..Family::new(spec)
};

/// Defaults of config.json.
const DEFAULT_WINDOW: usize = 4096;
const THETA: f64 = 500_000.0;
/// The base of RoPE in layers with a window.
const LOCAL_THETA: Field = Field::of_file("rope.freq_base_swa");

fn spec(fields: &dyn Fields) -> Result<DecoderSpec, CheckpointError> {
    let mut spec = olmo2::spec_of(fields, THETA)?;
    let attention = &spec.layers[0].attention;
    let head_dim = attention.head_dim;
    let plain = || RotarySpec::plain(THETA, head_dim);
    let mut global = attention.rotary.clone().unwrap_or_else(plain);
    let mut local = RotarySpec {
        scaling: RotaryScaling::None,
        ..global.clone()
    };
    if let Some(theta) = fields.try_number(LOCAL_THETA)? {
        local.theta = theta;
    }
    let mut window = base::try_window(fields)?;
    if let Source::Folder(config) = fields.source() {
        let bases = [THETA; 2];
        let found = rotary::by_type(config, head_dim, spec.max_position, bases)?;
        local = found.local.unwrap_or(local);
        global = found.global.unwrap_or(global);
        window = window.or(Some(DEFAULT_WINDOW));
    }
    spec.max_position = global.longest_context(spec.max_position);
    let num_layers = spec.layers.len();
    let types = base::sliding_layers(fields, num_layers)?;
    let types = types.unwrap_or_else(|| base::all_but_every(4, num_layers));
    base::set_windows(&mut spec, window, |index| types[index]);
    for (layer, is_sliding) in spec.layers.iter_mut().zip(types) {
        layer.attention.rotary = Some(match is_sliding {
            true => local.clone(),
            false => global.clone(),
        });
    }
    Ok(spec)
}
