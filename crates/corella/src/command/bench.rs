//! `corella bench`: load tests and micro-benchmarks, with results on standard output.

use std::error::Error;
use std::path::Path;

use corella_bench::admission;
use corella_bench::cache_replay::{self, CacheReplayOptions};
use corella_bench::offline;
use corella_bench::reservation;
use corella_bench::scheduler::{self, QueueBenchOptions, SchedulerBenchOptions};
use corella_bench::serve::BenchServeOptions;
use corella_bench::transfer::{self, TransferBenchOptions};
use corella_bench::{BenchError, Comparison};
use corella_cpu::{Isa, MachineLimits, detect_isa, measure_kernels, measure_limits};
use tokio::runtime::Runtime;

use crate::arguments::args::{
    BenchCacheArgs, BenchCompareArgs, BenchSchedulerArgs, BenchTransferArgs,
};
use crate::arguments::config::{BenchAdmission, BenchOffline, BenchPerplexity};
use crate::command::limit_share::{Limit, LimitShare, footnotes};
use crate::command::profile_table::{self, Peak};
use crate::error::option_name::in_options;
use crate::terminal::output::{print_line, print_text};
use crate::{Llm, Perplexity};

pub fn serve(options: BenchServeOptions) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let report = runtime.block_on(corella_bench::serve::run(options))?;
    print_line(format_args!("{report}"));
    Ok(())
}

pub fn offline(config: BenchOffline) -> Result<(), Box<dyn Error>> {
    let mut llm = Llm::load(&config.source, &config.options)?;
    // Writing packed weights to disk would disturb the measurement.
    llm.weight_keepers.clear();
    eprintln!("{}", llm.summary());
    let num_threads = llm.hardware.executor.num_threads;
    let isa = config.options.isa.unwrap_or_else(detect_isa);
    let limits_before = match config.options.profile {
        Some(_) => Some(measure_limits(num_threads, isa)?),
        None => None,
    };
    let runtime = Runtime::new()?;
    let vocab_size = llm.config.spec.vocab_size;
    let run = offline::run(&llm.engine, llm.name.clone(), vocab_size, &config.load);
    match config.reserve_every {
        None => print_line(format_args!("{}", runtime.block_on(run)?)),
        Some(interval) => {
            let both = reservation::measure_beside(run, &llm.engine, interval);
            let (report, times) = runtime.block_on(both)?;
            print_line(format_args!("{}\n{times}", report?));
        }
    }
    if let (Some(profile), Some(before)) = (&config.options.profile, limits_before) {
        let limits = before.best_of(&measure_limits(num_threads, isa)?);
        for table in profile_table::tables(profile, &llm.hardware, &limits) {
            eprintln!("\n{table}");
        }
    }
    Ok(())
}

pub fn compare(args: BenchCompareArgs) -> Result<(), Box<dyn Error>> {
    let paths = [&*args.first, &*args.second];
    print_text(format_args!("{}", Comparison::run(paths, args.report)?));
    Ok(())
}

pub fn kernels((num_threads, isa): (usize, Option<Isa>)) -> Result<(), Box<dyn Error>> {
    let isa = isa.unwrap_or_else(detect_isa);
    print_line(format_args!("limits, with n threads:"));
    for threads in 1..num_threads {
        let limits = measure_limits(threads, isa)?;
        print_line(format_args!("{threads:>6}  {}", limits_line(&limits)));
    }
    let before = measure_limits(num_threads, isa)?;
    print_line(format_args!("{num_threads:>6}  {}", limits_line(&before)));
    let speeds = measure_kernels(num_threads, Some(isa))?;
    // Limits are measured again afterwards, because the speed of a shared machine varies.
    let after = measure_limits(num_threads, isa)?;
    print_line(format_args!("        {}", limits_line(&after)));
    let limits = before.best_of(&after);
    print_line("");
    print_line(format_args!(
        "{:<36}{:>9}{:>8}{:>9}{:>8}",
        "", "TFLOP/s", "", "GB/s", ""
    ));
    let mut shares = Vec::new();
    for speed in speeds {
        let peak = Peak::of(speed.format, &limits).flops_per_s;
        let of_peak = LimitShare::new(Limit::Arithmetic, speed.flops_per_s, peak);
        let of_memory = LimitShare::new(Limit::Memory, speed.bytes_per_s, limits.read_bytes_per_s);
        shares.extend([of_peak, of_memory]);
        print_line(format_args!(
            "{:<36}{:>9.3}{:>6.0} %{:>9.1}{:>6.0} %",
            speed.name,
            speed.flops_per_s / 1e12,
            of_peak.percent(),
            speed.bytes_per_s / 1e9,
            of_memory.percent(),
        ));
    }
    print_text(format_args!("{}", footnotes(&shares)));
    Ok(())
}

