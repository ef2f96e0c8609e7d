//! The log: lines for people, or JSON objects for programs.

use tracing_subscriber::EnvFilter;

use crate::arguments::args::LogFormatArg;
use crate::terminal::log_queue::{self, QueuedLog};
use crate::terminal::progress_line::{LogWriter, is_controllable};

/// Selects the line about lost lines, whatever RUST_LOG selects.
const LOST_LINES: &str = "corella::terminal::log_queue=warn";

/// Logs to standard error. RUST_LOG selects the lines; by default, information and all warnings.
pub fn start(format: LogFormatArg) {
    let mut filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    filter = match LOST_LINES.parse() {
        Ok(directive) => filter.add_directive(directive),
        Err(_) => filter,
    };
    log_queue::take_panics();
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Otherwise tracing reports a line that it cannot format directly on standard error, and that write may block.
        .log_internal_errors(false)
        .with_writer(|| QueuedLog);
    match format {
        LogFormatArg::Text => log.with_ansi(is_controllable(&std::io::stderr())).init(),
        // A line's fields are members of its JSON object, and the list `spans` has the spans around it.
        LogFormatArg::Json => log
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(true)
            .init(),
    }
}

/// Logs warnings to standard error, or the lines that RUST_LOG selects, in a program that embeds Corella. Does nothing
/// if a log is running. Lines are not queued: the program may exchange its standard error, and end without notice.
pub fn start_quietly() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .log_internal_errors(false)
        .with_writer(|| LogWriter)
        .with_ansi(is_controllable(&std::io::stderr()));
    // This fails if a log is running.
    let _ = log.try_init();
}

/// Announces a starting server: as plain text, or as a line of a JSON log.
pub fn announce(format: LogFormatArg, line: &str) {
    match format {
        LogFormatArg::Text => log_queue::print_line(line),
        LogFormatArg::Json => tracing::info!("{line}"),
    }
}
