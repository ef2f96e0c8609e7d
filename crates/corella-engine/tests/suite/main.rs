//! Tests of the engine over the mock executor, which notices every wrong page.

mod admission;
mod block_exchange;
mod constraint;
mod draft_head;
mod draft_model;
mod fault;
mod fixture;
mod hidden_state;
mod kv_disk;
mod kv_exchange;
mod load;
mod lone_run;
mod prefix_cache;
mod prompt_logprobs;
mod shutdown;
mod speculation;
mod spill;
mod watch;
