//! A step from plan to feedback: decodes, chunks of prompts, drafts, and requests that leave.

pub(crate) mod decode_turn;
pub(crate) mod departure;
pub(crate) mod draft_length;
pub(crate) mod feedback;
pub(crate) mod inflight_steps;
pub(crate) mod pace;
pub(crate) mod running_set;
pub(crate) mod scheduler;
pub(crate) mod slot_pool;
pub(crate) mod speculation;
pub(crate) mod step_plan;
pub(crate) mod suffix_index;