fn limits_line(limits: &MachineLimits) -> String {
    let mut line = format!(
        "{:.1} GB/s of reads, {:.3} TFLOP/s f32",
        limits.read_bytes_per_s / 1e9,
        limits.flops_per_s / 1e12
    );
    if let Some(bf16) = limits.bf16_flops_per_s {
        line += &format!(", {:.2} TFLOP/s bf16", bf16 / 1e12);
    }
    if let Some(int8) = limits.int8_ops_per_s {
        line += &format!(", {:.2} TOP/s int8", int8 / 1e12);
    }
    line
}

pub fn perplexity(config: BenchPerplexity) -> Result<(), Box<dyn Error>> {
    let context = config.context as usize;
    let found = Perplexity::measure(&config.source, &config.options, &config.documents, context)?;
    let hardware = &found.hardware;
    print_line(format_args!(
        "perplexity {:.4}, loss {:.5}, of {} tokens ({}, {})",
        found.loss.exp(),
        found.loss,
        found.num_tokens,
        hardware.weight_format.name(),
        hardware.executor.isa,
    ));
    Ok(())
}

pub fn scheduler(args: BenchSchedulerArgs) -> Result<(), Box<dyn Error>> {
    let numbers = [&args.num_running, &args.num_tokens].into_iter().flatten();
    let numbers = numbers.chain([&args.num_steps, &args.num_calls]);
    if numbers.chain(&args.num_queued).any(|&number| number == 0) {
        let reason = "--num-running, --num-steps, --num-queued, --num-calls and --num-tokens must \
                      be at least 1";
        return Err(reason.into());
    }
    let mut queue = QueueBenchOptions {
        num_waiting: args.num_queued,
        ..QueueBenchOptions::default()
    };
    queue.limits.num_calls = args.num_calls;
    if args.num_cached_pages.iter().any(|&num_pages| num_pages < 2) {
        return Err("--num-cached-pages must be at least 2: half of them are replaced".into());
    }
    let report = scheduler::run(&SchedulerBenchOptions {
        num_running: args.num_running,
        num_waiting: args.num_waiting,
        num_steps: args.num_steps,
        num_tokens: args.num_tokens,
        queue,
        num_cached_pages: args.num_cached_pages,
    });
    print_text(format_args!("{report}"));
    write_json(args.json.output_json.as_deref(), &report.to_json())
}

pub fn transfer(args: BenchTransferArgs) -> Result<(), Box<dyn Error>> {
    let numbers = [
        args.connections,
        args.repeats,
        args.chunk_kb,
        args.repeat_mb,
    ];
    let sizes = args.message_kb.iter().chain(&args.page_kb);
    if sizes.chain(&numbers).any(|&number| number == 0) {
        return Err("every number of bench transfer must be at least 1".into());
    }
    let bytes = |sizes: Vec<usize>| sizes.into_iter().map(|kb| kb << 10).collect();
    let report = transfer::run(&TransferBenchOptions {
        message_bytes: bytes(args.message_kb),
        page_bytes: bytes(args.page_kb),
        num_connections: args.connections,
        num_repeats: args.repeats,
        bytes_per_repeat: args.repeat_mb << 20,
        chunk_bytes: args.chunk_kb << 10,
    })?;
    print_text(format_args!("{report}"));
    write_json(args.output_json.as_deref(), &report.to_json())
}

pub fn admission(config: BenchAdmission) -> Result<(), Box<dyn Error>> {
    let report = admission::run(&config.options);
    let report = report.map_err(|error| match error {
        BenchError::Config(error) => in_options(&error),
        error => error.to_string(),
    })?;
    print_text(format_args!("{report}"));
    write_json(config.output_json.as_deref(), &report.to_json())
}

fn write_json(path: Option<&Path>, json: &serde_json::Value) -> Result<(), Box<dyn Error>> {
    if let Some(path) = path {
        std::fs::write(path, format!("{json}\n"))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

pub fn cache(args: BenchCacheArgs) -> Result<(), Box<dyn Error>> {
    let options = CacheReplayOptions {
        trace: args.trace,
        num_blocks: args.num_blocks,
    };
    for replay in cache_replay::run(&options)? {
        print_line(format_args!("{replay}"));
    }
    Ok(())
}
