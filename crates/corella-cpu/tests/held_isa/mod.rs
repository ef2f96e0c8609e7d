//! The instruction set that a run of tests is held to; `cargo xtask isas` makes one run for each.
#![allow(dead_code, reason = "every file of tests uses a part of it")]

use corella_cpu::{Isa, is_supported};

/// Holds a name as `--isa` takes it. Tests read it here and nowhere else, and the program never.
const VARIABLE: &str = "CORELLA_TEST_ISA";

/// `None` leaves the choice to whatever is tested, as without `--isa`.
pub fn held_isa() -> Option<Isa> {
    let name = std::env::var(VARIABLE).ok()?;
    let isa = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
    let isa = isa.unwrap_or_else(|| panic!("{VARIABLE}: there is no instruction set {name:?}"));
    assert!(is_supported(isa), "{VARIABLE}: this machine has no {isa}");
    Some(isa)
}

/// The held one, or all that this machine has.
pub fn isas() -> impl Iterator<Item = Isa> {
    let held = held_isa();
    let is_tried = move |&isa: &Isa| is_supported(isa) && held.is_none_or(|held| held == isa);
    Isa::ALL.into_iter().filter(is_tried)
}
