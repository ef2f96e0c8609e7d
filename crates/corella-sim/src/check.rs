//! Checkers of the rules that every run must keep.

pub(crate) mod checker;
pub(crate) mod kept_prefix;
pub(crate) mod lateness;
pub(crate) mod prompt_check;
pub(crate) mod standstill;
pub(crate) mod starvation;
pub(crate) mod step_budget;
pub(crate) mod verdict;
pub(crate) mod window_bound;
