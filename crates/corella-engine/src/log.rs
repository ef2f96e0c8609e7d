//! Log lines at a limited rate, texts of panics, and the log of the last steps.

pub(crate) mod panic_message;
pub(crate) mod rare_line;
pub(crate) mod step_log;
