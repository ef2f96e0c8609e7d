//! Guesses of the next tokens, by a draft model or a draft head.

pub(crate) mod drafter;
pub(crate) mod head_drafter;
