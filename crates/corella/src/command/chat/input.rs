//! Typed or piped input, one entry at a time.

use std::io;

/// Joins the lines of an entry until it is whole.
pub struct Input<'a> {
    lines: Box<dyn LineSource + 'a>,
}

/// The source of lines.
pub trait LineSource {
    /// Returns the next line. `max_bytes` is more than 0.
    fn next_line(&mut self, prompt: &str, max_bytes: usize) -> io::Result<Line>;

    /// Receives each whole entry.
    fn remember(&mut self, entry: &str);
}

#[derive(Debug, PartialEq)]
pub enum Line {
    /// A line without its final line break. Pasted text may have further line breaks.
    Text(String),
    /// The user has given up the entry of this line.
    Dropped,
    End,
}

/// Longer than any typed entry, and more than a context holds.
const MAX_ENTRY_BYTES: usize = 16 << 20;
/// Opens and closes an entry of several lines, as in Ollama.
const FENCE: &str = "\"\"\"";

impl<'a> Input<'a> {
    pub fn new(lines: Box<dyn LineSource + 'a>) -> Self {
        Self { lines }
    }

    /// Returns the next entry, without line break; `None` at the end.
    pub fn next_entry(&mut self) -> io::Result<Option<String>> {
        loop {
            match self.try_next_entry()? {
                Line::Text(entry) => {
                    self.lines.remember(&entry);
                    return Ok(Some(entry));
                }
                Line::Dropped => {}
                Line::End => return Ok(None),
            }
        }
    }

    fn try_next_entry(&mut self) -> io::Result<Line> {
        let first = match self.line(">>> ", 0)? {
            Line::Text(first) => first,
            other => return Ok(other),
        };
        let mut entry = first.trim_start().strip_prefix(FENCE).map(str::to_owned);
        if let Some(fenced) = &mut entry {
            loop {
                if let Some(content) = fenced.trim_end().strip_suffix(FENCE) {
                    return Ok(Line::Text(content.trim_matches('\n').to_owned()));
                }
                match self.line("... ", fenced.len())? {
                    Line::Text(line) => {
                        fenced.push('\n');
                        fenced.push_str(&line);
                    }
                    // An entry whose fence was never closed is not sent.
                    other => return Ok(other),
                }
            }
        }
        let mut entry = first;
        while let Some(begun) = entry.strip_suffix('\\') {
            let mut longer = format!("{begun}\n");
            match self.line("... ", begun.len())? {
                Line::Text(line) => longer.push_str(&line),
                Line::Dropped => return Ok(Line::Dropped),
                Line::End => return Ok(Line::Text(begun.to_owned())),
            }
            entry = longer;
        }
        Ok(Line::Text(entry))
    }

    /// Reads the next line of an entry that has `num_bytes` so far.
    fn line(&mut self, prompt: &str, num_bytes: usize) -> io::Result<Line> {
        match MAX_ENTRY_BYTES.saturating_sub(num_bytes) {
            0 => Err(too_long()),
            max_bytes => self.lines.next_line(prompt, max_bytes),
        }
    }
}

pub fn too_long() -> io::Error {
    let reason = format!("a message has more than {} MiB", MAX_ENTRY_BYTES >> 20);
    io::Error::new(io::ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::super::plain_line::PlainLines;
    use super::*;

    fn entries(text: &str) -> Vec<String> {
        let mut input = Input::new(Box::new(PlainLines::new(text.as_bytes(), false)));
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

    /// Lines of a test, and the remembered entries.
    struct Typed {
        lines: std::vec::IntoIter<Line>,
        remembered: Rc<RefCell<Vec<String>>>,
    }

    impl LineSource for Typed {
        fn next_line(&mut self, _: &str, _: usize) -> io::Result<Line> {
            Ok(self.lines.next().unwrap_or(Line::End))
        }

        fn remember(&mut self, entry: &str) {
            self.remembered.borrow_mut().push(entry.to_owned());
        }
    }

    #[test]
    fn a_dropped_line_takes_its_entry_along() {
        let text = |text: &str| Line::Text(text.to_owned());
        let lines = vec![
            text("\"\"\""),
            text("begun"),
            Line::Dropped,
            text("also\\"),
            Line::Dropped,
            text("pasted\nlines"),
            text("\"\"\"both"),
            text("lines\"\"\""),
        ];
        let remembered = Rc::default();
        let mut input = Input::new(Box::new(Typed {
            lines: lines.into_iter(),
            remembered: Rc::clone(&remembered),
        }));
        let entries: Vec<_> = std::iter::from_fn(|| input.next_entry().unwrap()).collect();
        assert_eq!(entries, ["pasted\nlines", "both\nlines"]);
        assert_eq!(*remembered.borrow(), entries);
    }
}
