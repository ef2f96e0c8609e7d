//! `corella bench`: load and micro-benchmarks, numbers on standard output.

use std::error::Error;

use corella::Llm;
use corella_bench::cache_replay::{self, CacheReplayOptions};
use corella_bench::offline;
use corella_bench::scheduler::{self, SchedulerBenchOptions};
use corella_bench::serve::BenchServeOptions;
use tokio::runtime::Runtime;

use crate::args::{BenchCacheArgs, BenchSchedulerArgs};
use crate::config::BenchOffline;

pub fn serve(options: BenchServeOptions) -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::new()?;
    let report = runtime.block_on(corella_bench::serve::run(options))?;
    println!("{report}");
    Ok(())
}

pub fn offline(config: BenchOffline) -> Result<(), Box<dyn Error>> {
    let llm = Llm::load(&config.source, &config.options)?;
    eprintln!("{}", llm.summary());
    let runtime = Runtime::new()?;
    let vocab_size = llm.config.spec.vocab_size;
    let run = offline::run(&llm.engine, llm.name.clone(), vocab_size, &config.load);
    println!("{}", runtime.block_on(run)?);
    Ok(())
}

pub fn scheduler(args: BenchSchedulerArgs) -> Result<(), Box<dyn Error>> {
    let numbers = [&args.num_running, &args.num_tokens].into_iter().flatten();
    if args.num_steps == 0 || numbers.copied().any(|number| number == 0) {
        return Err("--num-running, --num-steps and --num-tokens must be at least 1".into());
    }
    let report = scheduler::run(&SchedulerBenchOptions {
        num_running: args.num_running,
        num_waiting: args.num_waiting,
        num_steps: args.num_steps,
        num_tokens: args.num_tokens,
    });
    print!("{report}");
    if let Some(path) = &args.output_json {
        std::fs::write(path, format!("{}\n", report.to_json()))
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
        println!("{replay}");
    }
    Ok(())
}
