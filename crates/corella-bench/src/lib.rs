//! Load generator, replays and micro-benchmarks, and what they report.

pub mod cache_replay;
mod error;
pub mod offline;
mod page;
mod progress;
mod report;
pub mod scheduler;
pub mod serve;
mod summary;
mod timeline;

pub use error::BenchError;
pub use report::{Metric, Objective, Report, ReportHead, RequestRecord};
pub use summary::Summary;
