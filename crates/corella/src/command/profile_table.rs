//! The output of `--profile`: each operation beside the machine's limits.

use std::fmt;

use corella_cpu::{MachineLimits, Profile, ProfileReport};
use corella_model::{DType, WeightFormat};

use crate::Hardware;
use crate::command::limit_share::{Limit, LimitShare, footnotes};

/// The machine's peak speed in one kind of arithmetic, such as bf16. Measured speeds are shown as shares of it.
pub struct Peak {
    pub flops_per_s: f64,
    pub name: &'static str,
}

impl Peak {
    /// Returns the peak of the arithmetic that multiplies weights of this format.
    pub fn of(format: WeightFormat, limits: &MachineLimits) -> Self {
        let (bf16, int8) = (limits.bf16_flops_per_s, limits.int8_ops_per_s);
        let (flops_per_s, name) = match (format, bf16, int8) {
            (WeightFormat::Float(DType::Bf16), Some(peak), _) => (peak, "bf16"),
            (format, _, Some(peak)) if format.has_integers() => (peak, "int8"),
            _ => (limits.flops_per_s, "f32 FMA"),
        };
        Self { flops_per_s, name }
    }
}

/// Returns a table for the steps with prefill and a table for the other steps. A table without steps is left out.
pub fn tables(profile: &Profile, hardware: &Hardware, limits: &MachineLimits) -> Vec<String> {
    let reports = profile.report(hardware.executor.num_threads);
    let named = ["prefill", "decode"].into_iter().zip(&reports);
    let tables = named.filter(|(_, report)| report.num_steps > 0);
    let tables = tables.map(|(name, report)| {
        let table = ProfileTable {
            name,
            report,
            peak_flops_per_s: Peak::of(hardware.weight_format, limits).flops_per_s,
            read_bytes_per_s: limits.read_bytes_per_s,
        };
        table.to_string()
    });
    tables.collect()
}

struct ProfileTable<'a> {
    name: &'a str,
    report: &'a ProfileReport,
    peak_flops_per_s: f64,
    read_bytes_per_s: f64,
}

impl fmt::Display for ProfileTable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        let total = report.duration.as_secs_f64();
        let steps = report.num_steps;
        writeln!(
            f,
            "{:<16}{:>10}{:>8}{:>9}{:>18}{:>17}",
            self.name, "ms a step", "share", "waiting", "TFLOP/s", "GB/s"
        )?;
        let mut elsewhere = total;
        let mut shares = Vec::new();
        for operation in &report.operations {
            let (busy, waiting) = (
                operation.busy.as_secs_f64(),
                operation.waiting.as_secs_f64(),
            );
            let seconds = busy + waiting;
            elsewhere -= seconds;
            write!(
                f,
                "  {:<14}{:>10.3}{:>6.1} %{:>7.1} %",
                operation.operation.name(),
                1e3 * seconds / steps as f64,
                100.0 * seconds / total,
                100.0 * waiting / total,
            )?;
            if operation.flops > 0.0 {
                let (flops, bytes) = (operation.flops / seconds, operation.bytes / seconds);
                let of_peak = LimitShare::new(Limit::Arithmetic, flops, self.peak_flops_per_s);
                let of_memory = LimitShare::new(Limit::Memory, bytes, self.read_bytes_per_s);
                shares.extend([of_peak, of_memory]);
                write!(
                    f,
                    "{:>10.3}{:>6.0} %{:>9.1}{:>6.0} %",
                    flops / 1e12,
                    of_peak.percent(),
                    bytes / 1e9,
                    of_memory.percent()
                )?;
            }
            writeln!(f)?;
        }
        write!(
            f,
            "  {:<14}{:>10.3}{:>6.1} %\n  {:<14}{:>10.3}   of {steps} step{}",
            "between them",
            1e3 * elsewhere / steps as f64,
            100.0 * elsewhere / total,
            "all",
            1e3 * total / steps as f64,
            if steps == 1 { "" } else { "s" },
        )?;
        f.write_str(&footnotes(&shares))
    }
}
