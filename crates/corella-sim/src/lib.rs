//! Simulated runs of the real scheduler in virtual time, with faults, each from a seed.
//!
//! A seed determines a [`Load`]: limits (often far too small), requests and when they arrive, which
//! of them are aborted at which station, and how often a step fails. [`simulate`] plays it against
//! an executor that distrusts every batch, while checkers watch. The first broken rule ends the
//! run. The idea comes from FoundationDB and TigerBeetle: years of bad luck, played in seconds and
//! repeatable.

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
mod load;
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

pub use fleet::{FleetLoad, FleetTotals, simulate_fleet};
pub use load::{Load, Station};
pub use pair::{PairLoad, PairTotals, simulate_pair};
pub use simulation::simulate;
pub use totals::Totals;
pub use violation::Violation;
