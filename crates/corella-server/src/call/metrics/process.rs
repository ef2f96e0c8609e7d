//! The usual process metrics of Prometheus' libraries, read from Linux's `/proc`.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use crate::wire::metric_series::encode;

/// Reads the metrics at each scrape. Other systems than Linux have none of them.
#[derive(Debug)]
pub struct ProcessMetrics;

impl Collector for ProcessMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let encoder = &mut encoder;
        if let Some(stat) = fs::read_to_string("/proc/self/stat")
            .ok()
            .and_then(|text| ProcessStat::parse(&text, &Units::of_system()?))
        {
            let ProcessStat {
                cpu_seconds,
                start_seconds,
                virtual_bytes,
                resident_bytes,
            } = stat;
            encode(
                encoder,
                "process_cpu_seconds",
                "Time that the process computed, in user and system mode",
                &ConstCounter::new(cpu_seconds),
            )?;
            encode(
                encoder,
                "process_start_time_seconds",
                "When the process started, in seconds since 1970",
                &ConstGauge::new(start_seconds),
            )?;
            encode(
                encoder,
                "process_virtual_memory_bytes",
                "Size of the process's address space",
                &ConstGauge::new(virtual_bytes),
            )?;
            encode(
                encoder,
                "process_resident_memory_bytes",
                "Memory of the process that is in RAM, files that it maps included",
                &ConstGauge::new(resident_bytes),
            )?;
        }
        if let Ok(files) = fs::read_dir("/proc/self/fd") {
            encode(
                encoder,
                "process_open_fds",
                "Files and sockets that the process has open",
                &ConstGauge::new(files.count() as i64),
            )?;
        }
        let limits = fs::read_to_string("/proc/self/limits");
        if let Some(most) = limits.ok().and_then(|text| max_open_files(&text)) {
            encode(
                encoder,
                "process_max_fds",
                "Files and sockets that the process may have open",
                &ConstGauge::new(most),
            )?;
        }
        Ok(())
    }
}

/// The units of `/proc/self/stat`.
struct Units {
    ticks_per_second: f64,
    page_bytes: i64,
    /// The machine's start, in seconds since 1970.
    boot_seconds: f64,
}

impl Units {
    fn of_system() -> Option<Self> {
        // SAFETY: `sysconf` only reads the number.
        let [ticks, page_bytes] =
            [libc::_SC_CLK_TCK, libc::_SC_PAGESIZE].map(|name| unsafe { libc::sysconf(name) });
        let stat = fs::read_to_string("/proc/stat").ok()?;
        let boot = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
        (ticks > 0 && page_bytes > 0).then_some(Self {
            ticks_per_second: ticks as f64,
            page_bytes,
            boot_seconds: boot.trim().parse().ok()?,
        })
    }
}

#[derive(Debug, PartialEq)]
struct ProcessStat {
    cpu_seconds: f64,
    start_seconds: f64,
    virtual_bytes: i64,
    resident_bytes: i64,
}

impl ProcessStat {
    /// Parses the line, which proc_pid_stat(5) describes. The name of the program, in brackets, may have spaces and
    /// brackets.
    fn parse(line: &str, units: &Units) -> Option<Self> {
        let (_, behind_name) = line.rsplit_once(')')?;
        // The first of these fields is the third of the line.
        let fields: Vec<&str> = behind_name.split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3)?.parse::<i64>().ok();
        let seconds = |ticks: i64| ticks as f64 / units.ticks_per_second;
        Some(Self {
            cpu_seconds: seconds(field(14)? + field(15)?),
            start_seconds: units.boot_seconds + seconds(field(22)?),
            virtual_bytes: field(23)?,
            resident_bytes: field(24)? * units.page_bytes,
        })
    }
}

/// Returns the soft limit of open files in `/proc/self/limits`.
fn max_open_files(limits: &str) -> Option<i64> {
    let line = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_of_a_process_is_read_behind_its_name() {
        let line = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 8 9 20 0 4 0 300 4096000 25 18446744073709551615";
        let units = Units {
            ticks_per_second: 100.0,
            page_bytes: 4096,
            boot_seconds: 1000.0,
        };
        let expected = ProcessStat {
            cpu_seconds: 2.0,
            start_seconds: 1003.0,
            virtual_bytes: 4_096_000,
            resident_bytes: 25 * 4096,
        };
        assert_eq!(ProcessStat::parse(line, &units), Some(expected));
        assert_eq!(ProcessStat::parse("7 (a) S 1", &units), None);
        assert_eq!(ProcessStat::parse("", &units), None);
    }

    #[test]
    fn the_soft_limit_counts() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\nMax open files            1024                 4096  files\n";
        assert_eq!(max_open_files(limits), Some(1024));
        assert_eq!(max_open_files("Max open files  unlimited"), None);
    }
}
