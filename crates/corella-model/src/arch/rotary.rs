//! RoPE from config.json and from the metadata and tensors of GGUF files.

use serde_json::{Value, json};

use super::base::shortest;
use super::field::{Field, Fields, FileFields, Source};
use crate::json::json_object::JsonObject;
use crate::{CheckpointError, RotaryScaling, RotarySpec};

/// The tensor of divisors for the frequency of each pair of dimensions, the form of Llama 3.1's scaling in GGUF files.
pub const DIVISORS: &str = "rope_freqs.weight";
/// The tensors of LongRoPE's divisors: for contexts up to the original length, and for longer contexts.
pub const SHORT_DIVISORS: &str = "rope_factors_short.weight";
pub const LONG_DIVISORS: &str = "rope_factors_long.weight";

const NUM_DIMS: Field = Field::of_file("rope.dimension_count");
const SCALING_TYPE: Field = Field::of_file("rope.scaling.type");
pub const ORIGINAL: Field = Field::of_file("rope.scaling.original_context_length");

/// Defaults of GGUF files.
const DEFAULT_THETA: f64 = 10_000.0;

/// Defaults of config.json.
#[derive(Clone, Copy)]
pub struct Defaults {
    pub theta: f64,
    /// The part of each head that is rotated.
    pub part: f64,
}

impl Defaults {
    /// RoPE over whole heads, with the base `theta`.
    pub fn whole(theta: f64) -> Self {
        Self { theta, part: 1.0 }
    }
}

/// Reads RoPE in the form of most families.
pub fn spec(
    fields: &dyn Fields,
    head_dim: usize,
    max_position: usize,
    defaults: Defaults,
) -> Result<RotarySpec, CheckpointError> {
    match fields.source() {
        Source::Folder(config) => {
            let scaling = parameters(config)?;
            of_folder(config, scaling.as_ref(), head_dim, max_position, defaults)
        }
        Source::File(file) => of_file(file, head_dim, max_position),
    }
}

/// The object that describes RoPE. Transformers 5 puts `rope_theta` and `rope_scaling` into one object,
/// `rope_parameters`. In a folder with both, Transformers ignores `rope_parameters`.
pub fn parameters<'a>(config: &JsonObject<'a>) -> Result<Option<JsonObject<'a>>, CheckpointError> {
    let older = config.try_object("rope_scaling")?;
    match older.filter(|scaling| !scaling.is_empty()) {
        Some(scaling) => Ok(Some(scaling)),
        None => config.try_object("rope_parameters"),
    }
}

/// Reads RoPE from config.json and the object that describes its scaling.
pub fn of_folder(
    config: &JsonObject<'_>,
    scaling: Option<&JsonObject<'_>>,
    head_dim: usize,
    max_position: usize,
    defaults: Defaults,
) -> Result<RotarySpec, CheckpointError> {
    const PARTIAL: &str = "partial_rotary_factor";
    let number = |field| -> Result<Option<f64>, CheckpointError> {
        let joined = scaling.map(|scaling| scaling.try_number(field));
        match joined.transpose()?.flatten() {
            Some(number) => Ok(Some(number)),
            None => config.try_number(field),
        }
    };
    let theta = number("rope_theta")?.unwrap_or(defaults.theta);
    if let Some(scaling) = scaling
        && scaling.try_text("rope_type")? == Some("proportional")
    {
        let part = number(PARTIAL)?.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&part) {
            return Err(scaling.refuse(PARTIAL, "must be from 0 to 1"));
        }
        return Ok(RotarySpec {
            scaling: RotaryScaling::Proportional {
                // Transformers rounds down, too.
                num_pairs: (part * head_dim as f64 / 2.0) as usize,
                factor: scaling.try_number("factor")?.unwrap_or(1.0),
            },
            ..RotarySpec::plain(theta, head_dim)
        });
    }
    let num_dims = match number(PARTIAL)?.unwrap_or(defaults.part) {
        1.0 => head_dim,
        factor => {
            // Transformers rounds down, too.
            let num_dims = (head_dim as f64 * factor) as usize;
            if !(1..=head_dim).contains(&num_dims) || !num_dims.is_multiple_of(2) {
                let why = format!("an even number of {head_dim} elements must be rotated");
                let object = scaling.filter(|scaling| scaling.get(PARTIAL).is_some());
                return Err(object.unwrap_or(config).refuse(PARTIAL, &why));
            }
            num_dims
        }
    };
    Ok(RotarySpec {
        theta,
        num_dims,
        scaling: match scaling {
            Some(scaling) => folder_scaling(config, scaling, num_dims, max_position)?,
            None => RotaryScaling::None,
        },
    })
}

