//! The instruction set that a test run is limited to: the best of the machine, unless a variable names another.
//! `cargo xtask night` makes one run for each.
#![allow(dead_code, reason = "every file of tests uses a part of it")]

use corella_cpu::{Isa, detect_isa, is_supported};

/// The variable that holds the name of the set, spelled as `--isa` takes it. It is read here and
/// nowhere else, and by tests only.
const VARIABLE: &str = "CORELLA_TEST_ISA";

/// The set that this run is limited to; `None` leaves the choice to what is tested, as without
/// `--isa`.
pub fn held_isa() -> Option<Isa> {
    if is_unlimited() {
        return None;
    }
    let name = std::env::var(VARIABLE).ok()?;
    let isa = Isa::ALL.into_iter().find(|isa| isa.to_string() == name);
    let isa = isa.unwrap_or_else(|| panic!("{VARIABLE}: there is no instruction set {name:?}"));
    assert!(
        is_supported(isa),
        "{VARIABLE}: this machine does not support {isa}"
    );
    Some(isa)
}

/// The set that this run is limited to, or the best that this machine has; all that it has with the value `all`.
pub fn isas() -> impl Iterator<Item = Isa> {
    let only = match is_unlimited() {
        true => None,
        false => Some(held_isa().unwrap_or_else(detect_isa)),
    };
    let is_tried = move |&isa: &Isa| is_supported(isa) && only.is_none_or(|only| only == isa);
    Isa::ALL.into_iter().filter(is_tried)
}

fn is_unlimited() -> bool {
    std::env::var(VARIABLE).is_ok_and(|value| value == "all")
}
