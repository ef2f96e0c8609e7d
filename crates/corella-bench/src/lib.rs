//! Load generator and reports.

pub mod serve;
