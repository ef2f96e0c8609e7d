//! A step from plan to feedback: decodes, chunks of prompts, drafts, and departures of requests.

pub(crate) mod inflight_steps;
pub(crate) mod journal;
pub(crate) mod running_set;
pub(crate) mod scheduler;
pub(crate) mod step_plan;
