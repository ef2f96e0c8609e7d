//! Arguments of calls in Python: `city='Paris', days=3, units=['c', None])`. They are converted to JSON as they arrive.
//!
//! Chat templates write strings without escaping quotes in them, and so do models. A quote ends a string only if the
//! text after it can follow a value.

use super::json_writer::{JsonWriter, json_of_bare};
use super::python_reader::PythonBlock;
use super::python_string::{Escape, Quote, Unescaped, unescape};
use super::tag::{Beginning, Sight, begins_with, find_tag};

/// The possible texts after a value without quotes, and after a name. The last text of each list stands for the end of
/// all calls.
const BARE_ENDS: [&str; 6] = [",", ")", "]", "}", ":", ""];
const NAME_ENDS: [&str; 11] = ["=", ":", ",", ")", "(", "[", "{", "'", "\"", "]", ""];

/// Reads the arguments of one call, starting after its bracket.
pub(crate) struct PythonArguments {
    block: PythonBlock,
    json: JsonWriter,
    /// The discarded JSON of an argument without a name, whose parameter is unknown.
    unnamed: Option<JsonWriter>,
    state: State,
}

enum State {
    /// Before an argument, or the end of the call.
    Argument,
    /// The name of an argument, or a value without a name.
    Name(String),
    /// Before a value, or the end of an array.
    Value,
    /// After a curly bracket, which begins a dictionary or a set.
    Brace,
    /// In a dictionary, before a key or the end.
    Key,
    Text(Quote, Position),
    Bare(String, Position),
    /// After a possible key.
    Colon(Position, Scalar),
    Done,
}

/// The position of a string or a value without quotes.
#[derive(Clone, Debug, PartialEq)]
enum Position {
    Value,
    /// The first string or value after a curly bracket, with the text of a string so far.
    First(String),
    Key(String),
}

/// A complete value that may be a key.
enum Scalar {
    Text,
    /// A value without quotes, as the model wrote it.
    Bare(String),
}

impl PythonArguments {
    pub(crate) fn new(block: PythonBlock) -> Self {
        let mut json = JsonWriter::default();
        json.open(true);
        Self {
            block,
            json,
            unnamed: None,
            state: State::Argument,
        }
    }

    /// Returns the JSON that was read since the last call of this function.
    pub(crate) fn take(&mut self) -> String {
        self.json.take()
    }

    pub(crate) fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    fn writer(&mut self) -> &mut JsonWriter {
        self.unnamed.as_mut().unwrap_or(&mut self.json)
    }

    /// Whether the value being read is an argument itself, and not a part of one.
    fn is_argument(&mut self) -> bool {
        self.writer().depth() == 1
    }

    fn end_value(&mut self) {
        self.state = match self.writer().depth() {
            0 => State::Done,
            1 => {
                self.unnamed = None;
                State::Argument
            }
            _ if self.writer().is_in_object() => State::Key,
            _ => State::Value,
        };
    }

    /// Ends all open objects and arrays.
    fn end_all(&mut self) {
        self.unnamed = None;
        self.json.close_all();
        self.state = State::Done;
    }

    /// Reads from the beginning of `text`, and returns the number of bytes read; `None` if it needs more.
    pub(crate) fn step(&mut self, text: &str, at_end: bool) -> Option<usize> {
        let block_end = self.block.end();
        match &mut self.state {
            State::Argument => self.argument(text),
            State::Name(name) => {
                let (settled, end) = end_of(text, NAME_ENDS, block_end);
                name.push_str(&text[..settled]);
                match end {
                    // A colon means the same as an equals sign.
                    Some("=" | ":") => {
                        self.json.key(name.trim());
                        self.state = State::Value;
                        Some(settled + 1)
                    }
                    Some(_) => {
                        let value = std::mem::take(name);
                        self.begin_unnamed();
                        if !value.trim().is_empty() {
                            self.state = State::Bare(value, Position::Value);
                        }
                        Some(settled)
                    }
                    None => (settled > 0).then_some(settled),
                }
            }
            State::Value | State::Brace | State::Key => self.begin(text),
            State::Text(quote, position) => {
                let (quote, position) = (*quote, position.clone());
                self.text(text, quote, position, at_end)
            }
            State::Bare(value, position) => {
                let (settled, end) = end_of(text, BARE_ENDS, block_end);
                value.push_str(&text[..settled]);
                if end.is_none() {
                    return (settled > 0).then_some(settled);
                }
                let (value, position) = (std::mem::take(value), position.clone());
                match position {
                    Position::Value => {
                        self.writer().value(&json_of_bare(&value));
                        self.end_value();
                        // A colon after a value has no meaning.
                        let skipped = usize::from(end == Some(":"));
                        Some(settled + skipped)
                    }
                    position => {
                        self.state = State::Colon(position, Scalar::Bare(value));
                        Some(settled)
                    }
                }
            }
            State::Colon(..) => self.colon(text, at_end),
            State::Done => None,
        }
    }

