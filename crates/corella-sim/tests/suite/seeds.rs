//! The first seeds break no rule, and see everything that can happen to a request.

use corella_sim::{Load, Totals, simulate};

#[test]
fn first_seeds_break_no_rule() {
    let mut totals = Totals::default();
    for seed in 0..400 {
        match simulate(&Load::from_seed(seed), seed) {
            Ok(run) => totals.add(&run),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
    assert_eq!(totals.missing(), [""; 0], "{totals:?}");
}

/// A failing seed is useful only if it fails again.
#[test]
fn a_seed_plays_the_same_run_again() {
    for seed in 0..20 {
        let play = || simulate(&Load::from_seed(seed), seed).unwrap();
        assert_eq!(play(), play());
    }
}
