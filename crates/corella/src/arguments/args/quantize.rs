//! The command line of `corella quantize`.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, ValueEnum};

use super::IsaArg;

#[derive(Args)]
pub struct QuantizeArgs {
    /// Hugging Face folder, GGUF file or name of a model on the hub, to read; it may be quantised already
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Folder to write, which must not exist yet; it holds safetensors files, and is served like any other
    #[arg(value_name = "OUT", value_parser = PathBufValueParser::new().try_map(folder))]
    pub out: PathBuf,
    /// Download nothing: a named model must be in the hub's cache. HF_HUB_OFFLINE=1 does the same
    #[arg(long)]
    pub offline: bool,
    /// Format of the weights to write
    #[arg(long, value_enum, visible_alias = "dtype")]
    pub format: QuantizeFormatArg,
    /// Number of weights that share a scale: 32, 64, 128, or `channel` for one scale per output
    /// channel [default: 128 with int4, channel with int8]. If a matrix cannot be divided into such
    /// groups, its groups are smaller
    #[arg(long, value_name = "N", value_parser = parse_group_len, help_heading = "Format")]
    pub group_size: Option<GroupLen>,
    /// With int4: store a zero point per group, which takes a little more memory and loses less
    /// accuracy
    #[arg(long, help_heading = "Format", overrides_with = "symmetric")]
    pub asymmetric: bool,
    /// With int4: store no zero points (the default)
    #[arg(long, help_heading = "Format", overrides_with = "asymmetric")]
    pub symmetric: bool,
    /// Matrices to leave unquantised, by parts of their names, e.g. lm_head,down_proj,layers.0
    #[arg(
        long,
        value_name = "NAME,…",
        value_delimiter = ',',
        default_value = "lm_head",
        help_heading = "Format"
    )]
    pub keep: Vec<String>,

    /// How to round: nearest rounds each weight by itself; gptq corrects the error of each weight in
    /// those that follow, and needs --calibration
    #[arg(long, value_enum, default_value_t, help_heading = "Method")]
    pub method: MethodArg,
    /// With gptq: text of the kind that the model will work on. Each line of a .jsonl file is an
    /// object with a `text`
    #[arg(long, value_name = "FILE", help_heading = "Method")]
    pub calibration: Option<PathBuf>,
    /// Maximum number of tokens of the calibration text to read
    #[arg(
        long,
        value_name = "N",
        default_value_t = 65_536,
        help_heading = "Method"
    )]
    pub calibration_tokens: usize,
    /// Maximum number of tokens of the calibration text to process together
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 2048,
        help_heading = "Method"
    )]
    pub context: u32,

    /// Number of CPU threads [default: the number of cores that this process may use]
    #[arg(long, value_name = "N", help_heading = "Device")]
    pub threads: Option<usize>,
    /// CPU instruction set to process the calibration text with [default: the best that this machine
    /// has]
    #[arg(long, value_enum, help_heading = "Device")]
    pub isa: Option<IsaArg>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum QuantizeFormatArg {
    /// 8-bit integers, with a scale per output channel or per group; inputs of these layers are
    /// rounded to 8 bits when the model is served
    Int8,
    /// 4-bit integers, with a scale per group
    Int4,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MethodArg {
    #[default]
    Nearest,
    Gptq,
}

/// The number of weights that share a scale; `None` is one scale per output channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLen(pub Option<usize>);

/// Refuses the name of a file, as llama.cpp's programs take it: the model is written as a folder.
fn folder(path: PathBuf) -> Result<PathBuf, &'static str> {
    let extension = path.extension().and_then(OsStr::to_str);
    let is_file = |kind: &str| ["gguf", "safetensors", "bin"].contains(&kind);
    match extension.map(str::to_ascii_lowercase) {
        Some(kind) if is_file(&kind) => Err(
            "it is written as a folder of safetensors files, and not as one file: give a name without that ending",
        ),
        _ => Ok(path),
    }
}

fn parse_group_len(text: &str) -> Result<GroupLen, String> {
    match text {
        "32" => Ok(GroupLen(Some(32))),
        "64" => Ok(GroupLen(Some(64))),
        "128" => Ok(GroupLen(Some(128))),
        "channel" => Ok(GroupLen(None)),
        _ => Err("must be 32, 64, 128 or channel".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_file_is_refused_for_a_folder() {
        for name in ["out.gguf", "a/B.GGUF", "model.safetensors"] {
            assert!(folder(name.into()).is_err(), "{name}");
        }
        for name in ["out", "qwen3-0.6B-int8", "x.gguf/out", ".gguf"] {
            assert_eq!(folder(name.into()), Ok(PathBuf::from(name)));
        }
    }
}
