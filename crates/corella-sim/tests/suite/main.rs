//! Simulated runs from seeds, and throughput in virtual time.

mod pairs;
mod seeds;
mod throughput;
