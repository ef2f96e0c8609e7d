//! Options of the engine: its speculation, KV cache, device and sampling.

use std::path::Path;

use corella_core::Speculation;
use corella_cpu::{Isa, num_cores};
use corella_model::{DType, KvFormat, WeightFormat};

use super::model::set_model;
use super::scheduler::options_of;
use crate::arguments::args::{
    CacheArgs, DeviceArg, DeviceArgs, IsaArg, KvFormatArg, ModelArgs, OwnModelArgs, SamplingArgs,
    SpeculateArg, SpeculationArgs, WeightFormatArg,
};
use crate::input::option_file;
use crate::terminal::load_display::load_watcher;
use crate::{Device, DraftOptions, Error, KvSpill, LlmOptions, ModelSource};

/// A model that answers one request at a time.
pub fn options_of_own(model: &ModelArgs, args: &OwnModelArgs) -> Result<LlmOptions, Error> {
    let mut options = options_of(&args.device, &args.speculation);
    set_model(&mut options, model)?;
    set_speculation(&mut options, &args.speculation)?;
    set_cache(&mut options, &args.cache)?;
    set_device(&mut options, &args.device)?;
    options.scheduler.max_num_seqs = 1;
    Ok(options)
}

pub fn set_speculation(options: &mut LlmOptions, args: &SpeculationArgs) -> Result<(), Error> {
    let limits = &mut options.scheduler;
    let is_drafting = args.speculate == SpeculateArg::Draft;
    for (is_wrong, reason) in [
        (
            args.draft_tokens.is_some() && args.speculate == SpeculateArg::Off,
            "--draft-tokens needs --speculate ngram, draft or mtp",
        ),
        (
            args.draft_model.is_some() && !is_drafting,
            "--draft-model needs --speculate draft",
        ),
        (
            args.draft_dtype.is_some() && !is_drafting,
            "--draft-dtype needs --speculate draft",
        ),
        (
            args.draft_model.is_none() && is_drafting,
            "--speculate draft needs --draft-model",
        ),
    ] {
        if is_wrong {
            return Err(Error::Config(reason.to_owned()));
        }
    }
    limits.speculation = match args.speculate {
        SpeculateArg::Off => Speculation::Off,
        SpeculateArg::Ngram => Speculation::Ngram,
        SpeculateArg::Draft | SpeculateArg::Mtp => Speculation::Draft { draw_cost: 0 },
    };
    options.uses_draft_head = args.speculate == SpeculateArg::Mtp;
    limits.max_draft_tokens = args.draft_tokens.unwrap_or(limits.max_draft_tokens);
    options.draft_model = args.draft_model.clone().map(|path| DraftOptions {
        source: ModelSource::Path(path),
        weight_format: args.draft_dtype.and_then(weight_format),
    });
    Ok(())
}

pub fn set_cache(options: &mut LlmOptions, args: &CacheArgs) -> Result<(), Error> {
    options.kv_cache_bytes = args.kv_cache_memory;
    options.kv_spill = KvSpill::Bytes(args.kv_spill_memory.unwrap_or(0));
    options.scheduler.page_size = args.page.block_size;
    options.kv_format = kv_format(args.kv_cache_dtype)?;
    options.scheduler.enable_prefix_caching = !args.no_enable_prefix_caching;
    options.max_pinned_share = args.max_pinned_share;
    for prefix in &args.pin_prefix {
        let text = match prefix.strip_prefix('@') {
            None => prefix.clone(),
            Some(path) => option_file::read_text(Path::new(path))
                .map_err(|error| Error::Io(format!("--pin-prefix cannot read {path}"), error))?,
        };
        options.pinned_prefixes.push(text);
    }
    Ok(())
}