/// RoPE of layers with a window, and of layers without; `None` if config.json has no object for the type.
#[derive(Default)]
pub struct ByType {
    pub local: Option<RotarySpec>,
    pub global: Option<RotarySpec>,
}

/// Reads the objects of Transformers 5 for the two types of layers. `bases` are the defaults of their bases.
pub fn by_type(
    config: &JsonObject<'_>,
    head_dim: usize,
    max_position: usize,
    [local, global]: [f64; 2],
) -> Result<ByType, CheckpointError> {
    let Some(parameters) = config.try_object("rope_parameters")? else {
        return Ok(ByType::default());
    };
    let of_type = |scaling: &JsonObject<'_>, theta| {
        let defaults = Defaults::whole(theta);
        of_folder(config, Some(scaling), head_dim, max_position, defaults)
    };
    let mut found = ByType::default();
    if let Some(scaling) = parameters.try_object("sliding_attention")? {
        found.local = Some(of_type(&scaling, local)?);
    }
    if let Some(scaling) = parameters.try_object("full_attention")? {
        // Fields of the older `rope_scaling` override this object's fields.
        let older = config.try_object("rope_scaling")?;
        let fields = older.map(|older| scaling.fields_with(&older));
        let changed = fields.as_ref().map(|fields| scaling.with_fields(fields));
        found.global = Some(of_type(changed.as_ref().unwrap_or(&scaling), global)?);
    }
    Ok(found)
}

fn folder_scaling(
    config: &JsonObject<'_>,
    scaling: &JsonObject<'_>,
    num_dims: usize,
    max_position: usize,
) -> Result<RotaryScaling, CheckpointError> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    let field = if scaling.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    // The same field in config.json itself (Phi-3) takes precedence.
    let original = match config.try_number(ORIGINAL)? {
        Some(original) => original,
        None => scaling.try_number(ORIGINAL)?.unwrap_or(max_position as f64),
    };
    let growth = max_position as f64 / original;
    Ok(match scaling.try_text(field)? {
        None | Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear {
            factor: scaling.number("factor")?,
        },
        Some("dynamic") => RotaryScaling::Dynamic {
            factor: scaling.number("factor")?,
            original_max_position: max_position as f64,
        },
        Some("llama3") => RotaryScaling::Llama3 {
            factor: scaling.number("factor")?,
            low_freq_factor: scaling.number("low_freq_factor")?,
            high_freq_factor: scaling.number("high_freq_factor")?,
            original_max_position: original,
        },
        Some("yarn") => {
            let factor = scaling.try_number("factor")?.unwrap_or(growth);
            let mscale = |weight: f64| match factor > 1.0 {
                true => 0.1 * weight * factor.ln() + 1.0,
                false => 1.0,
            };
            let given = scaling.try_number("attention_factor")?;
            let weights = (scaling.try_number("mscale")?)
                .zip(scaling.try_number("mscale_all_dim")?)
                .filter(|&(one, all)| one != 0.0 && all != 0.0);
            RotaryScaling::Yarn {
                factor,
                original_max_position: original,
                beta_fast: scaling.try_number("beta_fast")?.unwrap_or(32.0),
                beta_slow: scaling.try_number("beta_slow")?.unwrap_or(1.0),
                attention_factor: given.unwrap_or_else(|| match weights {
                    Some((one, all)) => mscale(one) / mscale(all),
                    None => mscale(1.0),
                }),
                truncate: scaling.get("truncate").is_none() || scaling.flag("truncate")?,
            }
        }
        Some("longrope" | "su") => {
            let divisors = |field| folder_divisors(scaling, field, num_dims / 2);
            let factor = scaling.try_number("factor")?.unwrap_or(growth);
            RotaryScaling::LongRope {
                short: divisors("short_factor")?,
                long: divisors("long_factor")?,
                original_max_position: original as usize,
                attention_factor: scaling
                    .try_number("attention_factor")?
                    .unwrap_or_else(|| long_rope_magnitude(factor, original)),
            }
        }
        Some(_) => {
            let why = "supported are default, linear, dynamic, llama3, yarn, longrope";
            return Err(scaling.refuse(field, why));
        }
    })
}

fn folder_divisors(
    scaling: &JsonObject<'_>,
    field: &'static str,
    num_pairs: usize,
) -> Result<Vec<f64>, CheckpointError> {
    let Some(numbers) = scaling.try_numbers(field)? else {
        return Err(scaling.missing(field));
    };
    if numbers.len() != num_pairs || numbers.iter().any(|&number| number <= 0.0) {
        return Err(scaling.refuse(field, &format!("must be {num_pairs} positive numbers")));
    }
    Ok(numbers)
}

