//! `cargo xtask night`: slow tests. Its parts take turns in CI, one in each run; parts of more than ten minutes are run
//! by hand.

mod release;

use std::process::Command;
use std::time::Instant;

use crate::ci::{clients, play};
use crate::repository::{Repository, output, run};
use crate::stage::minutes;
use crate::test_binary::TestBinary;
use crate::{dist, isas, kernels, limit, python, set_up, test};

/// A part of the night.
pub struct Part {
    pub name: &'static str,
    pub about: &'static str,
    /// Whether the part takes more than ten minutes on two cores, so that CI never draws it.
    pub is_long: bool,
    run: fn(&Repository) -> Result<(), String>,
}

/// Tests that take as long as many other files of `tests/client` together.
const FUZZED_REQUESTS: &str = "tests/client/test_fuzz.py";

const KV_DISK: &str = "tests/client/test_kv_disk.py";

pub const PARTS: [Part; 24] = [
    part(
        "release",
        "the release build from nothing, its time, its size, and an answer of the binary",
        release::check,
    ),
    part(
        "isa-portable",
        "executor, goldens and command line held to portable kernels",
        |repository| isas::held(repository, "portable"),
    ),
    part(
        "isa-avx2",
        "executor, goldens and command line held to AVX2",
        |repository| isas::held(repository, "avx2"),
    ),
    part(
        "isa-avx512",
        "executor, goldens and command line held to AVX-512",
        |repository| isas::held(repository, "avx512"),
    ),
    part(
        "isa-avx512-bf16",
        "executor, goldens and command line held to AVX-512 with bf16",
        |repository| isas::held(repository, "avx512-bf16"),
    ),
    part(
        "tiles",
        "the CPU executor held to AMX, which is emulated where it is missing",
        isas::tiles,
    ),
    part(
        "emulated-gpu",
        "the CUDA executor on a device in host memory, which needs a C++ compiler",
        test::emulated_gpu,
    ),
    part(
        "kernels-12",
        "kernels for GPUs by NVRTC 12, their registers and shared memory, and their host's side",
        kernels::kernels_12,
    ),
    part(
        "kernels-13",
        "kernels for GPUs by NVRTC 13, and the host's side of those for Hopper",
        kernels::kernels_13,
    ),
    part(
        "sim-nodes",
        "10,000 simulated runs of one node",
        |repository| seeds(repository, &[]),
    ),
    part(
        "sim-pairs",
        "10,000 simulated runs of pairs and small fleets",
        |repository| seeds(repository, &["--pairs"]),
    ),
    part(
        "sim-fleets",
        "10,000 simulated runs of nodes that load each other's cached blocks",
        |repository| seeds(repository, &["--fleets"]),
    ),
    part(
        "sim-roles",
        "4,000 simulated runs of prefill and decode nodes that find and load each other's blocks",
        |repository| play_seeds(repository, &["--roles"], 4_000),
    ),
    part(
        "fuzz",
        "20 s for each parser that meets bytes from outside",
        |repository| fuzz(repository, 20),
    ),
    part(
        "clients",
        "clients and faults that take long: frameworks, Node, coding agents, routers, deployment, soaks of a minute",
        night_clients,
    ),
    part(
        "requests",
        "requests that /openapi.json allows and rules out, sent to the binary",
        |repository| fuzz_requests(repository, None),
    ),
    part(
        "kv-disk",
        "1,000 crashes of engines of each kind while they store KV blocks, and 50 killed servers of each kind",
        crash_disks,
    ),
    long_part(
        "install",
        "a release is built, and each of its files installed, used and removed on a system of Debian's packages; as root",
        dist::try_install,
    ),
    long_part(
        "soak",
        "12 minutes of mixed traffic with kills on a fleet",
        |repository| client_script(repository, &["tests/client/soak.py", "--seconds", "720"]),
    ),
    long_part(
        "models",
        "10 minutes of requests for three models with room for two, whose files change, and 40 servers that get SIGTERM",
        |repository| client_script(repository, &["tests/client/model_soak.py"]),
    ),
    long_part(
        "memory",
        "by how much one node and a pair grow in an hour of mixed traffic each, or in CORELLA_SOAK_SECONDS",
        |repository| client_script(repository, &["tests/client/memory.py"]),
    ),
    long_part(
        "wander",
        "1,000 turns of conversations over pairs and over unified nodes by each transport, with and without windows",
        |repository| {
            for model in ["built-in", "gemma3"] {
                let program = ["tests/client/wander.py", "--transport", "tcp,shm,nixl"];
                client_script(repository, &[&program[..], &["--model", model]].concat())?;
            }
            Ok(())
        },
    ),
    long_part(
        "fuzz-long",
        "5 minutes for each parser, and 10 minutes of requests to the binary",
        |repository| {
            fuzz(repository, 300)?;
            fuzz_requests(repository, Some(600))
        },
    ),
    long_part(
        "sim-long",
        "100,000 simulated runs of one node, and as many of pairs and of fleets",
        |repository| {
            for kind in [&[][..], &["--pairs"], &["--fleets"], &["--roles"]] {
                play_seeds(repository, kind, 100_000)?;
            }
            Ok(())
        },
    ),
];