    fn begin_unnamed(&mut self) {
        let mut unnamed = JsonWriter::default();
        unnamed.open(false);
        self.unnamed = Some(unnamed);
        self.state = State::Value;
    }

    fn argument(&mut self, text: &str) -> Option<usize> {
        // Unmatched closing brackets have no meaning.
        let is_nothing = |c: char| c.is_whitespace() || matches!(c, ',' | ']' | '}');
        let rest = text.trim_start_matches(is_nothing);
        let len = text.len() - rest.len();
        match begins_with(rest, &[")", self.block.end()]) {
            Beginning::Tag(0) => {
                self.end_all();
                Some(len + 1)
            }
            Beginning::Tag(_) => {
                self.end_all();
                Some(len)
            }
            Beginning::Undecided => (len > 0).then_some(len),
            Beginning::Other => {
                self.state = State::Name(String::new());
                Some(len)
            }
        }
    }

    /// Reads the beginning of a value or a key.
    fn begin(&mut self, text: &str) -> Option<usize> {
        let is_argument = self.is_argument();
        let is_key = matches!(self.state, State::Key);
        let is_first = matches!(self.state, State::Brace);
        let rest = text.trim_start_matches(|c: char| {
            c.is_whitespace() || c == ',' && !is_argument && !is_first && !self.is_member()
        });
        let len = text.len() - rest.len();
        match begins_with(rest, &[self.block.end()]) {
            Beginning::Tag(_) => {
                self.end_all();
                return Some(len);
            }
            Beginning::Undecided => return (len > 0).then_some(len),
            Beginning::Other => {}
        }
        let position = match (is_key, is_first) {
            (true, _) => Position::Key(String::new()),
            (_, true) => Position::First(String::new()),
            _ => Position::Value,
        };
        match rest.chars().next()? {
            '\'' | '"' => {
                let (quote, num_bytes) = Quote::of(rest)?;
                if position == Position::Value {
                    self.writer().begin_text();
                }
                self.state = State::Text(quote, position);
                return Some(len + num_bytes);
            }
            '}' if is_first => {
                self.writer().open(true);
                self.writer().close();
                self.end_value();
            }
            // The value is missing.
            ',' | ')' | ']' | '}' if is_argument || self.is_member() && !is_key => {
                self.writer().value("null");
                self.end_value();
                return Some(len);
            }
            ')' | ']' | '}' => {
                self.writer().close();
                self.end_value();
            }
            '{' if !is_key => {
                if is_first {
                    self.writer().open(false);
                }
                self.state = State::Brace;
            }
            '[' | '(' if !is_key => {
                if is_first {
                    self.writer().open(false);
                }
                self.writer().open(false);
                self.state = State::Value;
            }
            _ => {
                self.state = State::Bare(String::new(), position);
                return Some(len);
            }
        }
        Some(len + 1)
    }

    /// Whether the next value is a member of a dictionary, or one of its keys.
    fn is_member(&mut self) -> bool {
        self.writer().is_in_object() && !matches!(self.state, State::Key)
    }

