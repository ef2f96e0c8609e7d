//! Submissions, their streams of events, and the commands of callers to the loop.

pub(crate) mod block_fact;
pub(crate) mod command;
pub(crate) mod stream_sender;
pub(crate) mod submission;
pub(crate) mod token_stream;
