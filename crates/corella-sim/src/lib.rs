//! Simulated runs of the real scheduler in virtual time, with faults, each from a seed.
//!
//! A seed determines a [`Workload`]: limits (often far too small), requests with their arrival times and aborts, and
//! the rate of failed steps. [`simulate`] plays it against an executor that distrusts every batch, while checkers
//! watch. The first broken rule ends the run. The idea comes from FoundationDB and TigerBeetle: years of bad luck,
//! played in seconds and repeatable.

mod blocks;
mod checker;
mod count;
mod event_queue;
mod executor;
mod fetcher;
mod fleet;
mod host_memory;
mod kept_prefix;
mod lateness;
mod pair;
mod policy;
mod progress;
mod prompt_check;
mod random;
mod reader;
mod simulation;
mod standstill;
mod starvation;
mod state_table;
mod step_budget;
mod totals;
mod violation;
mod window_bound;
mod workload;

pub use fleet::{FleetTotals, FleetWorkload, simulate_fleet};
pub use pair::{PairTotals, PairWorkload, simulate_pair};
pub use simulation::simulate;
pub use totals::Totals;
pub use violation::Violation;
pub use workload::{Station, Workload};