const fn part(
    name: &'static str,
    about: &'static str,
    run: fn(&Repository) -> Result<(), String>,
) -> Part {
    Part {
        name,
        about,
        is_long: false,
        run,
    }
}

const fn long_part(
    name: &'static str,
    about: &'static str,
    run: fn(&Repository) -> Result<(), String>,
) -> Part {
    Part {
        is_long: true,
        ..part(name, about, run)
    }
}

/// Runs the named parts, or all that are not long.
pub fn night(repository: &Repository, names: &[String]) -> Result<(), String> {
    let find = |name: &String| {
        let part = PARTS.iter().find(|part| part.name == name);
        part.ok_or_else(|| format!("the night has no part {name:?}; its parts:\n{}", list()))
    };
    let chosen: Vec<&Part> = match names {
        [] => PARTS.iter().filter(|part| !part.is_long).collect(),
        names => names.iter().map(find).collect::<Result<_, _>>()?,
    };
    let mut failures = Vec::new();
    for part in &chosen {
        if let Err(reason) = run_part(repository, part) {
            println!("night: {} FAILED: {reason}", part.name);
            failures.push(part.name);
        }
    }
    println!(
        "night: {} parts passed, {} failed",
        chosen.len() - failures.len(),
        failures.len()
    );
    match failures.as_slice() {
        [] => Ok(()),
        failures => Err(format!(
            "parts of the night failed: {}",
            failures.join(", ")
        )),
    }
}

/// Runs the part drawn by the commit, so that all parts take turns.
pub fn run_drawn(repository: &Repository) -> Result<(), String> {
    let commit = output(&mut repository.command("git".as_ref(), &["rev-parse", "HEAD"]))?;
    let part = drawn(commit.trim())?;
    println!("night: {} of commit {}", part.name, commit.trim());
    run_part(repository, part)
}

fn drawn(commit: &str) -> Result<&'static Part, String> {
    let digits = commit.get(..8).ok_or("git names no commit")?;
    let number = usize::from_str_radix(digits, 16).map_err(|_| "git names no commit")?;
    let parts: Vec<&Part> = PARTS.iter().filter(|part| !part.is_long).collect();
    Ok(parts[number % parts.len()])
}

fn run_part(repository: &Repository, part: &Part) -> Result<(), String> {
    println!("\n==> night: {}: {}", part.name, part.about);
    let start = Instant::now();
    (part.run)(repository).map_err(|reason| {
        format!(
            "{reason}\nonly this part: `cargo xtask night {}`",
            part.name
        )
    })?;
    println!(
        "==> night: {} passed in {}",
        part.name,
        minutes(start.elapsed())
    );
    if !part.is_long {
        limit::print_time(part.name, start.elapsed(), limit::NIGHT_PART);
    }
    Ok(())
}

