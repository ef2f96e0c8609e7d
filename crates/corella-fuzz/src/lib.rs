//! Hostile inputs: valid ones, changed at random from a seed, for every parser of external bytes.
//!
//! A [`Target`] feeds a parser with such inputs for some seconds. The parser may accept or refuse each input. It may
//! not panic, take long, or hold more memory than its target allows for an input of that length, which
//! [`CountingAllocator`] measures. The targets are this crate's tests:
//!
//! ```sh
//! cargo test -p corella-fuzz                                    # a few seconds for each target
//! CORELLA_FUZZ_SECONDS=300 cargo test -p corella-fuzz gguf      # longer, for targets with this name
//! CORELLA_FUZZ_SEED=7 CORELLA_FUZZ_CASE=4711 cargo test -p corella-fuzz gguf   # one case again
//! ```

mod byte_mutator;
mod counting_allocator;
mod json_mutator;
mod random;
mod target;
mod text_mutator;

pub use byte_mutator::mutate_bytes;
pub use counting_allocator::CountingAllocator;
pub use json_mutator::mutate_json;
pub use random::Random;
pub use target::{Target, Verdict};
pub use text_mutator::mutate_text;
