//! A checker's report of a broken rule.

use std::fmt;

/// A rule that a run has broken.
#[derive(Clone, Debug)]
pub struct Violation {
    pub at_us: u64,
    pub rule: &'static str,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at_us, rule, what } = self;
        write!(f, "at {at_us} us, \"{rule}\" does not hold: {what}")
    }
}
