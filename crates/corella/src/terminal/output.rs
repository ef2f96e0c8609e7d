//! Text on standard output.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a text. A closed pipe is no error: its reader has read enough.
pub fn print_text(text: impl Display) {
    let mut out = io::stdout().lock();
    let _ = write!(out, "{text}").and_then(|()| out.flush());
}

/// Writes a text and the end of its line.
pub fn print_line(text: impl Display) {
    print_text(format_args!("{text}\n"));
}
