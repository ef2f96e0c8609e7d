//! Waiting requests: which are accepted, which start in a step, and which wait for another. Each policy has a file.

pub(crate) mod admission;
pub(crate) mod follower;
pub(crate) mod head_room;
pub(crate) mod latency_objective;
pub(crate) mod log_buckets;
pub(crate) mod output_length;
pub(crate) mod page_forecast;
pub(crate) mod patience;
pub(crate) mod policy;
pub(crate) mod waiting_queue;
