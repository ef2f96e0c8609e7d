//! The instruction set that a test run is limited to; `cargo xtask isas` makes one run for each.
#![allow(dead_code, reason = "every file of tests uses a part of it")]

use corella_cpu::{Isa, is_supported};

/// The variable that holds the name of the set, spelled as `--isa` takes it. It is read here and
/// nowhere else, and by tests only.
const VARIABLE: &str = "CORELLA_TEST_ISA";

/// The set that this run is limited to; `None` leaves the choice to what is tested, as without
/// `--isa`.
pub fn held_isa() -> Option<Isa> {
    let name = std::env::var(VARIABLE).ok()?;
    let isa = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
    let isa = isa.unwrap_or_else(|| panic!("{VARIABLE}: there is no instruction set {name:?}"));
    assert!(
        is_supported(isa),
        "{VARIABLE}: this machine does not support {isa}"
    );
    Some(isa)
}

/// The set that this run is limited to, or all that this machine has.
pub fn isas() -> impl Iterator<Item = Isa> {
    let held = held_isa();
    let is_tried = move |&isa: &Isa| is_supported(isa) && held.is_none_or(|held| held == isa);
    Isa::ALL.into_iter().filter(is_tried)
}