pub fn set_device(options: &mut LlmOptions, args: &DeviceArgs) -> Result<(), Error> {
    options.load_watcher = Some(load_watcher());
    options.device = match args.device {
        DeviceArg::Auto => Device::Auto,
        DeviceArg::Cpu => Device::Cpu,
        DeviceArg::Cuda => Device::Cuda,
        DeviceArg::Mock => Device::Mock,
    };
    options.is_batch_invariant = !args.no_batch_invariance;
    options.gpu_memory_utilization = args.gpu_memory_utilization;
    let dictates = !args.mock_dictation.is_empty() || args.mock_script.is_some();
    if dictates && options.device != Device::Mock {
        let reason = "--mock-dictation and --mock-script need --device mock";
        return Err(Error::Config(reason.to_owned()));
    }
    options.mock_cost = args.mock_time.cost();
    if options.mock_cost.is_some() && options.device != Device::Mock {
        let reason = "--mock-step-us, --mock-token-us and --mock-decode-us need --device mock";
        return Err(Error::Config(reason.to_owned()));
    }
    options.mock_dictations.clone_from(&args.mock_dictation);
    if let Some(path) = &args.mock_script {
        options.mock_script = mock_script(path)?;
    }
    check_threads(args.threads)?;
    options.num_threads = args.threads;
    options.pin_threads = args.pin_threads;
    options.isa = args.isa.map(isa);
    Ok(())
}

fn mock_script(path: &Path) -> Result<Vec<(String, String)>, Error> {
    let reason = |error: &dyn std::fmt::Display| {
        Error::Config(format!("--mock-script {}: {error}", path.display()))
    };
    let text = option_file::read(path).map_err(|error| reason(&error))?;
    serde_json::from_slice(&text).map_err(|error| reason(&error))
}

/// Refuses far too many threads, and warns of too many. Threads meet at a barrier after every
/// operation, so more threads than cores slow each other down; with thousands, the program seems to
/// hang.
pub fn check_threads(num_threads: Option<usize>) -> Result<(), Error> {
    const MAX_PER_CORE: usize = 8;
    let num_cores = num_cores();
    let cores = match num_cores {
        1 => "1 core".to_owned(),
        _ => format!("{num_cores} cores"),
    };
    match num_threads {
        Some(0) => Err(Error::Config("--threads must be at least 1".to_owned())),
        Some(asked) if asked > MAX_PER_CORE * num_cores => Err(Error::Config(format!(
            "--threads {asked} is too many for the {cores} that this process may use: more threads \
             than cores only wait for each other; leave --threads out for one on each core"
        ))),
        Some(asked) if asked > num_cores => {
            tracing::warn!(
                "--threads {asked} is more than the {cores} that this process may use: threads \
                 will wait for each other"
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

pub fn isa(arg: IsaArg) -> Isa {
    match arg {
        IsaArg::Portable => Isa::Portable,
        IsaArg::Avx2 => Isa::Avx2,
        IsaArg::Avx512 => Isa::Avx512,
        IsaArg::Avx512Bf16 => Isa::Avx512Bf16,
        IsaArg::Amx => Isa::Amx,
    }
}

pub fn weight_format(arg: WeightFormatArg) -> Option<WeightFormat> {
    match arg {
        WeightFormatArg::Auto => None,
        WeightFormatArg::F32 => Some(WeightFormat::Float(DType::F32)),
        WeightFormatArg::F16 => Some(WeightFormat::Float(DType::F16)),
        WeightFormatArg::Bf16 => Some(WeightFormat::Float(DType::Bf16)),
        WeightFormatArg::Int8 => Some(WeightFormat::Int8),
        WeightFormatArg::Int8Grouped => Some(WeightFormat::INT8_GROUPED),
        WeightFormatArg::Int4 => Some(WeightFormat::INT4),
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

pub fn check_sampling(args: &SamplingArgs) -> Result<(), Error> {
    check(args.temperature, "--temperature", "at least 0", |x| {
        x >= 0.0
    })?;
    check(args.top_p, "--top-p", "above 0 and at most 1", |x| {
        x > 0.0 && x <= 1.0
    })?;
    check(args.min_p, "--min-p", "from 0 to 1", |x| {
        (0.0..=1.0).contains(&x)
    })
}

fn check(
    value: Option<f32>,
    flag: &str,
    range: &str,
    valid: impl Fn(f32) -> bool,
) -> Result<(), Error> {
    match value {
        Some(value) if !valid(value) => Err(Error::Config(format!(
            "{flag} must be {range}, not {value}"
        ))),
        _ => Ok(()),
    }
}
