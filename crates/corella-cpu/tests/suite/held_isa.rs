//! The instruction set of a test run: the best of the machine, unless a variable names another. `cargo xtask night`
//! makes one run for each instruction set.
#![allow(dead_code, reason = "every file of tests uses a part of it")]

use corella_cpu::{Isa, detect_isa, is_supported};

/// The variable with the name of the set, in the spelling of `--isa`. Only this code reads it, for tests.
const VARIABLE: &str = "CORELLA_TEST_ISA";

/// The set of this run; `None` leaves the choice to the tested code, as without `--isa`.
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

/// The set of this run, or the machine's best. With the value `all`, all sets of the machine.
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
