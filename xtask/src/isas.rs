//! Runs the tests of the executor, goldens and command line with each instruction set in turn.
//!
//! In other stages the program chooses the best set of the machine. This stage tests the others that
//! the machine has, so that success depends less on the machine.

use std::time::{Duration, Instant};

use crate::ci::WITH_EMULATED_GPU;
use crate::repository::{Repository, output, run};

/// The variable that tells the tests which set to use; see `crates/corella-cpu/tests/suite/held_isa.rs`.
const VARIABLE: &str = "CORELLA_TEST_ISA";

/// Prints the sets that this machine has.
const EXAMPLE: &str = "instruction_sets";

/// The instruction sets by their names for `--isa`, the slowest first.
const ALL: [&str; 5] = ["portable", "avx2", "avx512", "avx512-bf16", TILES];
const TILES: &str = "amx";

/// The files of tests to run with each set: those of corella-cpu, then those of corella.
const TESTS: [&str; 9] = [
    "batch",
    "conformance",
    "golden",
    "pipeline",
    "command_line",
    "draft_model",
    "gguf",
    "quantize",
    "weight_cache",
];

/// Tests that stage `test` has run with every set, one after the other.
const RUN_WITH_EVERY_SET: [&str; 12] = [
    "bf16_kv_stays_close",
    "blocks_in_4_bits_stay_close",
    "blocks_reach_no_bit",
    "f32_kv_gives_the_golden_logits_and_tokens",
    "groups_of_8_bits",
    "pages_in_8_bits",
    "quantised_checkpoints_stay_close",
    "rounded_rows_stay_close",
    "weights_in_4_bits",
    "weights_in_8_bits",
    "weights_in_bf16",
    "windows_in_every_second_layer",
];

pub fn isas(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    // The whole workspace is selected, as in stage `test`: for one package alone, dependencies have other
    // features and would be compiled again.
    let workspace = [&["--workspace"][..], &WITH_EMULATED_GPU].concat();
    let found = supported(repository, &workspace)?;
    println!("isas: this machine has {}", found.join(", "));
    let (best, others) = found.split_last().ok_or("there is no instruction set")?;
    let mut times: Vec<(&str, Duration)> = Vec::new();
    for isa in others {
        println!("\n==> isas: held to {isa}");
        let start = Instant::now();
        let mut command = repository.cargo(&["test", "--no-fail-fast", "--locked", "--workspace"]);
        command.args(WITH_EMULATED_GPU);
        // Its files have some of these names, and no instruction sets.
        command.args(["--exclude", "corella-cuda"]);
        for file in TESTS {
            command.args(["--test", file]);
        }
        command.args(arguments).env(VARIABLE, isa);
        let has_rest = arguments.iter().any(|argument| argument == "--");
        command.args((!has_rest).then_some("--"));
        let left_out = RUN_WITH_EVERY_SET.iter();
        command.args(left_out.flat_map(|name| ["--skip", name]));
        run(&mut command, &format!("tests failed, held to {isa}, above"))?;
        times.push((isa, start.elapsed()));
    }
    println!();
    for isa in ALL {
        match times.iter().find(|(name, _)| *name == isa) {
            Some((_, time)) => println!("isas: {isa:<12} passed in {} s", time.as_secs()),
            None if isa == *best => println!("isas: {isa:<12} not run, because stage test uses it"),
            None => println!("isas: {isa:<12} not run, because this machine does not have it"),
        }
    }
    Ok(())
}

/// Tests the CPU executor held to AMX. Its tiles are emulated where they are missing, by AVX-512 with bf16.
pub fn tiles(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let emulated = ["--package", "corella-cpu", "--features", "emulated-tiles"];
    if !supported(repository, &emulated)?.contains(&TILES.to_owned()) {
        println!(
            "tiles: not run, because this machine has no AVX-512 with bf16, by which tiles are emulated"
        );
        return Ok(());
    }
    let mut command = repository.cargo(&["test", "--no-fail-fast", "--locked"]);
    command.args(emulated).args(arguments);
    run(command.env(VARIABLE, TILES), "tests failed, above")
}

/// The instruction sets that the CPU executor of these packages and features finds on this machine, the
/// slowest first.
fn supported(repository: &Repository, what: &[&str]) -> Result<Vec<String>, String> {
    let mut build = repository.cargo(&["build", "--quiet", "--locked", "--example", EXAMPLE]);
    run(build.args(what), "the example does not build")?;
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
