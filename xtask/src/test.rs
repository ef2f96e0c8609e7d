//! `cargo xtask test`: unit, property, golden and conformance tests of all crates. It needs only Rust.
//!
//! Cargo builds the test binaries, and this task runs them in order as cargo would, so that it can report the time of
//! each test. Tests that need a system program run in stage `programs` of CI.

mod binary_run;
mod slow_test;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::limit;
use crate::repository::{Repository, run};
use crate::stage::minutes;
use crate::test_binary::{self, TestBinary};
use binary_run::Tally;
pub use slow_test::reasons_of_slow_tests;

/// The features of all test builds, so that nothing is built twice. With them the tests of corella-cuda run on a device
/// in host memory, and those of corella-cpu can be held to emulated AMX.
pub const FEATURES: [&str; 2] = [
    "--features",
    "corella-cpu/emulated-tiles,corella-cuda/emulated-device,corella-cuda/speed",
];

/// Tests that need a system program or library: the package, the prefix of their names, and the requirement.
const NEED_PROGRAMS: [(&str, &str, &str); 3] = [
    ("corella-cluster", "registry::etcd::", "etcd"),
    ("corella-cluster", "transport::tls::", "openssl"),
    ("corella-cluster", "transport::nixl::", "NIXL"),
];

/// The crate whose tests run on a device in host memory, and the test of the engine on it. They need a C++ compiler and
/// minutes, so they are a part of the night.
const EMULATED_GPU: &str = "corella-cuda";
const ENGINE_ON_EMULATED_GPU: &str = "emulated_gpu";

/// Runs the tests of all crates. `-p CRATE` selects crates; other arguments go to the test binaries.
pub fn test(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let start = Instant::now();
    let (packages, filters) = split(arguments)?;
    let mut binaries = binaries(repository)?;
    let build_time = start.elapsed();
    binaries.retain(|binary| match packages.is_empty() {
        true => !is_of_emulated_gpu(binary),
        false => packages.contains(&binary.package),
    });
    if binaries.is_empty() {
        return Err(format!("there are no tests in {}", packages.join(", ")));
    }
    let mut tally = Tally::default();
    for binary in &binaries {
        let mut command = binary.command();
        command.args(&filters);
        for (_, prefix, _) in needs(binary) {
            command.args(["--skip", prefix]);
        }
        tally.run(binary, command)?;
    }
    let is_whole = arguments.is_empty();
    if is_whole {
        record_time(repository, start.elapsed())?;
    }
    tally.print_slowest();
    println!();
    if is_whole {
        limit::print_time("cargo xtask test", start.elapsed(), limit::TEST);
    }
    let mut programs: Vec<&str> = binaries.iter().flat_map(needs).map(|need| need.2).collect();
    programs.sort_unstable();
    programs.dedup();
    let left_out = match programs.as_slice() {
        [] => String::new(),
        programs => format!(
            "; `cargo xtask programs` runs those that need {}, `cargo xtask night emulated-gpu` those of {EMULATED_GPU}",
            programs.join(", ")
        ),
    };
    println!(
        "test: {} passed, {} failed in {} binaries, built in {} and run in {}{left_out}",
        tally.num_passed,
        tally.failed.len(),
        binaries.len(),
        minutes(build_time),
        minutes(start.elapsed() - build_time)
    );
    tally.verdict()
}

/// Runs the tests that `test` leaves out because they need system programs.
pub fn programs(repository: &Repository) -> Result<(), String> {
    let mut tally = Tally::default();
    for binary in &binaries(repository)? {
        let prefixes: Vec<&str> = needs(binary).map(|need| need.1).collect();
        if prefixes.is_empty() {
            continue;
        }
        let mut command = binary.command();
        command.args(prefixes);
        tally.run(binary, command)?;
    }
    tally.print_slowest();
    println!(
        "programs: {} passed, {} failed",
        tally.num_passed,
        tally.failed.len()
    );
    tally.verdict()
}

/// Runs the tests of the CUDA executor, and of the engine with it, on a device in host memory.
pub fn emulated_gpu(repository: &Repository) -> Result<(), String> {
    let mut tally = Tally::default();
    for binary in binaries(repository)?
        .iter()
        .filter(|binary| is_of_emulated_gpu(binary))
    {
        tally.run(binary, binary.command())?;
    }
    tally.print_slowest();
    println!(
        "emulated GPU: {} passed, {} failed",
        tally.num_passed,
        tally.failed.len()
    );
    tally.verdict()
}

fn is_of_emulated_gpu(binary: &TestBinary) -> bool {
    binary.package == EMULATED_GPU || binary.name == ENGINE_ON_EMULATED_GPU
}

/// Runs the documentation tests, which are in no test binary.
pub fn documentation(repository: &Repository) -> Result<(), String> {
    let mut command = repository.cargo(&["test", "--locked", "--workspace", "--doc"]);
    run(
        command.args(FEATURES),
        "tests in documentation failed, above",
    )
}

/// Builds the test binaries and the program with the test profile, and returns the binaries.
pub fn binaries(repository: &Repository) -> Result<Vec<TestBinary>, String> {
    let arguments = [&["--workspace"][..], &FEATURES].concat();
    test_binary::find(repository, &arguments)
}

/// Returns the time of the last whole run of `test`, if there was one.
pub fn recorded_time(repository: &Repository) -> Option<Duration> {
    let text = fs::read_to_string(time_file(repository)).ok()?;
    text.trim().parse().ok().map(Duration::from_secs)
}

fn record_time(repository: &Repository, time: Duration) -> Result<(), String> {
    let file = time_file(repository);
    fs::write(&file, time.as_secs().to_string())
        .map_err(|error| format!("{}: {error}", file.display()))
}

fn time_file(repository: &Repository) -> PathBuf {
    repository.target.join("test-seconds")
}

fn needs(
    binary: &TestBinary,
) -> impl Iterator<Item = &'static (&'static str, &'static str, &'static str)> {
    let is_suite = binary.name == "suite";
    let package = binary.package.clone();
    NEED_PROGRAMS
        .iter()
        .filter(move |need| is_suite && need.0 == package)
}

/// Returns the named packages, and the arguments of the test binaries.
fn split(arguments: &[String]) -> Result<(Vec<String>, Vec<String>), String> {
    let (mut packages, mut filters) = (Vec::new(), Vec::new());
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "-p" | "--package" => {
                let name = arguments.next().ok_or("-p needs the name of a crate")?;
                packages.push(name.clone());
            }
            _ => filters.push(argument.clone()),
        }
    }
    Ok((packages, filters))
}
