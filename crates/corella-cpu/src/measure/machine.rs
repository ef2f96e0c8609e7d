//! Measurements of the machine's peak throughput, as limits for other measurements.

use std::io;
use std::time::{Duration, Instant};

use crate::kernels::{Isa, Kernels, Peak, choose_kernels};
use crate::system::{Region, ThreadPool, Worker};

/// The peak throughput of all threads together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// f32 operations per second, measured in registers. A multiply-add counts as two.
    pub flops_per_s: f64,
    /// bf16 operations per second, if the instruction set multiplies bf16.
    pub bf16_flops_per_s: Option<f64>,
    /// 8-bit integer operations per second, if the kernels have a fast path for these.
    pub int8_ops_per_s: Option<f64>,
    /// Bytes per second read from memory that is too large for any cache.
    pub read_bytes_per_s: f64,
}

impl MachineLimits {
    /// For each limit, the larger value of two measurements. Clock rates and other processes change within seconds, and
    /// other processes only ever slow a measurement down.
    pub fn best_of(&self, other: &Self) -> Self {
        let best = |a: Option<f64>, b: Option<f64>| a.zip(b).map(|(a, b)| a.max(b)).or(a).or(b);
        Self {
            flops_per_s: self.flops_per_s.max(other.flops_per_s),
            bf16_flops_per_s: best(self.bf16_flops_per_s, other.bf16_flops_per_s),
            int8_ops_per_s: best(self.int8_ops_per_s, other.int8_ops_per_s),
            read_bytes_per_s: self.read_bytes_per_s.max(other.read_bytes_per_s),
        }
    }
}

/// Measures the limits of an instruction set, in about half a second.
pub fn measure_limits(num_threads: usize, isa: Isa) -> io::Result<MachineLimits> {
    const ITERATIONS: usize = 500_000;
    const READ_BYTES: usize = 256 << 20;
    let mut pool = ThreadPool::new(num_threads)?;
    let (_, kernels) = choose_kernels(Some(isa)).map_err(io::Error::other)?;
    let peak_s = best_of(&mut pool, |_| {
        // SAFETY: the machine supports this instruction set, because `choose_kernels` succeeded.
        let sum = unsafe { (kernels.peak)(ITERATIONS) };
        std::hint::black_box(sum);
    })?;
    let mut ops_per_s = |peak: Option<Peak>| match peak {
        Some(peak) => {
            // SAFETY: the same as above.
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
        // SAFETY: the region has one part per worker.
        unsafe { region.as_ptr().add(worker.index() * READ_BYTES) }
    };
    pool.run(&|worker| {
        // SAFETY: this part belongs to the worker. Unwritten pages would all be the same zero page.
        unsafe { part(worker).write_bytes(1, READ_BYTES) };
    })
    .map_err(io::Error::other)?;
    let mut read_s = f64::INFINITY;
    for fetch_ahead in [false, true] {
        let seconds = best_of(&mut pool, |worker| {
            // SAFETY: this part belongs to the worker, and is no longer written.
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

/// Seconds of the fastest run, because other processes only ever slow a run down. Runs last much
/// longer than the few milliseconds in which a core raises its clock rate.
fn best_of(pool: &mut ThreadPool, job: impl Fn(&Worker<'_>) + Sync) -> io::Result<f64> {
    const MIN_RUNS: usize = 5;
    const MIN_DURATION: Duration = Duration::from_millis(100);
    let mut best = f64::INFINITY;
    let mut num_runs = 0;
    let first = Instant::now();
    while num_runs < MIN_RUNS || first.elapsed() < MIN_DURATION {
        let start = Instant::now();
        pool.run(&job).map_err(io::Error::other)?;
        best = best.min(start.elapsed().as_secs_f64());
        num_runs += 1;
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_of_two_measurements_is_the_best_of_each_limit() {
        let limits = |flops_per_s, int8_ops_per_s, read_bytes_per_s| MachineLimits {
            flops_per_s,
            bf16_flops_per_s: None,
            int8_ops_per_s,
            read_bytes_per_s,
        };
        let best = limits(1.0, Some(5.0), 9.0).best_of(&limits(2.0, Some(4.0), 7.0));
        assert_eq!(best, limits(2.0, Some(5.0), 9.0));
        let best = limits(1.0, None, 9.0).best_of(&limits(1.0, Some(4.0), 9.0));
        assert_eq!(best, limits(1.0, Some(4.0), 9.0));
    }
}
