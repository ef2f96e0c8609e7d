//! Compares the CPU executor with references: goldens, the conformance suite, plain forward passes.

mod adapter;
mod batch;
mod conformance;
mod decoder;
mod draft_head;
mod encoder;
mod feature;
mod golden;
mod held_isa;
mod kv_pages;
mod pipeline;
mod random_model;
mod reference_decoder;
mod whole_page;
