//! Nodes of any role that load each other's cached blocks, over a network that fails.
//!
//! Each node is the real scheduler, an executor that distrusts every batch, and the real machines of both ends of a
//! load. The network is simulated: messages are lost, delayed, repeated and reordered, rows are sent or read from the
//! other node's memory, writes tear, and nodes die and restart. Hashes have 8 bits, so that different blocks often
//! collide. A seed writes the [`FleetWorkload`], and [`simulate_fleet`] plays it.

mod fleet_totals;
mod fleet_workload;
mod node;
mod run;
mod world;

pub use fleet_totals::FleetTotals;
pub use fleet_workload::FleetWorkload;
pub use run::simulate_fleet;
