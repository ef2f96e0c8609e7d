//! Both ends of a session and the export table, one fault at a time, with the exact times of each.

mod block_load;
mod compute;
mod decode_end;
mod export_table;
mod fallback;
mod fixture;
mod greeting;
mod local_run;
mod prefill_end;
mod prefill_node;
mod resume;
