//! Random numbers, measured times, and their summaries.

pub(crate) mod progress;
pub(crate) mod split_mix;
pub(crate) mod summary;
pub(crate) mod thread_time;
pub(crate) mod timeline;
