//! The `quantization_config` of config.json: the exporter of integer matrices, and its format.
//!
//! The tensors show which matrices are quantised, and the length of their groups. This module refuses configurations
//! whose computation would differ from their makers' intent.

use crate::CheckpointError;
use crate::json::json_object::JsonObject;

/// The format of a folder's quantised matrices.
#[derive(Clone, Debug, PartialEq)]
pub enum Quantization {
    /// The format of <https://github.com/vllm-project/compressed-tensors>.
    CompressedTensors(Vec<Scheme>),
    /// The format of AutoGPTQ and GPTQModel.
    Gptq {
        group_len: Option<usize>,
        /// The number that is added to a stored zero point: 1 in the first version of the format.
        zero_offset: u32,
    },
    /// The `gemm` format of AutoAWQ.
    Awq { group_len: Option<usize> },
    /// 4-bit floats in groups of 32 that share a power of two as their scale: the format of gpt-oss's experts.
    Mxfp4,
}

/// The storage of some matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheme {
    /// The number of bits per weight, 4 or 8.
    pub num_bits: usize,
    /// The number of an output's weights that share a scale; `None` for one scale per output.
    pub group_len: Option<usize>,
    pub symmetric: bool,
    /// Whether integers are packed into 32-bit words. Otherwise each integer has a byte.
    pub is_packed: bool,
}

impl Quantization {
    pub(crate) fn parse(config: &JsonObject<'_>) -> Result<Option<Self>, CheckpointError> {
        let Some(config) = config.try_object("quantization_config")? else {
            return Ok(None);
        };
        let quantization = match config.try_text("quant_method")? {
            None => return Err(config.missing("quant_method")),
            Some("compressed-tensors") => compressed_tensors(&config)?,
            Some("gptq") => gptq(&config)?,
            Some("awq") => awq(&config)?,
            Some("mxfp4") => Quantization::Mxfp4,
            Some(_) => {
                let why = "supported are compressed-tensors, gptq, awq, mxfp4";
                return Err(config.refuse("quant_method", why));
            }
        };
        Ok(Some(quantization))
    }
}

fn compressed_tensors(config: &JsonObject<'_>) -> Result<Quantization, CheckpointError> {
    const FORMATS: &str = "supported are pack-quantized and int-quantized";
    let is_packed = |object: &JsonObject<'_>| match object.try_text("format")? {
        None | Some("mixed-precision") => Ok(None),
        Some("pack-quantized") => Ok(Some(true)),
        Some("int-quantized") => Ok(Some(false)),
        Some(_) => Err(object.refuse("format", FORMATS)),
    };
    let whole = is_packed(config)?;
    match config.try_text("quantization_status")? {
        None | Some("compressed") => {}
        Some(_) => return Err(config.refuse("quantization_status", "supported is compressed")),
    }
    if config.get("kv_cache_scheme").is_some() {
        let why = "scales of a quantised KV cache are not supported";
        return Err(config.refuse("kv_cache_scheme", why));
    }
    for (field, what) in [
        ("sparsity_config", "sparse weights are"),
        ("transform_config", "transforms are"),
    ] {
        let object = config.try_object(field)?;
        let is_used = object.is_some_and(|object| match object.get("format") {
            Some(format) => format != "dense",
            None => !object.is_empty(),
        });
        if is_used {
            return Err(config.refuse(field, &format!("{what} not supported")));
        }
    }
    let Some(groups) = config.try_object("config_groups")? else {
        return Err(config.missing("config_groups"));
    };
    let mut schemes = Vec::new();
    for name in groups.names() {
        let Some(group) = groups.try_object(name)? else {
            return Err(groups.missing(name));
        };
        for field in ["output_activations", "kv_cache"] {
            if group.get(field).is_some() {
                return Err(group.refuse(field, "is not supported"));
            }
        }
        check_activations(&group)?;
        let Some(is_packed) = is_packed(&group)?.or(whole) else {
            let mut error = group.missing("format");
            error.problem += &format!("; {FORMATS}");
            return Err(error);
        };
        let Some(weights) = group.try_object("weights")? else {
            return Err(group.missing("weights"));
        };
        schemes.push(scheme(&weights, is_packed)?);
    }
    if schemes.is_empty() {
        return Err(config.refuse("config_groups", "must name a scheme"));
    }
    Ok(Quantization::CompressedTensors(schemes))
}

