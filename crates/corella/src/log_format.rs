//! The log: lines for people, or JSON objects for programs.

use std::io::Write;

use tracing_subscriber::EnvFilter;

use crate::args::LogFormatArg;
use crate::progress_line::{LogWriter, is_controllable};

/// Logs to standard error. RUST_LOG sets what is logged; by default, information and all warnings.
pub fn start(format: LogFormatArg) {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        // Else a line that finds no room on a full disk is reported there, and that failure ends the thread.
        .log_internal_errors(false)
        .with_writer(|| LogWriter);
    match format {
        LogFormatArg::Text => log.with_ansi(is_controllable(&std::io::stderr())).init(),
        // The fields of a line are members of its object, and `spans` says what it belongs to.
        LogFormatArg::Json => log
            .json()
            .flatten_event(true)
            .with_current_span(false)
            .with_span_list(true)
            .init(),
    }
}

/// Logs warnings to standard error, or what RUST_LOG says, in a program that is not ours. Does nothing if a
/// log has been started.
pub fn start_quietly() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .log_internal_errors(false)
        .with_writer(|| LogWriter)
        .with_ansi(is_controllable(&std::io::stderr()));
    // It fails if there is a log.
    let _ = log.try_init();
}

/// Says what runs when a server starts: as it is, or as a line of a log in JSON.
pub fn announce(format: LogFormatArg, line: &str) {
    match format {
        // A log that cannot be written is no reason not to serve.
        LogFormatArg::Text => drop(writeln!(std::io::stderr(), "{line}")),
        LogFormatArg::Json => tracing::info!("{line}"),
    }
}
