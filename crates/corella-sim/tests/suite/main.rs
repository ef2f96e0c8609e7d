//! Simulated runs from seeds, and throughput in virtual time.

mod fleets;
mod pairs;
mod roles;
mod seeds;
mod throughput;
