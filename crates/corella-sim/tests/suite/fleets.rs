//! The first seeds of fleets whose nodes load each other's blocks, and that they see everything that can befall a load.

use corella_sim::{FleetTotals, FleetWorkload, simulate_fleet};

#[test]
fn first_seeds_break_no_rule() {
    let mut totals = FleetTotals::default();
    for seed in 0..400 {
        match simulate_fleet(&FleetWorkload::from_seed(seed), seed) {
            Ok(run) => totals.add(&run),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
    assert_eq!(totals.missing(), [""; 0], "{totals:?}");
}

/// The pages that the only running prompt needs next, behind a window, are a fetch's. It waits for them.
#[test]
fn a_prompt_waits_for_the_pages_of_a_fetch_that_is_given_up() {
    simulate_fleet(&FleetWorkload::from_seed(7638), 7638).unwrap();
}

/// A failing seed is worth something only when it fails again.
#[test]
fn a_seed_plays_the_same_run_again() {
    for seed in 0..20 {
        let play = || simulate_fleet(&FleetWorkload::from_seed(seed), seed).unwrap();
        assert_eq!(play(), play());
    }
}
