//! Measures decode steps and prompts on the first GPU, beside its copies and its library's products.

use std::process::ExitCode;
use std::time::Instant;

use corella_cuda::speed::{LimitSizes, Limits, ModelBench, ModelCost, shape};
use corella_cuda::{GpuDevice, SharedDevice};
use corella_model::DeviceError;

const USAGE: &str = "usage: speed [qwen3-0.6b] [llama-3-8b]";

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

fn main() -> ExitCode {
    let mut names: Vec<String> = std::env::args().skip(1).collect();
    if names.is_empty() {
        names = ["qwen3-0.6b", "llama-3-8b"].map(String::from).into();
    }
    if names.iter().any(|name| shape(name).is_none()) {
        eprintln!("{USAGE}");
        return ExitCode::FAILURE;
    }
    match run(&names) {
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
    println!("\n{name}, {products}, ready in {ready:.1} s\n\nwork batch tokens ms share");
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
