//! Benchmarks: a load generator, trace replays and micro-benchmarks, with their reports.
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `error`: errors of benchmarks.
//! * `sample`: random numbers, measured times, and their summaries.
//! * `report`: reports of runs, as text, JSON and HTML, and their comparison.
//! * `trace`: traces of requests.
//! * `cache_replay`: the prefix cache with a trace.
//! * `prefix_cache`: the costs of the prefix cache's calls.
//! * `scheduler`: the costs of the scheduler's calls.
//! * `admission`: rules of admission in virtual time.
//! * `offline`: an engine without a server.
//! * `reservation`: the time in which a computing engine answers another node.
//! * `serve`: a server under load.
//! * `transfer`: KV rows between nodes.

pub mod admission;
pub mod cache_replay;
mod error;
pub mod offline;
mod prefix_cache;
mod report;
pub mod reservation;
mod sample;
pub mod scheduler;
pub mod serve;
mod trace;
pub mod transfer;

pub use error::BenchError;
pub use report::comparison::Comparison;
pub use report::provenance::Provenance;
pub use report::repeat::{Repeats, Spread};
pub use report::report_file::ReportFiles;
pub use report::result_file::ResultFile;
pub use report::{Metric, Objective, Report, ReportHead, RequestRecord, ServerPhase};
pub use sample::summary::Summary;
pub use sample::timeline::Timeline;
