//! Drafts: guesses of what will be drawn, each for one request.

pub(crate) mod draft_length;
pub(crate) mod speculator;
pub(crate) mod suffix_index;
