//! Drafts: guesses of the tokens that a request will draw.

pub(crate) mod draft_length;
pub(crate) mod speculator;
pub(crate) mod suffix_index;