fn long_rope_magnitude(factor: f64, original: f64) -> f64 {
    match factor > 1.0 {
        true => (1.0 + factor.ln() / original.ln()).sqrt(),
        false => 1.0,
    }
}

fn of_file(
    file: &FileFields<'_>,
    head_dim: usize,
    max_position: usize,
) -> Result<RotarySpec, CheckpointError> {
    let theta = file.try_number(Field::of_file("rope.freq_base"))?;
    let num_dims = file.try_size(NUM_DIMS)?.unwrap_or(head_dim);
    if num_dims > head_dim || !num_dims.is_multiple_of(2) {
        let why = format!("must be an even number of the {head_dim} elements of a head");
        return Err(file.refuse(NUM_DIMS, &why));
    }
    Ok(RotarySpec {
        theta: theta.unwrap_or(DEFAULT_THETA),
        num_dims,
        scaling: file_scaling(file, num_dims, max_position)?,
    })
}

fn file_scaling(
    file: &FileFields<'_>,
    num_dims: usize,
    max_position: usize,
) -> Result<RotaryScaling, CheckpointError> {
    const ATTENTION_FACTOR: Field = Field::of_file("rope.scaling.attn_factor");
    let kind = file.try_text(SCALING_TYPE)?;
    let long = divisors(file, LONG_DIVISORS, num_dims)?;
    if let Some(long) = long {
        let Some(short) = divisors(file, SHORT_DIVISORS, num_dims)? else {
            let problem = format!("tensor {SHORT_DIVISORS} is missing");
            return Err(CheckpointError::new(file.file().label(), problem));
        };
        let wide = |divisors: Vec<f32>| divisors.into_iter().map(f64::from).collect();
        let original = file.try_size(ORIGINAL)?.unwrap_or(max_position);
        let magnitude = file.try_number(ATTENTION_FACTOR)?.unwrap_or(1.0);
        return Ok(RotaryScaling::LongRope {
            short: wide(short),
            long: wide(long),
            original_max_position: original,
            attention_factor: magnitude,
        });
    }
    let scaling = match kind {
        None | Some("none" | "linear") => linear_scaling(file)?,
        Some("yarn") => {
            let factor = file.number(Field::of_file("rope.scaling.factor"))?;
            let original = file.try_size(ORIGINAL)?.unwrap_or(max_position);
            let number = |name, default| -> Result<f64, CheckpointError> {
                Ok(file.try_number(Field::of_file(name))?.unwrap_or(default))
            };
            let magnitude = file.try_number(ATTENTION_FACTOR)?.unwrap_or(1.0);
            let mscale = |weight: f64| 1.0 + 0.1 * weight * factor.max(1.0).ln();
            // YaRN's own factor is divided by `mscale(divisor)`. config.json calls this weight "mscale_all_dim".
            let divisor = number("rope.scaling.yarn_log_multiplier", 0.0)?;
            RotaryScaling::Yarn {
                factor,
                original_max_position: original as f64,
                beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
                beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
                // The factor in GGUF files is multiplied by YaRN's own factor.
                attention_factor: magnitude * mscale(1.0) / mscale(divisor),
                truncate: true,
            }
        }
        Some(_) => {
            let why = "supported are none, linear, yarn, and longrope with its tensors";
            return Err(file.refuse(SCALING_TYPE, why));
        }
    };
    let Some(divisors) = divisors(file, DIVISORS, num_dims)? else {
        return Ok(scaling);
    };
    match scaling {
        RotaryScaling::None => Ok(RotaryScaling::Divisors(divisors)),
        _ => {
            let problem = format!(
                "tensor {DIVISORS} and a linear scaling of the positions are not supported together"
            );
            Err(CheckpointError::new(file.file().label(), problem))
        }
    }
}

/// A tensor with a divisor for each pair.
fn divisors(
    file: &FileFields<'_>,
    name: &str,
    num_dims: usize,
) -> Result<Option<Vec<f32>>, CheckpointError> {
    let Some(divisors) = file.file().numbers(name)? else {
        return Ok(None);
    };
    let are_positive = (divisors.iter()).all(|&divisor| divisor.is_normal() && divisor > 0.0);
    let problem = if divisors.len() != num_dims / 2 {
        let len = divisors.len();
        format!("has {len} values; it should have {}", num_dims / 2)
    } else if !are_positive {
        "has values that are not positive".into()
    } else {
        return Ok(Some(divisors));
    };
    let problem = format!("tensor {name} {problem}");
    Err(CheckpointError::new(file.file().label(), problem))
}

