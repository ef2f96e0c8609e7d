//! Lines of the log: at a limited rate, about panics, and the steps before one.

pub(crate) mod panic_message;
pub(crate) mod rare_line;
pub(crate) mod step_log;