fn scheme(weights: &JsonObject<'_>, is_packed: bool) -> Result<Scheme, CheckpointError> {
    expect_text(weights, "type", "int", true)?;
    let num_bits = match (weights.size("num_bits")?, is_packed) {
        (bits @ (4 | 8), true) | (bits @ 8, false) => bits,
        (_, true) => return Err(weights.refuse("num_bits", "supported are 4 and 8")),
        (_, false) => {
            return Err(weights.refuse("num_bits", "supported is 8, unless weights are packed"));
        }
    };
    let group_len = match weights.try_text("strategy")? {
        Some("group") => Some(weights.size("group_size")?),
        Some("channel") => None,
        Some(_) => return Err(weights.refuse("strategy", "supported are group and channel")),
        None => return Err(weights.missing("strategy")),
    };
    // A missing field means true.
    let symmetric = weights.get("symmetric").is_none() || weights.flag("symmetric")?;
    if num_bits == 8 && !symmetric {
        let why = "8-bit weights must be symmetric";
        return Err(weights.refuse("symmetric", why));
    }
    if weights.get("dynamic").is_some() && weights.flag("dynamic")? {
        return Err(weights.refuse("dynamic", "weights must have their scales in the file"));
    }
    if weights.get("block_structure").is_some() {
        return Err(weights.refuse("block_structure", "is not supported"));
    }
    Ok(Scheme {
        num_bits,
        group_len,
        symmetric,
        is_packed,
    })
}

/// Checks that activations are quantised to 8 bits with a scale per row, or not at all.
fn check_activations(group: &JsonObject<'_>) -> Result<(), CheckpointError> {
    let Some(activations) = group.try_object("input_activations")? else {
        return Ok(());
    };
    expect_text(&activations, "type", "int", true)?;
    if activations.size("num_bits")? != 8 {
        return Err(activations.refuse("num_bits", "supported is 8"));
    }
    if !activations.flag("dynamic")? {
        let why = "supported is true: a scale for each token, computed at run time";
        return Err(activations.refuse("dynamic", why));
    }
    expect_text(&activations, "strategy", "token", true)
}

fn gptq(config: &JsonObject<'_>) -> Result<Quantization, CheckpointError> {
    expect_four_bits(config)?;
    let zero_offset = match config.try_text("checkpoint_format")? {
        None | Some("gptq") => 1,
        Some("gptq_v2") => 0,
        Some(_) => {
            return Err(config.refuse("checkpoint_format", "supported are gptq and gptq_v2"));
        }
    };
    expect_text(config, "pack_dtype", "int32", false)?;
    if config
        .try_object("dynamic")?
        .is_some_and(|object| !object.is_empty())
    {
        let why = "settings for single matrices are not supported";
        return Err(config.refuse("dynamic", why));
    }
    Ok(Quantization::Gptq {
        group_len: group_len(config, "group_size")?,
        zero_offset,
    })
}

fn awq(config: &JsonObject<'_>) -> Result<Quantization, CheckpointError> {
    expect_four_bits(config)?;
    let field = ["version", "checkpoint_format", "format"]
        .into_iter()
        .find(|field| config.get(field).is_some());
    if let Some(field) = field
        && !config
            .try_text(field)?
            .is_some_and(|version| version.eq_ignore_ascii_case("gemm"))
    {
        return Err(config.refuse(field, "supported is gemm"));
    }
    if config.get("zero_point").is_some() && !config.flag("zero_point")? {
        return Err(config.refuse("zero_point", "supported is true"));
    }
    Ok(Quantization::Awq {
        group_len: group_len(config, "group_size")?,
    })
}

fn expect_four_bits(config: &JsonObject<'_>) -> Result<(), CheckpointError> {
    match config.size("bits")? {
        4 => Ok(()),
        _ => Err(config.refuse("bits", "supported is 4")),
    }
}

/// A group length; -1 stands for whole rows.
fn group_len(config: &JsonObject<'_>, field: &str) -> Result<Option<usize>, CheckpointError> {
    match config.try_number(field)? {
        None => Err(config.missing(field)),
        Some(-1.0) => Ok(None),
        Some(_) => config.size(field).map(Some),
    }
}

fn expect_text(
    config: &JsonObject<'_>,
    field: &str,
    expected: &str,
    is_required: bool,
) -> Result<(), CheckpointError> {
    match config.try_text(field)? {
        Some(text) if text.eq_ignore_ascii_case(expected) => Ok(()),
        None if !is_required => Ok(()),
        None => Err(config.missing(field)),
        Some(_) => Err(config.refuse(field, &format!("supported is {expected}"))),
    }
}
