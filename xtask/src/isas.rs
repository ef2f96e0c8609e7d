//! Runs the tests of the executor, goldens and command line held to an instruction set.
//!
//! Elsewhere the program chooses the machine's best set. These parts of the night test the machine's other sets, so
//! that success depends less on the machine.

use std::process::Command;

use crate::repository::{Repository, output, run};
use crate::test;
use crate::test_binary::TestBinary;

/// The variable with the set for the tests; see `crates/corella-cpu/tests/suite/held_isa.rs`.
const VARIABLE: &str = "CORELLA_TEST_ISA";

/// Prints the sets of this machine.
const EXAMPLE: &str = "instruction_sets";

/// The instruction sets by their names for `--isa`, the slowest first.
const ALL: [&str; 5] = ["portable", "avx2", "avx512", "avx512-bf16", TILES];
const TILES: &str = "amx";

/// The packages, and the modules of their suites, to run with each set.
const TESTS: [(&str, &[&str]); 2] = [
    (
        "corella-cpu",
        &[
            "adapter::",
            "batch::",
            "conformance::",
            "decoder::",
            "encoder::",
            "golden::",
            "kv_pages::",
            "pipeline::",
        ],
    ),
    (
        "corella",
        &[
            "command_line::",
            "draft_model::",
            "gguf::",
            "quantize::",
            "weight_cache::",
        ],
    ),
];

/// The package whose tests are held to AMX, and the variable with which AVX-512 with bf16 emulates missing tiles; see
/// `crates/corella-cpu/src/kernels/amx/emulated_tiles.rs`.
const TILES_PACKAGE: &str = "corella-cpu";
const EMULATION: &str = "CORELLA_EMULATED_TILES";

/// Tests of `TILES_PACKAGE` that compute in plain loops.
const WITHOUT_KERNELS: &str = "feature::";

/// Runs the tests held to one instruction set, if this machine has it.
pub fn held(repository: &Repository, isa: &str) -> Result<(), String> {
    let binaries = test::binaries(repository)?;
    let found = supported(&mut example(repository))?;
    println!("isas: this machine has {}", found.join(", "));
    if !found.iter().any(|name| name == isa) {
        println!("isas: {isa} not run, because this machine does not have it");
        return Ok(());
    }
    if found.last().is_some_and(|best| best == isa) {
        println!("isas: {isa} not run, because cargo xtask test uses it");
        return Ok(());
    }
    let mut commands = Vec::new();
    for (package, modules) in TESTS {
        let is_it = |binary: &&TestBinary| binary.package == package && binary.name == "suite";
        let binary = binaries
            .iter()
            .find(is_it)
            .ok_or_else(|| format!("{package} has no suite of tests"))?;
        let mut command = binary.command();
        command.args(modules);
        commands.push(command);
    }
    run_all(commands, isa)
}

/// Tests the CPU executor held to AMX. AVX-512 with bf16 emulates missing tiles.
pub fn tiles(repository: &Repository) -> Result<(), String> {
    let binaries = test::binaries(repository)?;
    let found = supported(example(repository).env(EMULATION, "1"))?;
    if !found.contains(&TILES.to_owned()) {
        println!(
            "tiles: not run, because this machine has no AVX-512 with bf16, by which tiles are emulated"
        );
        return Ok(());
    }
    let binaries = binaries
        .iter()
        .filter(|binary| binary.package == TILES_PACKAGE);
    let commands = binaries.map(|binary| {
        let mut command = binary.command();
        command.env(EMULATION, "1");
        command.args(["--skip", WITHOUT_KERNELS]);
        command
    });
    run_all(commands.collect(), TILES)
}

/// Runs all of the commands, so that a failure of one command hides no failure of another.
fn run_all(commands: Vec<Command>, isa: &str) -> Result<(), String> {
    let mut outcome = Ok(());
    for mut command in commands {
        command.env(VARIABLE, isa);
        let failed = format!("tests failed, held to {isa}, above");
        outcome = outcome.and(run(&mut command, &failed));
    }
    outcome
}

/// The example that prints the instruction sets of this machine. It must be built before.
fn example(repository: &Repository) -> Command {
    let example = repository.target.join("debug/examples").join(EXAMPLE);
    repository.command(&example, &[])
}

/// Returns the instruction sets that the example finds, the slowest first.
fn supported(example: &mut Command) -> Result<Vec<String>, String> {
    let found: Vec<String> = output(example)?.lines().map(str::to_owned).collect();
    match found.iter().find(|name| !ALL.contains(&name.as_str())) {
        Some(unknown) => Err(format!(
            "isas.rs does not know the instruction set {unknown}"
        )),
        None => Ok(found),
    }
}
