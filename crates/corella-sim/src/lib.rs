//! Whole runs of the real scheduler in virtual time, with faults, each from a seed.
//!
//! A seed writes a [`Load`]: limits (often far too small), requests and when they arrive, who is
//! aborted at which station, how often a step fails. [`simulate`] plays it against an executor
//! that distrusts every batch, and checkers look on. The first broken rule ends the run.
//! The idea is TigerBeetle's and FoundationDB's: an hour of bad luck in a second, again and again.

mod checker;
mod executor;
mod kept_prefix;
mod lateness;
mod load;
mod random;
mod simulation;
mod starvation;
mod step_budget;
mod totals;

pub use load::{Load, Station};
pub use simulation::{Violation, simulate};
pub use totals::Totals;
