//! What was typed after `corella quantize`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::IsaArg;

#[derive(Args)]
pub struct QuantizeArgs {
    /// Hugging Face folder or GGUF file; quantised ones too
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// The folder to write; it must not exist
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// What matrices become
    #[arg(long, value_enum)]
    pub format: QuantizeFormatArg,
    /// Weights of an output that share a scale, 32, 64 or 128, or `channel` for all of them [default:
    /// 128 with int4, channel with int8]. Where they do not divide an output, the next smaller
    #[arg(long, value_name = "N", value_parser = parse_group_len, help_heading = "Format")]
    pub group_size: Option<GroupLen>,
    /// With int4: a zero point for each group; needs a little more memory, and loses less
    #[arg(long, help_heading = "Format", overrides_with = "symmetric")]
    pub asymmetric: bool,
    /// With int4: groups around 0 (the default)
    #[arg(long, help_heading = "Format", overrides_with = "asymmetric")]
    pub symmetric: bool,
    /// Matrices to leave as they are, by parts of their names: lm_head, down_proj, layers.0
    #[arg(
        long,
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "lm_head",
        help_heading = "Format"
    )]
    pub keep: Vec<String>,

    /// nearest rounds each weight by itself; gptq makes up for each error by the weights that
    /// follow, and needs --calibration
    #[arg(long, value_enum, default_value_t, help_heading = "Method")]
    pub method: MethodArg,
    /// With gptq: text like that which the model is to work on. Of a .jsonl file, each line is an
    /// object with a `text`
    #[arg(long, value_name = "FILE", help_heading = "Method")]
    pub calibration: Option<PathBuf>,
    /// Tokens of the calibration text to read, at most
    #[arg(
        long,
        value_name = "N",
        default_value_t = 65_536,
        help_heading = "Method"
    )]
    pub calibration_tokens: usize,
    /// Tokens of it that are read together, at most
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 2048,
        help_heading = "Method"
    )]
    pub context: u32,

    /// CPU threads [default: the cores this process may use]
    #[arg(long, value_name = "N", help_heading = "Device")]
    pub threads: Option<usize>,
    /// CPU instructions that the calibration text is read with [default: the best of this machine]
    #[arg(long, value_enum, help_heading = "Device")]
    pub isa: Option<IsaArg>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantizeFormatArg {
    /// 8 bits and one scale an output, or for each group; layers' inputs are rounded to 8 bits as they
    /// come
    Int8,
    /// 4 bits, and a scale for each group
    Int4,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    #[default]
    Nearest,
    Gptq,
}

/// `None` for all weights of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLen(pub Option<usize>);

fn parse_group_len(text: &str) -> Result<GroupLen, String> {
    match text {
        "32" => Ok(GroupLen(Some(32))),
        "64" => Ok(GroupLen(Some(64))),
        "128" => Ok(GroupLen(Some(128))),
        "channel" => Ok(GroupLen(None)),
        _ => Err("must be 32, 64, 128 or channel".to_owned()),
    }
}
