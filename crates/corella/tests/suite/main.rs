//! Tests of the program and its parts against files: checkpoints, command line, memory of one node.

#[path = "../../../corella-cpu/tests/suite/held_isa.rs"]
mod held_isa;

mod command_line;
mod draft_head;
mod draft_model;
mod encoder;
mod end_token;
mod gguf;
mod head;
mod inspect;
mod load_limit;
mod lost_page;
mod memory_plan;
mod python_options;
mod quantize;
mod request_log;
mod sentence_piece;
mod server;
mod sparse_model;
mod spill;
mod step_limit;
mod vocabulary;
mod weight_cache;
mod weight_fit;
mod window;
