//! Snapshots of the engine for its watcher.

pub(crate) mod engine_snapshot;
pub(crate) mod engine_watch;
