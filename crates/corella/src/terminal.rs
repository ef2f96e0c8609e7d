//! Lines on a terminal.

pub(crate) mod fetch_display;
pub(crate) mod load_display;
pub(crate) mod log_queue;
pub(crate) mod output;
pub(crate) mod progress_line;
