//! Targets: the parsers of Corella that read external bytes.

mod block;
mod body;
mod cluster;
mod corpus;
mod grammar;
mod hub;
mod model;
mod number;
mod reply;
mod target;
mod template;
mod tokenizer;
mod zmtp;

use corella_fuzz::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
