//! The log: lines for people, or JSON objects for programs.

use std::io::Write;

use tracing_subscriber::EnvFilter;

use crate::arguments::args::LogFormatArg;
use crate::terminal::progress_line::{LogWriter, is_controllable};

/// Logs to standard error. RUST_LOG selects the lines; by default, information and all warnings.
pub fn start(format: LogFormatArg) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Otherwise a line that fails on a full disk is reported on the same disk, and that failure ends the thread.
        .log_internal_errors(false)
        .with_writer(|| LogWriter);
    match format {
        LogFormatArg::Text => log.with_ansi(is_controllable(&std::io::stderr())).init(),
        // The fields of a line are members of its object, and `spans` names its context.
        LogFormatArg::Json => log
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(true)
            .init(),
    }
}

/// Logs warnings to standard error, or the lines that RUST_LOG selects, in a program that embeds Corella. Does nothing
/// if a log is running.
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
        // A failed write to the log must not stop the server.
        LogFormatArg::Text => drop(writeln!(std::io::stderr(), "{line}")),
        LogFormatArg::Json => tracing::info!("{line}"),
    }
}