fn linear_scaling(file: &FileFields<'_>) -> Result<RotaryScaling, CheckpointError> {
    let is_none = file.try_text(SCALING_TYPE)? == Some("none");
    // Older files use the second name.
    for name in ["rope.scaling.factor", "rope.scale_linear"] {
        let field = Field::of_file(name);
        match file.try_number(field)? {
            Some(factor) if factor < 0.0 => return Err(file.refuse(field, "must be positive")),
            // Both values mean "not scaled".
            Some(0.0 | 1.0) | None => {}
            Some(_) if is_none => {}
            Some(factor) => return Ok(RotaryScaling::Linear { factor }),
        }
    }
    Ok(RotaryScaling::None)
}

/// `rope_scaling` in config.json. `Err` names the parts of RoPE that config.json cannot express.
pub fn scaling_config(rotary: &RotarySpec) -> Result<Value, String> {
    Ok(match &rotary.scaling {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RotaryScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
        scaling @ RotaryScaling::Llama3 { .. } => llama3(scaling),
        RotaryScaling::Yarn {
            factor,
            original_max_position,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": *original_max_position as u64,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
        RotaryScaling::LongRope {
            short,
            long,
            original_max_position,
            attention_factor,
        } => json!({
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original_max_position,
            "attention_factor": attention_factor,
        }),
        RotaryScaling::Proportional { .. } => {
            return Err(String::from(
                "config.json can express RoPE of some pairs with the frequencies of a full rotation for Gemma 4 only",
            ));
        }
        RotaryScaling::Divisors(divisors) => {
            let found = find_llama3(rotary.theta, rotary.num_dims, divisors);
            let found = found.ok_or(
                "config.json can express the divisors of RoPE's frequencies only for Llama 3.1, and this model has \
                 others",
            )?;
            llama3(&found)
        }
    })
}

fn llama3(scaling: &RotaryScaling) -> Value {
    let &RotaryScaling::Llama3 {
        factor,
        low_freq_factor,
        high_freq_factor,
        original_max_position,
    } = scaling
    else {
        return Value::Null;
    };
    json!({
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low_freq_factor,
        "high_freq_factor": high_freq_factor,
        "original_max_position_embeddings": original_max_position as u64,
    })
}

/// Finds the Llama 3.1 settings that give these divisors. All known models share the two frequency
/// factors.
fn find_llama3(theta: f64, num_dims: usize, divisors: &[f32]) -> Option<RotaryScaling> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let factor = divisors.iter().copied().fold(1.0, f32::max);
    let mut lengths = (5..=20).map(|power| f64::from(1 << power));
    Some(RotaryScaling::Llama3 {
        factor: shortest(factor),
        low_freq_factor: LOW,
        high_freq_factor: HIGH,
        // If several lengths fit, they have the same effect.
        original_max_position: lengths.find(|&original_max_position| {
            let divisor = |pair| {
                let frequency = theta.powf(-((2 * pair) as f64) / num_dims as f64);
                let turns = original_max_position * frequency / std::f64::consts::TAU;
                let kept = ((turns - LOW) / (HIGH - LOW)).clamp(0.0, 1.0);
                1.0 / (kept + (1.0 - kept) / f64::from(factor))
            };
            let mut pairs = divisors.iter().enumerate();
            pairs.all(|(pair, &given)| (divisor(pair) / f64::from(given) - 1.0).abs() < 1e-4)
        })?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    /// `tests/golden/make_rotary.py` writes the file.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/rotary.json");
        let cases: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
        let cases = cases.as_array().unwrap();
        assert_eq!(cases.len(), 9);
        for case in cases {
            let size = |field: &str| case[field].as_u64().unwrap() as usize;
            let config = JsonObject::new("config.json", case["config"].as_object().unwrap());
            let scaling = config.try_object("rope_parameters").unwrap();
            let max_position = config.size("max_position_embeddings").unwrap();
            let head_dim = size("head_dim");
            let rotary = of_folder(
                &config,
                scaling.as_ref(),
                head_dim,
                max_position,
                Defaults::whole(10_000.0),
            )
            .unwrap();
            let found = rotary.frequencies(size("context"));
            let expected = case["frequencies"].as_array().unwrap();
            assert_eq!(found.frequencies.len(), expected.len());
            // Transformers computes in f32.
            let is_close = |found: f64, expected: &Value| {
                let expected = expected.as_f64().unwrap();
                (found - expected).abs() <= 1e-6 * expected.abs()
            };
            for (found, expected) in found.frequencies.iter().zip(expected) {
                assert!(is_close(*found, expected), "{case}: {found}, {expected}");
            }
            assert!(is_close(found.magnitude, &case["magnitude"]), "{case}");
        }
    }
}
