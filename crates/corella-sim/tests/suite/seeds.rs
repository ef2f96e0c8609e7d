//! The first seeds break no rule, and see everything that can happen to a request.

use corella_sim::{Totals, Workload, simulate};

#[test]
fn first_seeds_break_no_rule() {
    let mut totals = Totals::default();
    for seed in 0..400 {
        match simulate(&Workload::from_seed(seed), seed) {
            Ok(run) => totals.add(&run),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
    assert_eq!(totals.missing(), [""; 0], "{totals:?}");
}

/// In this run of a model with windows, cached blocks get pages from a step that fails. The blocks lose these pages
/// and keep all others.
#[test]
fn pinned_prefixes_outlast_a_failed_step_of_another_request() {
    let seed = 200_969;
    if let Err(violation) = simulate(&Workload::from_seed(seed), seed) {
        panic!("{violation}");
    }
}

/// A failing seed is useful only if it fails again.
#[test]
fn a_seed_plays_the_same_run_again() {
    for seed in 0..20 {
        let play = || simulate(&Workload::from_seed(seed), seed).unwrap();
        assert_eq!(play(), play());
    }
}
