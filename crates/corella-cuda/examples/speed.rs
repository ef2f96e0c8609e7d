//! Measures decode steps and prompts on the first GPU and, for comparison, copies and the vendor library's products.
//! Compares the bits of a prompt computed in chunks of different lengths.

use std::process::ExitCode;
use std::time::Instant;

use corella_cuda::speed::{LimitSizes, Limits, ModelBench, ModelCost, shape};
use corella_cuda::{GpuDevice, SharedDevice};
use corella_model::DeviceError;
use cudarc::driver::sys;

const USAGE: &str = "usage: speed [--profile decode:BATCH:CONTEXT | --profile prefill:LEN] [qwen3-0.6b] [llama-3-8b]";

const BATCHES: [(usize, usize); 7] = [
    (1, 1024),
    (8, 1024),
    (64, 1024),
    (256, 1024),
    (1, 8192),
    (8, 8192),
    (64, 8192),
];
const PROMPTS: [usize; 2] = [2048, 8192];
const NUM_STEPS: usize = 48;

/// The prompt for the comparison of bits: its length, the tokens drawn after it, and the lengths of its chunks.
const COMPARED_PROMPT: usize = 200;
const NUM_DRAWN: usize = 8;
const CHUNKS: [usize; 7] = [200, 1, 8, 16, 32, 33, 64];

fn main() -> ExitCode {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    let mut profiled = None;
    if names.first().is_some_and(|name| name == "--profile") {
        profiled = names.get(1).and_then(|text| Work::parse(text));
        names.drain(..names.len().min(2));
        if profiled.is_none() {
            eprintln!("{USAGE}");
            return ExitCode::FAILURE;
        }
    }
    if names.is_empty() {
        names = ["qwen3-0.6b", "llama-3-8b"].map(String::from).into();
    }
    if names.iter().any(|name| shape(name).is_none()) {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    }
    let result = match profiled {
        Some(work) => names.iter().try_for_each(|name| profile(name, work)),
        None => run(&names),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(names: &[String]) -> Result<(), DeviceError> {
    let device = GpuDevice::open(0)?;
    let properties = device.properties();
    println!("{} ({})", properties.name, properties.architecture);
    let sizes = LimitSizes {
        copied_bytes: 4 << 30,
        product_len: 8192,
    };
    let limits = Limits::measure(&device, sizes)?;
    println!(
        "copies: {:.0} GB/s, read and written; bf16 products of 8192: {:.0} TFLOP/s",
        limits.copied_bytes_per_s / 1e9,
        limits.flops_per_s / 1e12
    );
    for name in names {
        for is_batch_invariant in [true, false] {
            measure(&device, &limits, name, is_batch_invariant)?;
        }
    }
    Ok(())
}

fn measure(
    device: &SharedDevice,
    limits: &Limits,
    name: &str,
    is_batch_invariant: bool,
) -> Result<(), DeviceError> {
    let spec = shape(name).ok_or_else(|| DeviceError(USAGE.into()))?;
    let cost = ModelCost::of(&spec);
    let products = match is_batch_invariant {
        true => "batch-invariant",
        false => "cuBLASLt from 64 rows on",
    };
    let begin = Instant::now();
    let max_prompt_len = PROMPTS.into_iter().max().unwrap_or(0);
    let mut bench = ModelBench::new(
        device,
        spec,
        is_batch_invariant,
        &BATCHES,
        max_prompt_len,
        NUM_STEPS,
    )?;
    let ready = begin.elapsed().as_secs_f64();
    println!("\n{name}, {products}, ready in {ready:.1} s\n");
    if is_batch_invariant {
        compare_chunks(&mut bench)?;
    }
    println!("work batch tokens ms share");
    for len in PROMPTS {
        let seconds = bench.prefill(len)?;
        let share = cost.prefill_flops(len) / limits.flops_per_s / seconds;
        println!(
            "prefill 1 {len} {:.3} {:.1}% of the products' rate",
            1e3 * seconds,
            1e2 * share
        );
    }
    for (batch, context) in BATCHES {
        match bench.decode(batch, context)? {
            None => println!("decode {batch} {context} - there is no memory for it"),
            Some(seconds) => {
                let least = cost.decode_bytes(batch, context) / limits.copied_bytes_per_s;
                let share = least / seconds;
                println!(
                    "decode {batch} {context} {:.3} {:.1}% of the copies' rate",
                    1e3 * seconds,
                    1e2 * share
                );
            }
        }
    }
    Ok(())
}

/// Reports for each length of chunks whether all keys and values have the bits of the whole prompt.
fn compare_chunks(bench: &mut ModelBench) -> Result<(), DeviceError> {
    let mut whole = Vec::new();
    for chunk in CHUNKS {
        let bytes = bench.keys_and_values(COMPARED_PROMPT, chunk, NUM_DRAWN)?;
        if whole.is_empty() {
            whole = bytes;
            continue;
        }
        let differences = || whole.iter().zip(&bytes).map(|(a, b)| a != b);
        match differences().position(|differs| differs) {
            None => println!("{COMPARED_PROMPT} rows in chunks of {chunk}: the bits are equal"),
            Some(first) => println!(
                "{COMPARED_PROMPT} rows in chunks of {chunk}: FAILED, {} of {} bytes differ, first byte {first}",
                differences().filter(|differs| *differs).count(),
                whole.len(),
            ),
        }
    }
    Ok(())
}

/// A piece of work for a separate profile.
#[derive(Clone, Copy)]
enum Work {
    Decode { batch: usize, context: usize },
    Prefill { len: usize },
}

impl Work {
    /// Reads `decode:BATCH:CONTEXT` or `prefill:LEN`.
    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(':').collect();
        match words[..] {
            ["decode", batch, context] => Some(Self::Decode {
                batch: batch.parse().ok()?,
                context: context.parse().ok()?,
            }),
            ["prefill", len] => Some(Self::Prefill {
                len: len.parse().ok()?,
            }),
            _ => None,
        }
    }
}

/// Runs one piece of work between the calls that start and stop a profiler: `ncu --profile-from-start off`.
fn profile(name: &str, work: Work) -> Result<(), DeviceError> {
    const NUM_STEPS: usize = 4;
    let device = GpuDevice::open(0)?;
    let spec = shape(name).ok_or_else(|| DeviceError(USAGE.into()))?;
    let (batches, max_prompt_len) = match work {
        Work::Decode { batch, context } => (vec![(batch, context)], 64),
        Work::Prefill { len } => (vec![(1, 64)], len),
    };
    let mut bench = ModelBench::new(&device, spec, true, &batches, max_prompt_len, NUM_STEPS)?;
    // SAFETY: a device is open, so the driver is loaded and has a context.
    let _ = unsafe { sys::cuProfilerStart() };
    match work {
        Work::Decode { batch, context } => bench.decode(batch, context).map(drop),
        Work::Prefill { len } => bench.prefill(len).map(drop),
    }?;
    // SAFETY: as above.
    let _ = unsafe { sys::cuProfilerStop() };
    Ok(())
}
