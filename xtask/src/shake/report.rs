//! The report of `shake`.

use super::harness::Failure;
use super::mode::Mode;
use super::options::{Options, quoted};
use super::record::{Outcome, Record};

/// A test, or a unit without a known failed test, and the runs in which it failed.
struct Failing<'a> {
    unit: &'a str,
    test: Option<&'a str>,
    what: Option<&'a str>,
    outcomes: Vec<&'a Outcome>,
}

pub fn print_outcome(outcome: &Outcome, num_runs: usize, record: &Record) {
    let Outcome {
        run,
        unit,
        mode,
        seconds,
        failure,
    } = outcome;
    let line = format!("run {run}/{num_runs} {:<8} {unit}:", mode.name());
    match failure {
        None => println!("{line} ok in {seconds} s"),
        Some(Failure { what, tests }) => {
            let what = what.as_deref().unwrap_or("failed");
            println!("{line} {what} after {seconds} s: {}", tests.join(", "));
            println!("    {}", record.output(*run, unit, *mode).display());
        }
    }
}

/// Prints the failures, their frequencies, and how to repeat them.
pub fn print(options: &Options, record: &Record) {
    let all = failing(&record.outcomes);
    println!();
    for failing in &all {
        let num_runs = record
            .outcomes
            .iter()
            .filter(|outcome| outcome.unit == failing.unit)
            .count();
        println!(
            "{} {}: {} in {} of {num_runs} runs ({})",
            failing.unit,
            failing.test.unwrap_or("(no single test)"),
            failing.what.unwrap_or("failed"),
            failing.outcomes.len(),
            by_mode(&failing.outcomes)
        );
        println!("    repeat: {}", repeat(failing, options, record.seed));
        for outcome in &failing.outcomes {
            let output = record.output(outcome.run, &outcome.unit, outcome.mode);
            println!("    output: {}", output.display());
        }
    }
    let seconds: u64 = record.outcomes.iter().map(|outcome| outcome.seconds).sum();
    println!(
        "shake: seed {}, {} in {}:{:02} minutes; {} failed",
        record.seed,
        counted(record.outcomes.len(), "run"),
        seconds / 60,
        seconds % 60,
        counted(all.len(), "test")
    );
}

/// Returns a number with its noun.
pub fn counted(num: usize, what: &str) -> String {
    let end = if num == 1 { "" } else { "s" };
    format!("{num} {what}{end}")
}

/// Returns the failures, the most frequent first.
fn failing(outcomes: &[Outcome]) -> Vec<Failing<'_>> {
    let mut all: Vec<Failing> = Vec::new();
    for outcome in outcomes {
        let Some(failure) = &outcome.failure else {
            continue;
        };
        let what = failure.what.as_deref();
        let tests: Vec<Option<&str>> = match failure.tests.is_empty() {
            true => vec![None],
            false => failure
                .tests
                .iter()
                .map(|test| Some(test.as_str()))
                .collect(),
        };
        for test in tests {
            let unit = outcome.unit.as_str();
            let is_it =
                |other: &&mut Failing| (other.unit, other.test, other.what) == (unit, test, what);
            match all.iter_mut().find(is_it) {
                Some(failing) => failing.outcomes.push(outcome),
                None => all.push(Failing {
                    unit,
                    test,
                    what,
                    outcomes: vec![outcome],
                }),
            }
        }
    }
    all.sort_by_key(|failing| std::cmp::Reverse(failing.outcomes.len()));
    all
}

fn by_mode(outcomes: &[&Outcome]) -> String {
    let count = |mode: Mode| {
        outcomes
            .iter()
            .filter(|outcome| outcome.mode == mode)
            .count()
    };
    let counts = Mode::ALL.into_iter().map(|mode| (count(mode), mode.name()));
    let counts = counts
        .filter(|(num, _)| *num > 0)
        .map(|(num, name)| format!("{num} {name}"));
    counts.collect::<Vec<_>>().join(", ")
}

/// Returns a command that runs a failing test as in its first failure. The order of others is no longer the same.
fn repeat(failing: &Failing, options: &Options, seed: u64) -> String {
    let mut command = "cargo xtask shake".to_string();
    match options.is_client {
        true => command += " --client",
        false => {
            let package = failing.unit.split(' ').next().unwrap_or_default();
            command += &format!(" -p {package}");
        }
    }
    // pytest's expressions cannot contain parameters.
    let name = match (failing.test, options.is_client) {
        (Some(test), true) => {
            let name = test
                .split('[')
                .next()
                .and_then(|name| name.rsplit("::").next());
            name.map(str::to_owned)
        }
        (Some(test), false) => Some(test.to_string()),
        (None, _) => options.pattern.clone(),
    };
    if let Some(name) = name {
        command += &format!(" -k {}", quoted(&name));
    }
    let mode = failing
        .outcomes
        .first()
        .map_or(Mode::Plain, |outcome| outcome.mode);
    format!("{command} {} --seed {seed}", mode.option())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(run: usize, unit: &str, mode: Mode, tests: Option<&[&str]>) -> Outcome {
        let failure = tests.map(|tests| Failure {
            what: tests.is_empty().then(|| "hung".to_string()),
            tests: tests.iter().map(|test| test.to_string()).collect(),
        });
        Outcome {
            run,
            unit: unit.into(),
            mode,
            seconds: 1,
            failure,
        }
    }

    fn options(text: &str) -> Options {
        let words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
        Options::parse(&words).unwrap()
    }

    #[test]
    fn a_test_is_told_once_with_the_modes_in_which_it_failed() {
        let outcomes = [
            outcome(1, "a --test suite", Mode::Plain, Some(&["x::y"])),
            outcome(1, "b --test suite", Mode::Plain, None),
            outcome(2, "a --test suite", Mode::OneCore, Some(&["z", "x::y"])),
            outcome(3, "b --test suite", Mode::Pauses, Some(&[])),
            outcome(4, "a --test suite", Mode::Plain, Some(&["x::y"])),
        ];
        let all = failing(&outcomes);
        let told: Vec<String> = all
            .iter()
            .map(|failing| {
                format!(
                    "{} {:?} {}",
                    failing.unit,
                    failing.test,
                    by_mode(&failing.outcomes)
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                "a --test suite Some(\"x::y\") 2 plain, 1 one-core",
                "a --test suite Some(\"z\") 1 one-core",
                "b --test suite None 1 pauses",
            ]
        );
        assert_eq!(
            repeat(&all[0], &options(""), 7),
            "cargo xtask shake -p a -k x::y --plain --seed 7"
        );
        assert_eq!(
            repeat(&all[2], &options("-k c"), 7),
            "cargo xtask shake -p b -k c --pauses --seed 7"
        );
    }

    #[test]
    fn a_test_of_pytest_is_repeated_without_its_parameters() {
        let test = "test_a.py::test_b[x y]";
        let outcomes = [outcome(1, "test_a.py", Mode::OneCore, Some(&[test]))];
        assert_eq!(
            repeat(&failing(&outcomes)[0], &options("--client"), 7),
            "cargo xtask shake --client -k test_b --one-core --seed 7"
        );
    }
}
