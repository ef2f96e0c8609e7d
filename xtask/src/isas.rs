//! Runs the tests of the executor, goldens and command line held to an instruction set.
//!
//! Elsewhere the program chooses the machine's best set. These parts of the night test the machine's other sets, so
//! that success depends less on the machine.

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

/// Runs the tests held to one instruction set, if this machine has it.
pub fn held(repository: &Repository, isa: &str) -> Result<(), String> {
    let binaries = test::binaries(repository)?;
    let found = supported(repository)?;
    println!("isas: this machine has {}", found.join(", "));
    if !found.iter().any(|name| name == isa) {
        println!("isas: {isa} not run, because this machine does not have it");
        return Ok(());
    }
    if found.last().is_some_and(|best| best == isa) {
        println!("isas: {isa} not run, because cargo xtask test uses it");
        return Ok(());
    }
    for (package, modules) in TESTS {
        let is_it = |binary: &&TestBinary| binary.package == package && binary.name == "suite";
        let binary = { binaries.iter().find(is_it) }
            .ok_or_else(|| format!("{package} has no suite of tests"))?;
        let mut command = binary.command();
        command.args(modules).env(VARIABLE, isa);
        run(&mut command, &format!("tests failed, held to {isa}, above"))?;
    }
    Ok(())
}

/// Tests the CPU executor held to AMX. AVX-512 with bf16 emulates missing tiles.
pub fn tiles(repository: &Repository) -> Result<(), String> {
    let emulated = ["--package", "corella-cpu", "--features", "emulated-tiles"];
    let mut build = repository.cargo(&["build", "--quiet", "--locked", "--example", EXAMPLE]);
    run(build.args(emulated), "the example does not build")?;
    if !supported(repository)?.contains(&TILES.to_owned()) {
        println!(
            "tiles: not run, because this machine has no AVX-512 with bf16, by which tiles are emulated"
        );
        return Ok(());
    }
    let mut command = repository.cargo(&["test", "--no-fail-fast", "--locked"]);
    command.args(emulated);
    run(command.env(VARIABLE, TILES), "tests failed, above")
}

/// Returns the instruction sets that the example finds on this machine, the slowest first. The example must be built
/// before.
fn supported(repository: &Repository) -> Result<Vec<String>, String> {
    let example = repository.target.join("debug/examples").join(EXAMPLE);
    let found = output(&mut repository.command(&example, &[]))?;
    let found: Vec<String> = found.lines().map(str::to_owned).collect();
    match found.iter().find(|name| !ALL.contains(&name.as_str())) {
        Some(unknown) => Err(format!(
            "isas.rs does not know the instruction set {unknown}"
        )),
        None => Ok(found),
    }
}
