//! What this machine can do at best, to judge speeds by.

use std::io;
use std::time::Instant;

use crate::kernels::{Kernels, Peak, detect_isa, kernels};
use crate::region::Region;
use crate::thread_pool::{ThreadPool, Worker};

/// Of all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// f32 multiply-adds from registers, each counted as two operations.
    pub flops_per_s: f64,
    /// Products of bf16, where there are instructions for them.
    pub bf16_flops_per_s: Option<f64>,
    /// The same for 8-bit integers.
    pub int8_ops_per_s: Option<f64>,
    /// Reads of memory too large for any cache.
    pub read_bytes_per_s: f64,
}

/// Measures with the best kernels there are; takes a few tenths of a second.
pub fn measure_limits(num_threads: usize) -> io::Result<MachineLimits> {
    const ITERATIONS: usize = 500_000;
    const READ_BYTES: usize = 256 << 20;
    let mut pool = ThreadPool::new(num_threads)?;
    let kernels = kernels(detect_isa())
        .ok_or_else(|| io::Error::other("no kernels for the detected instruction set"))?;
    let peak_s = best_of(&mut pool, |_| {
        // SAFETY: the table is of this machine's instruction set.
        let sum = unsafe { (kernels.peak)(ITERATIONS) };
        std::hint::black_box(sum);
    })?;
    let mut ops_per_s = |peak: Option<Peak>| match peak {
        Some(peak) => {
            // SAFETY: as above.
            let seconds = best_of(&mut pool, |_| unsafe { (peak.run)(ITERATIONS) })?;
            let ops = pool.num_threads() * peak.ops * ITERATIONS;
            Ok::<_, io::Error>(Some(ops as f64 / seconds))
        }
        None => Ok(None),
    };
    let bf16_flops_per_s = ops_per_s(kernels.tile_gemm.map(|tiles| tiles.peak))?;
    let int8_ops_per_s = ops_per_s(kernels.int8_peak)?;
    let region = Region::new(pool.num_threads() * READ_BYTES)?;
    let part = |worker: &Worker<'_>| {
        // SAFETY: each worker has a part of its own.
        unsafe { region.as_ptr().add(worker.index() * READ_BYTES) }
    };
    pool.run(&|worker| {
        // SAFETY: the worker's part. Pages never written would all be the same zero page.
        unsafe { part(worker).write_bytes(1, READ_BYTES) };
    })
    .map_err(io::Error::other)?;
    let mut read_s = f64::INFINITY;
    for fetch_ahead in [false, true] {
        let seconds = best_of(&mut pool, |worker| {
            // SAFETY: the worker's part, which nobody writes any more.
            let mixed = unsafe { (kernels.read)(part(worker), READ_BYTES, fetch_ahead) };
            std::hint::black_box(mixed);
        })?;
        read_s = read_s.min(seconds);
    }
    let num_threads = pool.num_threads() as f64;
    Ok(MachineLimits {
        bf16_flops_per_s,
        int8_ops_per_s,
        flops_per_s: num_threads * operations(kernels, ITERATIONS) / peak_s,
        read_bytes_per_s: num_threads * READ_BYTES as f64 / read_s,
    })
}

fn operations(kernels: &Kernels, iterations: usize) -> f64 {
    kernels.peak_flops as f64 * iterations as f64
}

/// Seconds of the fastest of some runs: others on the machine only ever slow a run down.
fn best_of(pool: &mut ThreadPool, job: impl Fn(&Worker<'_>) + Sync) -> io::Result<f64> {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        pool.run(&job).map_err(io::Error::other)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}
