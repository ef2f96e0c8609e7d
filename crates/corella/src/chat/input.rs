//! What is typed or piped in, one entry at a time.

use std::io::{self, BufRead, Read, Write};

/// Lines of an entry are joined until it is whole.
pub struct Input<R> {
    lines: R,
    /// Whether somebody is to be told that it is their turn.
    prompts: bool,
}

/// Longer than anybody types, and more than a context holds.
const MAX_ENTRY_BYTES: usize = 16 << 20;
/// Opens and closes an entry of several lines, as in Ollama.
const FENCE: &str = "\"\"\"";

impl<R: BufRead> Input<R> {
    pub fn new(lines: R, prompts: bool) -> Self {
        Self { lines, prompts }
    }

    /// The next entry, without line break; `None` at the end.
    pub fn next_entry(&mut self) -> io::Result<Option<String>> {
        let Some(first) = self.line(">>> ", MAX_ENTRY_BYTES)? else {
            return Ok(None);
        };
        let mut entry = first.trim_start().strip_prefix(FENCE).map(str::to_owned);
        if let Some(fenced) = &mut entry {
            loop {
                if let Some(content) = fenced.trim_end().strip_suffix(FENCE) {
                    return Ok(Some(content.trim_matches('\n').to_owned()));
                }
                // What was opened and never closed is not sent.
                let Some(line) = self.line("... ", MAX_ENTRY_BYTES.saturating_sub(fenced.len()))?
                else {
                    return Ok(None);
                };
                fenced.push('\n');
                fenced.push_str(&line);
            }
        }
        let mut entry = first;
        while let Some(begun) = entry.strip_suffix('\\') {
            let mut longer = format!("{begun}\n");
            match self.line("... ", MAX_ENTRY_BYTES.saturating_sub(begun.len()))? {
                Some(line) => longer.push_str(&line),
                None => return Ok(Some(begun.to_owned())),
            }
            entry = longer;
        }
        Ok(Some(entry))
    }

    fn line(&mut self, prompt: &str, max_bytes: usize) -> io::Result<Option<String>> {
        let too_long = || {
            let reason = format!("a message has more than {} MiB", MAX_ENTRY_BYTES >> 20);
            io::Error::new(io::ErrorKind::InvalidInput, reason)
        };
        if max_bytes == 0 {
            return Err(too_long());
        }
        if self.prompts {
            let mut out = io::stdout().lock();
            out.write_all(prompt.as_bytes())?;
            out.flush()?;
        }
        let mut line = Vec::new();
        let mut limited = (&mut self.lines).take(max_bytes as u64);
        if limited.read_until(b'\n', &mut line)? == 0 {
            return Ok(None);
        }
        let is_ended = line.pop_if(|byte| *byte == b'\n').is_some();
        if !is_ended && line.len() == max_bytes {
            return Err(too_long());
        }
        line.pop_if(|byte| *byte == b'\r');
        Ok(Some(String::from_utf8_lossy(&line).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(text: &str) -> Vec<String> {
        let mut input = Input::new(text.as_bytes(), false);
        std::iter::from_fn(|| input.next_entry().unwrap()).collect()
    }

    #[test]
    fn a_line_is_an_entry_unless_it_goes_on() {
        assert_eq!(entries("one\r\ntwo"), ["one", "two"]);
        assert_eq!(
            entries("one\\\ntwo\\\nthree\nfour\n"),
            ["one\ntwo\nthree", "four"]
        );
        assert_eq!(entries("one\\"), ["one"]);
    }

    #[test]
    fn a_fence_holds_several_lines() {
        let fenced = "\"\"\"\nfn main() {\n\n}\\\n\"\"\"\nnext\n";
        assert_eq!(entries(fenced), ["fn main() {\n\n}\\", "next"]);
        assert_eq!(entries("\"\"\"a \"b\"\nc\"\"\"\n"), ["a \"b\"\nc"]);
        assert_eq!(entries("\"\"\"alone\"\"\"\nx"), ["alone", "x"]);
    }

    #[test]
    fn a_fence_that_is_never_closed_sends_nothing() {
        assert_eq!(entries("hello\n\"\"\"\nhalf a message\n"), ["hello"]);
    }
}
