//! Options of the KV cache.

use std::path::Path;

use clap::{Args, ValueEnum};
use corella_model::{DType, KvFormat};

use super::KvDiskArgs;
use super::byte_size::{parse_size, parse_size_or_zero};
use super::scheduler::defaults;
use super::share::parse_share;
use crate::input::option_file;
use crate::{Error, KvSpill, LlmOptions};

#[derive(Args)]
#[command(next_help_heading = "KV cache")]
pub struct CacheArgs {
    /// Memory for the KV cache, e.g. 512M or 4G [default: half of the free memory, or less if the
    /// requests cannot use that much]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub kv_cache_memory: Option<u64>,
    /// Memory in which preempted requests keep their keys and values, instead of computing them
    /// again when they resume [default: 0; a quarter of the KV cache on a node that may decode for
    /// others: with --role decode, --registry or --cluster-listen]
    #[arg(long, value_name = "SIZE", value_parser = parse_size_or_zero)]
    pub kv_spill_memory: Option<u64>,
    #[command(flatten)]
    pub page: PageArgs,
    /// Type of keys and values. auto is f32 for f32 weights, else bf16; int8 takes about half the
    /// memory of bf16
    #[arg(long, value_enum, visible_alias = "kv-dtype", default_value_t)]
    pub kv_cache_dtype: KvFormatArg,
    /// Share the KV pages of prompts that begin alike (the default)
    #[arg(long, overrides_with = "no_enable_prefix_caching")]
    pub enable_prefix_caching: bool,
    /// Compute every prompt from its first token, and share no KV pages
    #[arg(long)]
    pub no_enable_prefix_caching: bool,
    /// Compute this prefix at start and never evict its KV pages. It is the text that the model
    /// sees, including the marks of the chat template; @FILE reads it from a file. Repeat the
    /// option for more prefixes. Only whole pages are kept
    #[arg(long, value_name = "TEXT", conflicts_with = "no_enable_prefix_caching")]
    pub pin_prefix: Vec<String>,
    /// Largest share of the KV pages that pinned prefixes, and prefixes that requests retain
    /// (cache_control), may take, from 0 to 1
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0.25")]
    pub max_pinned_share: f64,
    #[command(flatten)]
    pub disk: KvDiskArgs,
}

#[derive(Args)]
pub struct PageArgs {
    /// Tokens of a KV page
    #[arg(long, value_name = "TOKENS", visible_alias = "page-size", default_value_t = defaults().page_size)]
    pub block_size: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum KvFormatArg {
    #[default]
    Auto,
    #[value(alias = "float32")]
    F32,
    #[value(alias = "float16", alias = "half")]
    F16,
    #[value(alias = "bfloat16")]
    Bf16,
    Int8,
    /// Floats of 8 bits, which other servers have. They are refused with advice.
    #[value(hide = true, alias = "fp8_e4m3", alias = "fp8_e5m2", alias = "fp8_inc")]
    Fp8,
}

impl CacheArgs {
    pub fn set(&self, options: &mut LlmOptions) -> Result<(), Error> {
        options.kv_cache_bytes = self.kv_cache_memory;
        options.kv_spill = KvSpill::Bytes(self.kv_spill_memory.unwrap_or(0));
        options.scheduler.page_size = self.page.block_size;
        options.kv_format = kv_format(self.kv_cache_dtype)?;
        options.scheduler.enable_prefix_caching = !self.no_enable_prefix_caching;
        options.max_pinned_share = self.max_pinned_share;
        options.kv_disk = self.disk.options();
        options.kv_host_bytes = self.disk.kv_host_memory;
        for prefix in &self.pin_prefix {
            let text = match prefix.strip_prefix('@') {
                None => prefix.clone(),
                Some(path) => option_file::read_text(Path::new(path)).map_err(|error| {
                    Error::Io(format!("--pin-prefix cannot read {path}"), error)
                })?,
            };
            options.pinned_prefixes.push(text);
        }
        Ok(())
    }
}

pub fn kv_format(arg: KvFormatArg) -> Result<Option<KvFormat>, Error> {
    Ok(match arg {
        KvFormatArg::Auto => None,
        KvFormatArg::F32 => Some(KvFormat::Float(DType::F32)),
        KvFormatArg::F16 => Some(KvFormat::Float(DType::F16)),
        KvFormatArg::Bf16 => Some(KvFormat::Float(DType::Bf16)),
        KvFormatArg::Int8 => Some(KvFormat::Int8),
        KvFormatArg::Fp8 => {
            return Err(Error::Config(
                "--kv-cache-dtype fp8: use int8, which takes as little memory; floats of 8 bits are not \
                 supported"
                    .to_owned(),
            ));
        }
    })
}
