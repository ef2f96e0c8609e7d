//! What `generate --profile` prints: each operation beside the machine's limits.

use std::fmt;

use corella_cpu::ProfileReport;

pub struct ProfileTable<'a> {
    pub name: &'a str,
    pub report: &'a ProfileReport,
    pub peak_flops_per_s: f64,
    pub read_bytes_per_s: f64,
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
                write!(
                    f,
                    "{:>10.3}{:>6.0} %{:>9.1}{:>6.0} %",
                    flops / 1e12,
                    100.0 * flops / self.peak_flops_per_s,
                    bytes / 1e9,
                    100.0 * bytes / self.read_bytes_per_s
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
        )
    }
}
