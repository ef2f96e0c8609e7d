//! Runs the first seeds of pairs and small fleets. Together they see everything that can befall a session.

use corella_sim::{PairTotals, PairWorkload, simulate_pair};

#[test]
fn first_seeds_break_no_rule() {
    let mut totals = PairTotals::default();
    for seed in 0..400 {
        match simulate_pair(&PairWorkload::from_seed(seed), seed) {
            Ok(run) => totals.add(&run),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
    assert_eq!(totals.sessions.missing(), [""; 0], "{totals:?}");
}

/// A failing seed is useful only if it fails again.
#[test]
fn a_seed_plays_the_same_run_again() {
    for seed in 0..20 {
        let play = || simulate_pair(&PairWorkload::from_seed(seed), seed).unwrap();
        assert_eq!(play(), play());
    }
}
