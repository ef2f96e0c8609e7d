//! Runs test binaries and sums up their results.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use super::slow_test;
use crate::test_binary::TestBinary;

/// The outcomes of all test binaries that have run.
#[derive(Default)]
pub struct Tally {
    pub num_passed: usize,
    /// The failures: tests, or binaries that ended without naming a failed test.
    pub failed: Vec<String>,
    /// Seconds and name of each test that ran.
    times: Vec<(f64, String)>,
}

impl Tally {
    /// Runs a test binary and shows all of its output except the names of passing tests.
    pub fn run(&mut self, binary: &TestBinary, mut command: Command) -> Result<(), String> {
        let title = format!("{} {}", binary.package, binary.name);
        println!("\n     Running {title}");
        // Only a nightly compiler's harness reports test times, unless this variable is set.
        command.env("RUSTC_BOOTSTRAP", "1");
        command.args(["-Zunstable-options", "--report-time"]);
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{title} did not start: {error}"))?;
        let stdout = child.stdout.take().ok_or("a piped output is missing")?;
        let num_failed = self.failed.len();
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(|error| format!("{title}: {error}"))?;
            let line = String::from_utf8_lossy(&line);
            match Line::parse(&line) {
                Line::Passed { name, seconds } => {
                    self.num_passed += 1;
                    self.times.push((seconds, format!("{title} {name}")));
                }
                Line::Failed { name } => {
                    println!("{line}");
                    self.failed.push(format!("{title} {name}"));
                }
                Line::Other => println!("{line}"),
                Line::Noise => {}
            }
        }
        let status = child.wait().map_err(|error| format!("{title}: {error}"))?;
        if !status.success() && self.failed.len() == num_failed {
            self.failed.push(format!("{title} ({status})"));
        }
        Ok(())
    }

    pub fn print_slowest(&mut self) {
        self.times.sort_by(|a, b| b.0.total_cmp(&a.0));
        println!("\nthe slowest tests:");
        for (seconds, name) in self.times.iter().take(20) {
            println!("{seconds:8.1} s  {name}");
        }
        for (seconds, name) in &self.times {
            if *seconds > slow_test::BOUND_S && !slow_test::has_reason(name) {
                println!(
                    "note: {name} took {seconds:.0} s; make it quicker, or give a reason in \
                     xtask/src/test/slow_test.rs"
                );
            }
        }
    }

    pub fn verdict(&self) -> Result<(), String> {
        match self.failed.as_slice() {
            [] => Ok(()),
            failed => Err(format!("tests failed:\n  {}", failed.join("\n  "))),
        }
    }
}

/// A line of a test binary's output.
#[derive(Debug, PartialEq)]
enum Line<'a> {
    Passed {
        name: &'a str,
        seconds: f64,
    },
    Failed {
        name: &'a str,
    },
    /// Lines that mean nothing to a reader of the whole run.
    Noise,
    Other,
}

impl<'a> Line<'a> {
    /// Reads lines such as `test a::b ... ok <0.012s>`.
    fn parse(line: &'a str) -> Self {
        let is_count = line.starts_with("running ") && line.ends_with(['s', 't']);
        if line.is_empty() || is_count {
            return Self::Noise;
        }
        let Some((name, outcome)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.split_once(" ... "))
        else {
            return Self::Other;
        };
        if outcome.starts_with("ignored") {
            return Self::Noise;
        }
        if outcome.starts_with("FAILED") {
            return Self::Failed { name };
        }
        let time = outcome.strip_prefix("ok").map(str::trim);
        let seconds =
            time.and_then(|time| time.strip_prefix('<')?.strip_suffix("s>")?.parse().ok());
        match (time, seconds) {
            (Some(_), seconds) => Self::Passed {
                name,
                seconds: seconds.unwrap_or(0.0),
            },
            (None, _) => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_harness_are_told_apart() {
        let passed = Line::Passed {
            name: "a::b",
            seconds: 1.25,
        };
        assert_eq!(Line::parse("test a::b ... ok <1.250s>"), passed);
        let without_time = Line::Passed {
            name: "a",
            seconds: 0.0,
        };
        assert_eq!(Line::parse("test a ... ok"), without_time);
        let failed = Line::Failed { name: "a::b" };
        assert_eq!(Line::parse("test a::b ... FAILED <0.001s>"), failed);
        assert_eq!(Line::parse("test a ... ignored, run by b"), Line::Noise);
        assert_eq!(Line::parse("running 12 tests"), Line::Noise);
        assert_eq!(Line::parse("running 1 test"), Line::Noise);
        let result = "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(Line::parse(result), Line::Other);
        assert_eq!(Line::parse("thread 'a' panicked at b.rs:1:2:"), Line::Other);
    }
}
