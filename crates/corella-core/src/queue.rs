//! Requests without a slot: waiting requests, requests whose pages others fill, and the expectations of all requests.

pub(crate) mod aged_request;
pub(crate) mod deadline;
pub(crate) mod follower;
pub(crate) mod length_forecast;
pub(crate) mod log_buckets;
pub(crate) mod output_length;
pub(crate) mod waiting_for_remote_kv;
pub(crate) mod waiting_queue;
