//! Load generator, replays and micro-benchmarks, and what they report.

pub mod cache_replay;
mod error;
pub mod scheduler;
pub mod serve;
mod summary;

pub use error::BenchError;
pub use summary::Summary;
