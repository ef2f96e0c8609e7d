//! `corella-sim --seeds N [--first SEED]` plays N seeds, `corella-sim --seed SEED` plays one. `--pairs` plays prefill
//! and decode nodes over a network that fails, instead of one scheduler, `--fleets` nodes that load each other's cached
//! blocks, and `--roles` prefill and decode nodes that find and load each other's blocks. `--speculate ngram` or
//! `draft` makes all of them speculate, and `--speculate off` none; without the option the seed decides.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use corella_core::Speculation;
use corella_sim::{PairTotals, PairWorkload, Totals, Violation, Workload, simulate, simulate_pair};

const USAGE: &str = "usage: corella-sim (--seeds N [--first SEED] [--keep FOLDER] | --seed SEED) \
                     [--pairs | --fleets | --roles] [--speculate ngram|draft|off]";

struct Options {
    first: u64,
    num_seeds: u64,
    keep: PathBuf,
    speculation: Option<Speculation>,
    kind: Kind,
}

/// The kind of runs.
#[derive(Clone, Copy)]
enum Kind {
    One,
    Pairs,
    Fleets,
    Roles,
}

impl Kind {
    /// Returns the workload of several nodes.
    fn pair_workload(self, seed: u64) -> Option<PairWorkload> {
        match self {
            Self::One => None,
            Self::Pairs => Some(PairWorkload::from_seed(seed)),
            Self::Fleets => Some(PairWorkload::blocks_from_seed(seed)),
            Self::Roles => Some(PairWorkload::fleet_from_seed(seed)),
        }
    }
}

impl Options {
    fn workload(&self, seed: u64) -> Workload {
        let workload = Workload::from_seed(seed);
        match self.speculation {
            Some(speculation) => workload.with_speculation(speculation),
            None => workload,
        }
    }
}

fn main() -> ExitCode {
    let options = match parse(std::env::args().skip(1)) {
        Ok(options) => options,
        Err(reason) => {
            eprintln!("{reason}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    let start = Instant::now();
    let mut totals = Totals::default();
    let mut pair_totals = PairTotals::default();
    for seed in options.first..options.first + options.num_seeds {
        let outcome = match options.kind.pair_workload(seed) {
            None => play(|| simulate(&options.workload(seed), seed)).map(|run| totals.add(&run)),
            Some(pair) => play(|| simulate_pair(&pair, seed)).map(|run| pair_totals.add(&run)),
        };
        if let Err(what) = outcome {
            eprintln!("seed {seed} failed: {what}");
            keep(&options, seed, &what);
            let kind = match options.kind {
                Kind::One => "",
                Kind::Pairs => " --pairs",
                Kind::Fleets => " --fleets",
                Kind::Roles => " --roles",
            };
            eprintln!("to play it again: cargo xtask sim --seed {seed}{kind}");
            return ExitCode::FAILURE;
        }
    }
    match options.kind {
        Kind::One => println!("{totals:#?}"),
        _ => println!("{pair_totals:#?}"),
    }
    let missing = match options.kind {
        Kind::One => totals.missing(),
        Kind::Pairs => pair_totals.sessions.missing(),
        Kind::Fleets => pair_totals.loads.missing(),
        Kind::Roles => pair_totals.placement.missing(),
    };
    if options.num_seeds >= 1000 && options.speculation.is_none() && !missing.is_empty() {
        eprintln!(
            "the runs prove too little: they have no {}",
            missing.join(", no ")
        );
        return ExitCode::FAILURE;
    }
    println!(
        "{} seeds passed in {:.1} s",
        options.num_seeds,
        start.elapsed().as_secs_f64()
    );
    ExitCode::SUCCESS
}

/// Plays one seed. The error is the broken rule, or the message of a failed assertion.
fn play<T>(simulate: impl FnOnce() -> Result<T, Violation>) -> Result<T, String> {
    let message = Arc::new(Mutex::new(String::new()));
    let hook = take_hook();
    let sink = message.clone();
    set_hook(Box::new(move |panic| {
        *sink.lock().unwrap() = panic.to_string();
    }));
    let outcome = catch_unwind(AssertUnwindSafe(simulate));
    set_hook(hook);
    match outcome {
        Ok(Ok(totals)) => Ok(totals),
        Ok(Err(violation)) => Err(violation.to_string()),
        Err(_) => Err(message.lock().unwrap().clone()),
    }
}

/// Writes the failure and its workload to a file.
fn keep(options: &Options, seed: u64, what: &str) {
    let path = options.keep.join(format!("seed-{seed}.txt"));
    let text = match options.kind.pair_workload(seed) {
        None => format!("{what}\n\n{:#?}\n", options.workload(seed)),
        Some(workload) => format!("{what}\n\n{workload:#?}\n"),
    };
    match std::fs::create_dir_all(&options.keep).and_then(|()| std::fs::write(&path, text)) {
        Ok(()) => eprintln!("its workload is in {}", path.display()),
        Err(error) => eprintln!("{}: {error}", path.display()),
    }
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Options, String> {
    let mut options = Options {
        first: 0,
        num_seeds: 0,
        keep: PathBuf::from("target/sim"),
        speculation: None,
        kind: Kind::One,
    };
    while let Some(name) = arguments.next() {
        let kind = match name.as_str() {
            "--pairs" => Some(Kind::Pairs),
            "--fleets" => Some(Kind::Fleets),
            "--roles" => Some(Kind::Roles),
            _ => None,
        };
        if let Some(kind) = kind {
            options.kind = kind;
            continue;
        }
        let value = arguments.next().ok_or(format!("{name} needs a value"))?;
        let number = || {
            value
                .parse::<u64>()
                .map_err(|_| format!("{name}: {value:?} is not a number"))
        };
        match name.as_str() {
            "--seeds" => options.num_seeds = number()?,
            "--first" => options.first = number()?,
            "--seed" => (options.first, options.num_seeds) = (number()?, 1),
            "--speculate" => {
                options.speculation = Some(match value.as_str() {
                    "off" => Speculation::Off,
                    "ngram" => Speculation::Ngram,
                    "draft" => Speculation::Draft { draw_cost: 10 },
                    _ => return Err(format!("{name} must be ngram, draft or off, not {value:?}")),
                });
            }
            "--keep" => options.keep = PathBuf::from(&value),
            _ => return Err(format!("there is no option {name}")),
        }
    }
    match options.num_seeds {
        0 => Err("nothing to play: give --seed, or --seeds of at least 1".into()),
        _ => Ok(options),
    }
}
