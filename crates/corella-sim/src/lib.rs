//! Simulated runs of the real scheduler in virtual time, with faults, each from a seed.
//!
//! A seed determines a [`Workload`]: limits (often far too small), requests with their arrival times and aborts, and
//! the rate of failed steps. [`simulate`] plays it against an executor that distrusts every batch, while checkers
//! watch. The first broken rule ends the run. The idea comes from FoundationDB and TigerBeetle: years of bad luck in
//! seconds, and repeatable.
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `random`: pseudorandom numbers.
//! * `violation`: a broken rule, and the end of a run by it.
//! * `count`: counts of events in runs.
//! * `event_queue`: events in virtual time.
//! * `executor`: an executor that distrusts every batch.
//! * `workload`: the workload of one run, made from a seed.
//! * `check`: checkers of the rules that every run must keep.
//! * `simulation`: one run of the scheduler.
//! * `pair`: prefill and decode nodes that serve requests together, and the loads of blocks between nodes.

mod check;
mod count;
mod event_queue;
mod executor;
mod pair;
mod random;
mod simulation;
mod violation;
mod workload;

pub use pair::{PairTotals, PairWorkload, simulate_pair};
pub use simulation::simulate;
pub use simulation::totals::Totals;
pub use violation::Violation;
pub use workload::{Station, Workload};
