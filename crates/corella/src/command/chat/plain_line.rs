//! Unedited lines: from a pipe, a file, or a terminal that can only show text.

use std::io::{self, BufRead, Read, Write};

use super::input::{Line, LineSource, too_long};

pub struct PlainLines<R> {
    lines: R,
    /// Whether to print a prompt for the user.
    prompts: bool,
}

impl<R: BufRead> PlainLines<R> {
    pub fn new(lines: R, prompts: bool) -> Self {
        Self { lines, prompts }
    }
}

impl<R: BufRead> LineSource for PlainLines<R> {
    fn next_line(&mut self, prompt: &str, max_bytes: usize) -> io::Result<Line> {
        if self.prompts {
            let mut out = io::stdout().lock();
            out.write_all(prompt.as_bytes())?;
            out.flush()?;
        }
        let mut line = Vec::new();
        let mut limited = (&mut self.lines).take(max_bytes as u64);
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Ok(Line::End);
        }
        let is_ended = line.pop_if(|byte| *byte == b'\n').is_some();
        if !is_ended && line.len() == max_bytes {
            return Err(too_long());
        }
        line.pop_if(|byte| *byte == b'\r');
        Ok(Line::Text(String::from_utf8_lossy(&line).into_owned()))
    }

    fn remember(&mut self, _entry: &str) {}
}
