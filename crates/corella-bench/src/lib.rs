//! Benchmarks: a load generator, trace replays and micro-benchmarks, with their reports.

pub mod admission;
pub mod cache_replay;
mod error;
mod html_report;
pub mod offline;
mod prefix_cache;
mod progress;
mod repeat;
mod report;
mod report_file;
pub mod reservation;
pub mod scheduler;
pub mod serve;
mod split_mix;
mod summary;
mod thread_time;
mod timeline;
mod trace;
pub mod transfer;

pub use error::BenchError;
pub use repeat::{Repeats, Spread};
pub use report::{
    Metric, Objective, Report, ReportHead, RequestRecord, ServerPercentiles, ServerPhase,
};
pub use report_file::ReportFiles;
pub use summary::Summary;
