//! Nodes of any role that load each other's cached blocks, over a network that fails.
//!
//! Each node is the real scheduler, an executor that distrusts every batch, and the real machines of both ends of a
//! load. What lies between them is made up: messages are lost, late, repeated and overtake each other, rows are sent or
//! read from the other node's memory, writes tear, nodes die and come back. Hashes have 8 bits, so that different
//! blocks have the same one often. A seed writes the [`FleetWorkload`], and [`simulate_fleet`] plays it.

mod fleet_totals;
mod fleet_workload;
mod node;
mod run;
mod world;

pub use fleet_totals::FleetTotals;
pub use fleet_workload::FleetWorkload;
pub use run::simulate_fleet;
