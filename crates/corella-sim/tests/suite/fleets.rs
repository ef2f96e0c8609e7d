//! Runs the first seeds of fleets whose nodes load each other's blocks. Together they see all that can befall a load.

use corella_sim::{PairTotals, PairWorkload, simulate_pair};

#[test]
fn first_seeds_break_no_rule() {
    let mut totals = PairTotals::default();
    for seed in 0..400 {
        match simulate_pair(&PairWorkload::blocks_from_seed(seed), seed) {
            Ok(run) => totals.add(&run),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
    assert_eq!(totals.loads.missing(), [""; 0], "{totals:?}");
    let calls = &totals.sessions;
    let ends = [calls.num_completed, calls.num_cancelled, calls.num_failed];
    let crashes = [calls.num_crashes, calls.num_clients_lost];
    assert!(!ends.contains(&0) && !crashes.contains(&0), "{totals:?}");
}

/// A failing seed is useful only if it fails again.
#[test]
fn a_seed_plays_the_same_run_again() {
    for seed in 0..20 {
        let play = || simulate_pair(&PairWorkload::blocks_from_seed(seed), seed).unwrap();
        assert_eq!(play(), play());
    }
}
