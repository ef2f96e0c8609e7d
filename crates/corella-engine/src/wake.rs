//! The wake-up of the loop, and news to and from it.

pub(crate) mod answer;
pub(crate) mod doorbell;
pub(crate) mod feed;
