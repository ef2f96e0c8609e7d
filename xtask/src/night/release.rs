//! A user's first build: its time from nothing, the binary's size, and a first answer.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use crate::limit;
use crate::repository::{Repository, output, run};

/// Builds the release binary in an empty folder, checks its size and has it answer once.
pub fn check(repository: &Repository) -> Result<(), String> {
    run(
        &mut repository.cargo(&["fetch", "--locked"]),
        "dependencies could not be fetched, above",
    )?;
    let folder = repository.target.join("first-build");
    let _ = fs::remove_dir_all(&folder);
    let start = Instant::now();
    let mut build = repository.cargo(&["build", "--release", "--locked"]);
    // A user builds without the settings of this program.
    build.env("CARGO_TARGET_DIR", &folder);
    build.env_remove("CARGO_INCREMENTAL");
    run(&mut build, "the release build failed, above")?;
    limit::print_time("the first build", start.elapsed(), limit::FIRST_BUILD);
    let binary = folder.join("release/corella");
    answer(&binary)?;
    let kept = repository.release_binary();
    let failed = |error| format!("{}: {error}", kept.display());
    kept.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .map_err(failed)?;
    fs::rename(binary, &kept).map_err(failed)?;
    let _ = fs::remove_dir_all(&folder);
    limit::check_binary(repository)
}

/// Generates some tokens with the built-in model.
fn answer(binary: &Path) -> Result<(), String> {
    let arguments = [
        "generate",
        "--prompt",
        "Tell me a story about a fox.",
        "--max-tokens",
        "8",
    ];
    let text = output(Command::new(binary).args(arguments))?;
    match text.trim() {
        "" => Err(format!("{} generates nothing", binary.display())),
        text => {
            println!("the release binary answers: {text:?}");
            Ok(())
        }
    }
}
