//! Benchmarks: a load generator, trace replays and micro-benchmarks, with their reports.

pub mod admission;
pub mod cache_replay;
mod comparison;
mod error;
mod html_report;
mod number;
pub mod offline;
mod plot;
mod prefix_cache;
mod progress;
mod provenance;
mod repeat;
mod report;
mod report_file;
pub mod reservation;
mod result_file;
pub mod scheduler;
pub mod serve;
mod split_mix;
mod summary;
mod thread_time;
mod timeline;
mod trace;
pub mod transfer;

pub use comparison::Comparison;
pub use error::BenchError;
pub use provenance::Provenance;
pub use repeat::{Repeats, Spread};
pub use report::{
    Metric, Objective, Report, ReportHead, RequestRecord, ServerPercentiles, ServerPhase,
};
pub use report_file::ReportFiles;
pub use result_file::ResultFile;
pub use summary::Summary;
pub use timeline::Timeline;