/// Lists the parts, one per line.
pub fn list() -> String {
    let line = |part: &Part| {
        let long = if part.is_long { " (long)" } else { "" };
        format!("  cargo xtask night {:<16} {}{long}", part.name, part.about)
    };
    PARTS.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// Plays 10,000 seeds drawn by the commit, so that each run of CI plays other seeds.
fn seeds(repository: &Repository, kind: &[&str]) -> Result<(), String> {
    play_seeds(repository, kind, 10_000)
}

fn play_seeds(repository: &Repository, kind: &[&str], number: u32) -> Result<(), String> {
    let commit = output(&mut repository.command("git".as_ref(), &["rev-parse", "HEAD"]))?;
    let digits = commit.get(..6).ok_or("git names no commit")?;
    let first = u64::from_str_radix(digits, 16).map_err(|_| "git names no commit")? * 1000;
    let (first, number) = (first.to_string(), number.to_string());
    let arguments = ["--first", &first, "--seeds", &number];
    let arguments = kind.iter().chain(&arguments);
    play(
        repository,
        &arguments.map(ToString::to_string).collect::<Vec<_>>(),
    )
}

fn fuzz(repository: &Repository, seconds: u32) -> Result<(), String> {
    let mut command = suite(repository, "corella-fuzz")?;
    command.env("CORELLA_FUZZ_SECONDS", seconds.to_string());
    run(&mut command, "a parser failed, above")
}

/// Opens the files that crashes leave of `--kv-disk`, and kills servers while they write one.
fn crash_disks(repository: &Repository) -> Result<(), String> {
    let mut command = suite(repository, "corella-engine")?;
    command.arg("kv_disk::crash");
    command.env("CORELLA_DISK_CRASHES", "1000");
    run(&mut command, "an engine did not survive a crash, above")?;
    let python = python::environment(repository)?;
    let mut command = python::pytest(repository, &python, KV_DISK);
    command.args(["-k", "killed_while_it_stores"]);
    command.env("CORELLA_DISK_KILLS", "50");
    command.env("CORELLA_BIN", repository.binary());
    run(&mut command, "a server did not survive its death, above")
}

/// Returns a command that runs the tests in `tests/suite` of a package.
fn suite(repository: &Repository, package: &str) -> Result<Command, String> {
    let binaries = test::binaries(repository)?;
    let is_it = |binary: &&TestBinary| binary.package == package && binary.name == "suite";
    let binary = binaries.iter().find(is_it);
    let binary = binary.ok_or_else(|| format!("{package} has no tests"))?;
    Ok(binary.command())
}

fn night_clients(repository: &Repository) -> Result<(), String> {
    set_up::for_night_clients(repository)?;
    // Part `requests` runs this file.
    let requests = format!("--ignore={FUZZED_REQUESTS}");
    clients(repository, "night", &[requests])
}

fn client_script(repository: &Repository, arguments: &[&str]) -> Result<(), String> {
    test::binaries(repository)?;
    let python = python::environment(repository)?;
    let mut command = repository.command(&python, arguments);
    command.env("CORELLA_BIN", repository.binary());
    run(&mut command, "the script failed, above")
}

/// Sends the binary requests that `/openapi.json` allows and ones that it rules out: the same requests every time, or,
/// with `seconds`, new requests for that long.
fn fuzz_requests(repository: &Repository, seconds: Option<u32>) -> Result<(), String> {
    test::binaries(repository)?;
    let python = python::environment(repository)?;
    let mut command = python::pytest(repository, &python, FUZZED_REQUESTS);
    if let Some(seconds) = seconds {
        command.env("CORELLA_FUZZ_SECONDS", seconds.to_string());
    }
    command.env("CORELLA_BIN", repository.binary());
    run(&mut command, "a request broke the server, above")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_part_has_its_turn() {
        let names: std::collections::BTreeSet<&str> = (0..100u32)
            .map(|number| drawn(&format!("{number:08x}c0ffee")).unwrap().name)
            .collect();
        let expected = PARTS
            .iter()
            .filter(|part| !part.is_long)
            .map(|part| part.name);
        assert_eq!(names, expected.collect());
        assert!(drawn("").is_err() && drawn("no commit").is_err());
    }
}
