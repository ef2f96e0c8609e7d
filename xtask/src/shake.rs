//! `cargo xtask shake` runs tests many times while the machine is busy, and reports the ones that fail at times.
//!
//! A test that depends on the speed of the machine passes alone and fails beside others. Here it runs beside a busy
//! loop on each core. The runs take turns: without further stress, on one core, and with pauses.

mod busy_loops;
mod harness;
mod mode;
mod options;
mod process_tree;
mod unit;
mod watched_run;

use std::fs;
use std::path::Path;
use std::time::Instant;

use self::busy_loops::BusyLoops;
use self::harness::Failure;
use self::mode::Mode;
use self::options::Options;
use self::unit::Unit;
use crate::repository::Repository;

/// Runs the chosen tests, prints the failures, and returns an error if there were any.
pub fn shake(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    let units = unit::find(repository, &options)?;
    let folder = repository.target.join("shake");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let num_tests: usize = units.iter().map(|unit| unit.tests.len()).sum();
    println!("shake: {num_tests} tests, {} runs", options.num_runs);
    let busy_loops = BusyLoops::start(num_cores());
    let mut num_failed = 0;
    for run in 1..=options.num_runs {
        let mode = options.modes[(run - 1) % options.modes.len()];
        for unit in &units {
            num_failed += usize::from(!run_unit(unit, run, mode, &folder)?);
        }
    }
    drop(busy_loops);
    match num_failed {
        0 => Ok(()),
        _ => Err(format!("{num_failed} runs failed, above")),
    }
}

/// Runs a unit once. Returns whether it passed.
fn run_unit(unit: &Unit, run: usize, mode: Mode, folder: &Path) -> Result<bool, String> {
    let mut command = unit.command(run, num_cores());
    if mode == Mode::OneCore {
        command = unit::on_one_core(&command);
    }
    let name = unit.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let output = folder.join(format!("run-{run:02}-{}-{name}.txt", mode.name()));
    let start = Instant::now();
    let end = watched_run::run(&mut command, &output, mode == Mode::Pauses)?;
    let seconds = start.elapsed().as_secs();
    let text = fs::read(&output).map_err(|error| format!("{}: {error}", output.display()))?;
    let text = String::from_utf8_lossy(&text);
    let line = format!("run {run} {:<8} {}:", mode.name(), unit.name);
    let Some(Failure { what, tests }) = unit.harness.failure(&end, &text, &unit.tests) else {
        let _ = fs::remove_file(&output);
        println!("{line} ok in {seconds} s");
        return Ok(true);
    };
    let what = what.as_deref().unwrap_or("failed");
    println!("{line} {what} after {seconds} s: {}", tests.join(", "));
    println!("    output: {}", output.display());
    println!("    repeat with {} and -k NAME", mode.option());
    Ok(false)
}

fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
