//! The display of an answer.

use std::io::{self, IsTerminal, Write};

use super::answer::Piece;
use super::wrap::Wrap;
use crate::terminal::log_queue;
use crate::terminal::progress_line::terminal_columns;

/// Writes an answer as it arrives.
pub struct Screen {
    styles: bool,
    is_reasoning: bool,
    has_text: bool,
    /// Wraps lines at spaces, on a terminal only.
    wrap: Option<Wrap>,
}

impl Screen {
    pub fn new(is_typed: bool) -> Self {
        let is_terminal = io::stdout().is_terminal();
        Self {
            styles: is_terminal && is_typed,
            is_reasoning: false,
            has_text: false,
            wrap: is_terminal.then(Wrap::default),
        }
    }

    /// Shows a piece of an answer. Reasoning is dim on a terminal, and left out elsewhere.
    pub fn show(&mut self, piece: &Piece) {
        let (text, is_reasoning) = match piece {
            Piece::Reasoning(_) if !self.styles => return,
            Piece::Reasoning(text) => (text, true),
            Piece::Text(text) => (text, false),
        };
        let mut shown = String::new();
        if is_reasoning != self.is_reasoning {
            shown.push_str(&self.held_back());
            shown.push_str(if is_reasoning { "\x1b[2m" } else { "\x1b[0m\n" });
            self.is_reasoning = is_reasoning;
        }
        match &mut self.wrap {
            Some(wrap) => {
                let printable: String = text.chars().map(printable).collect();
                shown.push_str(&wrap.push(&printable, terminal_columns(&io::stdout())));
            }
            None => shown.push_str(text),
        }
        self.has_text = true;
        write(&shown);
    }

    /// Returns the word that is not shown yet, and lets the next text begin at a line's start.
    fn held_back(&mut self) -> String {
        let Some(wrap) = &mut self.wrap else {
            return String::new();
        };
        let mut ended = std::mem::take(wrap);
        ended.finish(terminal_columns(&io::stdout()))
    }

    /// Ends the line, including the `^C` of a stopped answer.
    pub fn end(mut self, is_stopped: bool) {
        let rest = self.held_back();
        let reset = if self.is_reasoning { "\x1b[0m" } else { "" };
        if self.has_text || is_stopped {
            write(&format!("{rest}{reset}\n"));
        }
    }
}

/// Replaces control characters, because a model's text must not control the terminal.
fn printable(character: char) -> char {
    match character {
        '\n' | '\t' => character,
        _ if character.is_control() => char::REPLACEMENT_CHARACTER,
        _ => character,
    }
}

fn write(text: &str) {
    let mut out = io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if written.is_err() {
        // The reader has closed the pipe.
        log_queue::flush();
        corella_cluster::transport::exit(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_do_not_steer_terminals() {
        let text: String = "a\x1b[2J\u{9b}\té\n".chars().map(printable).collect();
        assert_eq!(text, "a\u{fffd}[2J\u{fffd}\té\n");
    }
}