    fn text(
        &mut self,
        text: &str,
        quote: Quote,
        position: Position,
        at_end: bool,
    ) -> Option<usize> {
        let mut position = position;
        let mut at = 0;
        let is_argument = self.is_argument() && position == Position::Value;
        let is_unnamed = self.unnamed.is_some();
        let mut is_complete = false;
        while !is_complete {
            let rest = &text[at..];
            let (piece, len) = match unescape(rest, quote) {
                Unescaped::Text(len) => (rest[..len].to_owned(), len),
                Unescaped::Escape(Escape { piece, len }) => (piece, len),
                Unescaped::Quote(len) => {
                    let behind = &rest[len..];
                    match closes(behind, self.block, is_argument, is_unnamed, at_end) {
                        Some(true) => {
                            is_complete = true;
                            (String::new(), len)
                        }
                        Some(false) => (rest[..1].to_owned(), 1),
                        None => break,
                    }
                }
                Unescaped::Undecided => break,
            };
            match &mut position {
                Position::Value => self.writer().text(&piece),
                Position::First(held) | Position::Key(held) => held.push_str(&piece),
            }
            at += len;
        }
        match (is_complete, position) {
            (true, Position::Value) => {
                self.writer().end_text();
                self.end_value();
            }
            (true, position) => self.state = State::Colon(position, Scalar::Text),
            (false, position) => self.state = State::Text(quote, position),
        }
        (at > 0).then_some(at)
    }

    /// Reads the text after a possible key.
    fn colon(&mut self, text: &str, at_end: bool) -> Option<usize> {
        let rest = text.trim_start();
        let len = text.len() - rest.len();
        let is_colon = rest.starts_with(':');
        if rest.is_empty() && !at_end {
            return (len > 0).then_some(len);
        }
        let State::Colon(position, scalar) = std::mem::replace(&mut self.state, State::Value)
        else {
            return None;
        };
        let writer = self.unnamed.as_mut().unwrap_or(&mut self.json);
        let is_first = matches!(position, Position::First(_));
        let text = match (position, scalar) {
            (Position::First(text) | Position::Key(text), Scalar::Text) => text,
            (_, Scalar::Bare(text)) => {
                if is_first && !is_colon {
                    writer.open(false);
                    writer.value(&json_of_bare(&text));
                    return Some(len);
                }
                text.trim().to_owned()
            }
            (Position::Value, Scalar::Text) => return None,
        };
        if is_first {
            writer.open(is_colon);
        }
        if is_first && !is_colon {
            writer.begin_text();
            writer.text(&text);
            writer.end_text();
            return Some(len);
        }
        writer.key(&text);
        Some(len + usize::from(is_colon))
    }
}

/// The number of bytes before the first of `ends`, or before a text that may become one, and the end that was found.
/// The last of `ends` stands for `block_end`.
fn end_of<const N: usize>(
    text: &str,
    ends: [&'static str; N],
    block_end: &'static str,
) -> (usize, Option<&'static str>) {
    let mut ends = ends;
    ends[N - 1] = block_end;
    match find_tag(text, &ends) {
        Sight::Tag { start, tag } => (start, Some(ends[tag])),
        Sight::Clear(settled) => (settled, None),
    }
}

/// Whether a quote ends its string, judged by the text after it. `None` if more text decides.
fn closes(
    behind: &str,
    block: PythonBlock,
    is_argument: bool,
    is_unnamed: bool,
    at_end: bool,
) -> Option<bool> {
    let unknown = at_end.then_some(true);
    let next = behind.trim_start();
    match begins_with(next, &[block.end()]) {
        Beginning::Tag(_) => return Some(true),
        Beginning::Undecided => return unknown,
        Beginning::Other => {}
    }
    if !is_argument {
        return Some(next.starts_with([',', ':', ')', ']', '}']));
    }
    if let Some(rest) = next.strip_prefix(')') {
        // After a call comes another one, the end of the list, or the end of the text.
        if block.has_lines && rest.starts_with('\n') {
            return Some(true);
        }
        return match begins_with(rest.trim_start(), &[block.end(), ",", "]"]) {
            Beginning::Tag(_) => Some(true),
            Beginning::Undecided => unknown,
            Beginning::Other => Some(false),
        };
    }
    let Some(rest) = next.strip_prefix(',') else {
        return Some(false);
    };
    let rest = rest.trim_start();
    if is_unnamed || rest.starts_with(')') {
        return Some(true);
    }
    // After an argument comes another one, which has a name.
    let is_of_name = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.');
    let behind_name = rest.trim_start_matches(is_of_name);
    let has_name = behind_name.len() < rest.len();
    let equals = behind_name.trim_start();
    if equals.is_empty() {
        return unknown;
    }
    Some(has_name && equals.starts_with('='))
}
