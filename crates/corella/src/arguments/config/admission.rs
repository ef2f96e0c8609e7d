//! The configuration of `corella bench admission`, from its command line.

use std::path::PathBuf;

use corella_bench::admission::{AdmissionOptions, Arrivals, LengthSource};
use corella_core::SchedulerConfig;
use corella_model::CostModel;

use crate::Error;
use crate::arguments::args::{BenchAdmissionArgs, LenRange};

pub struct BenchAdmission {
    pub options: AdmissionOptions,
    pub output_json: Option<PathBuf>,
}

fn check(args: &BenchAdmissionArgs) -> Result<(), Error> {
    let costs = [
        args.cost.step_us,
        args.cost.token_us,
        args.cost.attended_kilotoken_us,
    ];
    let are_times = costs.iter().all(|micros| (0.0..=1e9).contains(micros));
    let factors = [
        args.load.scale.length_scale,
        args.load.output_scale.unwrap_or(1.0),
        args.load.scale.time_scale,
        args.load.request_rate.unwrap_or(1.0),
    ];
    let are_factors = factors.iter().all(|x| *x > 0.0 && x.is_finite());
    let faults = [
        (
            !are_times || costs.iter().sum::<f64>() == 0.0,
            "--step-us, --token-us and --attended-kilotoken-us must be from 0 to 1e9, and one of them above 0",
        ),
        (
            !are_factors,
            "--length-scale, --output-scale, --time-scale and --request-rate must be above 0",
        ),
        (
            args.load.num_requests == Some(0) || args.scheduler.page.block_size == 0,
            "--num-requests and --block-size must be at least 1",
        ),
        (
            args.scheduler.kv_cache_tokens < args.scheduler.page.block_size,
            "--kv-cache-tokens must be at least --block-size: the cache needs at least one page",
        ),
    ];
    match faults.into_iter().find(|(is_wrong, _)| *is_wrong) {
        Some((_, reason)) => Err(Error::Config(reason.to_owned())),
        None => Ok(()),
    }
}

pub fn bench_admission(args: BenchAdmissionArgs) -> Result<BenchAdmission, Error> {
    check(&args)?;
    let (load, scheduler, cost) = (args.load, args.scheduler, args.cost);
    let output_scale = load.output_scale.unwrap_or(load.scale.length_scale);
    let num_pages = scheduler.kv_cache_tokens / scheduler.page.block_size;
    let mut config = SchedulerConfig::new(
        num_pages,
        scheduler.page.block_size,
        scheduler.max_model_len,
    );
    config.max_num_seqs = scheduler.max_num_seqs;
    config.max_num_batched_tokens = scheduler.max_num_batched_tokens;
    config.max_prefill_tokens = scheduler
        .max_prefill_tokens
        .unwrap_or(scheduler.max_num_batched_tokens);
    config.enable_prefix_caching = scheduler.prefix_caching;
    let arrivals = match (load.request_rate, &load.trace) {
        (Some(rate), _) => Arrivals::Rate(rate),
        (None, Some(_)) if !load.at_once => Arrivals::Trace {
            time_scale: load.scale.time_scale,
        },
        _ => Arrivals::AtOnce,
    };
    let range = |LenRange(first, last): LenRange| {
        let number = |len| u32::try_from(len).unwrap_or(u32::MAX);
        (number(first), number(last))
    };
    let (lengths, num_requests) = match (load.trace, load.prompt_len, load.output_len) {
        (Some(file), ..) => {
            let lengths = LengthSource::Trace {
                file,
                prompt_scale: load.scale.length_scale,
                output_scale,
            };
            (lengths, load.num_requests)
        }
        (None, Some(prompt), Some(output)) => {
            let lengths = LengthSource::Ranges {
                prompt: range(prompt),
                output: range(output),
                seed: load.seed,
            };
            (lengths, load.num_requests.or(Some(300)))
        }
        _ => {
            let reason = "--trace, or --prompt-len and --output-len, must be given";
            return Err(Error::Config(reason.to_owned()));
        }
    };
    Ok(BenchAdmission {
        options: AdmissionOptions {
            lengths,
            arrivals,
            num_requests,
            rules: args.rules,
            config,
            cost: CostModel {
                per_step_us: cost.step_us,
                per_token_us: cost.token_us,
                per_decode_us: cost.token_us,
                per_attended_kilotoken_us: cost.attended_kilotoken_us,
            },
        },
        output_json: args.json.output_json,
    })
}
