//! `cargo xtask shake` runs tests many times while the machine is busy, and reports the ones that fail at times.
//!
//! A test that depends on the speed of the machine passes alone and fails beside others. Here it runs beside a busy
//! loop on each core, on one core, and with pauses, in an order given by a seed.

mod busy_loops;
mod harness;
mod mode;
mod options;
mod process_tree;
mod random;
mod record;
mod report;
mod signal;
mod unit;
mod watched_run;

use std::fs;
use std::time::Instant;

use self::busy_loops::BusyLoops;
use self::mode::Mode;
use self::options::Options;
use self::random::Random;
use self::record::{Outcome, Record};
use self::unit::Unit;
use self::watched_run::End;
use crate::repository::Repository;

/// Runs the chosen tests, prints the failures, and returns an error if there were any.
pub fn shake(repository: &Repository, arguments: &[String]) -> Result<(), String> {
    let options = Options::parse(arguments)?;
    let units = unit::find(repository, &options)?;
    let folder = record::folder(&repository.target, &options.what());
    let mut record = Record::open(folder, &options.what(), options.seed, options.resumes)?;
    let num_tests: usize = units.iter().map(|unit| unit.tests.len()).sum();
    let kind = if options.is_client { "file" } else { "program" };
    println!(
        "shake: {} in {}, {}, seed {}, results in {}",
        report::counted(num_tests, "test"),
        report::counted(units.len(), kind),
        report::counted(options.num_runs, "run"),
        record.seed,
        record.folder.display()
    );
    signal::catch_ends();
    let busy_loops = BusyLoops::start(num_cores());
    let all_ran = run_all(&options, units, &mut record)?;
    drop(busy_loops);
    report::print(&options, &record);
    let what = options.what();
    if !all_ran {
        return Err(format!(
            "interrupted; `cargo xtask shake {what} --resume` goes on"
        ));
    }
    let num_failed = record
        .outcomes
        .iter()
        .filter(|outcome| outcome.failure.is_some())
        .count();
    match num_failed {
        0 => Ok(()),
        _ => Err(format!(
            "{num_failed} of {} runs of tests failed, above",
            record.outcomes.len()
        )),
    }
}

/// Runs the units missing from the record. Returns whether nothing interrupted it.
fn run_all(options: &Options, mut units: Vec<Unit>, record: &mut Record) -> Result<bool, String> {
    // The order of a run is the same after an interruption.
    units.sort_by(|a, b| a.name.cmp(&b.name));
    for run in 1..=options.num_runs {
        let mode = options.modes[(run - 1) % options.modes.len()];
        let mut order: Vec<usize> = (0..units.len()).collect();
        Random::new(record.seed, &[run as u64]).shuffle(&mut order);
        for index in order {
            let unit = &units[index];
            if signal::is_asked_to_end() {
                return Ok(false);
            }
            if record.has(run, &unit.name) {
                continue;
            }
            match run_unit(unit, run, mode, index, record)? {
                Some(outcome) => {
                    report::print_outcome(&outcome, options.num_runs, record);
                    record.add(outcome)?;
                }
                None => return Ok(false),
            }
        }
    }
    Ok(true)
}

/// Runs a unit once. Returns `None` if interrupted.
fn run_unit(
    unit: &Unit,
    run: usize,
    mode: Mode,
    index: usize,
    record: &Record,
) -> Result<Option<Outcome>, String> {
    let mut random = Random::new(record.seed, &[run as u64, index as u64]);
    let mut command = unit.command(random.below(1 << 32), num_cores());
    if mode == Mode::OneCore {
        command = unit::on_one_core(&command);
    }
    let pauses = (mode == Mode::Pauses).then_some(random);
    let output = record.output(run, &unit.name, mode);
    let start = Instant::now();
    let end = watched_run::run(&mut command, &output, pauses)?;
    let seconds = start.elapsed().as_secs();
    if matches!(end, End::Interrupted) {
        return Ok(None);
    }
    let text = fs::read(&output).map_err(|error| format!("{}: {error}", output.display()))?;
    let failure = unit
        .harness
        .failure(&end, &String::from_utf8_lossy(&text), &unit.tests);
    if failure.is_none() {
        let _ = fs::remove_file(&output);
    }
    let unit = unit.name.clone();
    Ok(Some(Outcome {
        run,
        unit,
        mode,
        seconds,
        failure,
    }))
}

fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
