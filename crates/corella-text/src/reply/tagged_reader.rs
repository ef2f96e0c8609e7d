//! Calls in tags (`call_tags`), read during their arrival.

use serde_json::Value;

use super::call_reader::{
    CallReader, OfferedTools, is_name, may_become_name, read_text, skip_to_tag,
};
use super::call_tags::CallTags;
use super::part_list::PartList;
use super::tag::{Beginning, Sight, begins_with, find_tag};
use super::tool_set::ToolSet;

pub(crate) struct TaggedReader {
    tags: &'static CallTags,
    tools: OfferedTools,
    state: State,
    name: String,
    /// The current parameter.
    key: String,
    num_parameters: usize,
}

enum State {
    Text,
    /// Within the outermost tag, before the function's.
    Call,
    FunctionName,
    /// In a function, between two parameters.
    Function,
    ParameterName,
    /// After a key, before the tag of its value.
    BeforeValue,
    /// A string. A line break that may belong to the markup is held back.
    TextValue {
        is_first: bool,
        line_break: bool,
    },
    /// A value that is only understood as a whole.
    Value(String),
}

impl TaggedReader {
    pub(crate) fn new(tags: &'static CallTags, tools: OfferedTools) -> Self {
        Self {
            tags,
            tools,
            state: State::Text,
            name: String::new(),
            key: String::new(),
            num_parameters: 0,
        }
    }

    fn handle_outer_tag(&mut self, tag: &str) {
        let function = self.tags.function.map(|[open, ..]| open);
        self.state = match (tag == self.tags.outer[0], function) {
            (true, None) => State::FunctionName,
            (true, Some(_)) => State::Call,
            (false, Some(open)) if tag == open => State::FunctionName,
            _ => State::Text,
        };
    }

    /// The tags after the name of a function.
    fn name_ends(&self) -> Vec<&'static str> {
        match self.tags.function {
            Some([_, close, _]) => vec![close],
            None => vec![self.tags.key[0], self.tags.outer[1]],
        }
    }

    fn begin_value(&mut self, out: &mut PartList) {
        let separator = if self.num_parameters == 0 { "" } else { ", " };
        out.arguments(&format!("{separator}{}: ", Value::from(self.key.as_str())));
        self.num_parameters += 1;
        let tools = self.tools.as_ref();
        self.state = match tools.is_none_or(|tools| tools.is_text(&self.name, &self.key)) {
            true => {
                out.arguments("\"");
                State::TextValue {
                    is_first: true,
                    line_break: false,
                }
            }
            false => State::Value(String::new()),
        };
    }

    fn text(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        let outside = self.tags.outside();
        let (read, tag) = read_text(text, &outside, at_end, out);
        if let Some(tag) = tag {
            self.handle_outer_tag(outside[tag]);
        }
        read
    }

    /// Reads the tag of a function.
    fn call(&mut self, text: &str) -> Option<usize> {
        let outside = self.tags.outside();
        let (read, beginning) = skip_to_tag(text, &[], &outside);
        match beginning {
            Beginning::Tag(tag) => self.handle_outer_tag(outside[tag]),
            Beginning::Undecided => {}
            // What was read is no call, and becomes text.
            Beginning::Other => self.state = State::Text,
        }
        read
    }

    fn function_name(&mut self, text: &str, out: &mut PartList) -> Option<usize> {
        let ends = self.name_ends();
        let (end, tag) = find_tag(text, &ends).parts();
        let name = text[..end].trim();
        match tag {
            Some(tag) if is_name(name) => {
                name.clone_into(&mut self.name);
                self.num_parameters = 0;
                out.start_call(&self.name);
                out.arguments("{");
                self.state = State::Function;
                // If the name has no end tag of its own, the found tag begins a parameter or is an outer tag. Such a
                // tag is read later.
                let is_its_own = self.tags.function.is_some();
                Some(end + if is_its_own { ends[tag].len() } else { 0 })
            }
            None if may_become_name(name) => None,
            _ => {
                self.state = State::Text;
                Some(0)
            }
        }
    }

    /// Looks for another parameter, or the end of the function.
    fn function(&mut self, text: &str, out: &mut PartList) -> Option<usize> {
        let inside = self.tags.inside();
        match find_tag(text, &inside) {
            Sight::Tag { start, tag } => {
                let tag = inside[tag];
                if tag == self.tags.key[0] {
                    self.state = State::ParameterName;
                } else {
                    out.arguments("}");
                    out.end_call();
                    self.handle_outer_tag(tag);
                }
                Some(start + tag.len())
            }
            Sight::Clear(settled) => (settled > 0).then_some(settled),
        }
    }

    fn parameter_name(&mut self, text: &str, out: &mut PartList) -> Option<usize> {
        let close = self.tags.key[1];
        let end = text.find(close)?;
        text[..end].trim().clone_into(&mut self.key);
        match self.tags.value[0] {
            "" => self.begin_value(out),
            _ => self.state = State::BeforeValue,
        }
        Some(end + close.len())
    }

    fn before_value(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        let open = self.tags.value[0];
        let rest = text.trim_start();
        match begins_with(rest, &[open]) {
            Beginning::Undecided if !at_end => return None,
            Beginning::Tag(_) => {
                self.begin_value(out);
                return Some(text.len() - rest.len() + open.len());
            }
            _ => self.state = State::Function,
        }
        Some(0)
    }
}

impl CallReader for TaggedReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => self.text(text, at_end, out),
            State::Call => self.call(text),
            State::FunctionName => self.function_name(text, out),
            State::Function => self.function(text, out),
            State::ParameterName => self.parameter_name(text, out),
            State::BeforeValue => self.before_value(text, at_end, out),
            State::TextValue {
                is_first,
                line_break,
            } => {
                let has_padding = !self.tags.padding.is_empty();
                let end = value_end(
                    self.tags,
                    text,
                    &self.name,
                    &self.key,
                    self.tools.as_deref(),
                    at_end,
                );
                let (settled, end_len) = match end {
                    ValueEnd::At { start, len } => (start, Some(len)),
                    ValueEnd::Behind(settled) => (settled, None),
                };
                let mut value = &text[..settled];
                if *is_first && !value.is_empty() {
                    *is_first = false;
                    value = value
                        .strip_prefix('\n')
                        .filter(|_| has_padding)
                        .unwrap_or(value);
                }
                if !value.is_empty() && std::mem::take(line_break) {
                    out.arguments("\\n");
                }
                if let Some(shorter) = value.strip_suffix('\n').filter(|_| has_padding) {
                    (value, *line_break) = (shorter, true);
                }
                let quoted = Value::from(value).to_string();
                out.arguments(&quoted[1..quoted.len() - 1]);
                if let Some(len) = end_len {
                    out.arguments("\"");
                    self.state = State::Function;
                    return Some(settled + len);
                }
                (settled > 0).then_some(settled)
            }
            State::Value(value) => {
                let tools = self.tools.as_deref();
                match value_end(self.tags, text, &self.name, &self.key, tools, at_end) {
                    ValueEnd::At { start, len } => {
                        value.push_str(&text[..start]);
                        let value = value.strip_prefix('\n').unwrap_or(value);
                        let value = value.strip_suffix('\n').unwrap_or(value);
                        if let Some(tools) = tools {
                            out.arguments(&tools.json_of(&self.name, &self.key, value));
                        }
                        self.state = State::Function;
                        Some(start + len)
                    }
                    ValueEnd::Behind(settled) => {
                        value.push_str(&text[..settled]);
                        (settled > 0).then_some(settled)
                    }
                }
            }
        }
    }
}

/// The end of a parameter's value.
enum ValueEnd {
    /// The first byte of the tag, and the length of the tag.
    At { start: usize, len: usize },
    /// No end begins before this byte.
    Behind(usize),
}

/// Looks for the end of a value. The model sometimes omits the tag that ends the value. The value then ends with the
/// function, or where another parameter of the tool begins. A value, such as a file, may contain these tags: the end of
/// a function counts only if the end of the call, the next call or the end of the reply follows.
fn value_end(
    tags: &CallTags,
    text: &str,
    function: &str,
    key: &str,
    tools: Option<&ToolSet>,
    at_end: bool,
) -> ValueEnd {
    let is_other =
        |name: &str| name != key && tools.is_some_and(|tools| tools.has_parameter(function, name));
    let [_, value_close] = tags.value;
    let [_, outer_close] = tags.outer;
    let [key_open, key_close] = tags.key;
    let function_close = tags.function.map(|[.., close]| close);
    let begins = tags.begins();
    for (start, _) in text.match_indices('<') {
        let rest = &text[start..];
        if rest.starts_with(value_close) {
            let len = value_close.len();
            return ValueEnd::At { start, len };
        }
        let behind_function = function_close.and_then(|close| rest.strip_prefix(close));
        let is_end = if let Some(behind) = behind_function {
            let tags = [&[outer_close], begins.as_slice()].concat();
            follows(behind, &tags, at_end)
        } else if let Some(behind) = rest.strip_prefix(outer_close) {
            follows(behind, &begins, at_end)
        } else if let Some(name) = rest.strip_prefix(key_open) {
            match find_tag(name, &[key_close]) {
                Sight::Tag { start, .. } => Some(is_other(name[..start].trim())),
                Sight::Clear(settled) if at_end || !may_become_name(&name[..settled]) => {
                    Some(false)
                }
                Sight::Clear(_) => None,
            }
        } else {
            let tags = [value_close, outer_close, key_open].into_iter();
            match tags.chain(function_close).any(|tag| tag.starts_with(rest)) {
                true => None,
                false => Some(false),
            }
        };
        match is_end {
            Some(true) => return ValueEnd::At { start, len: 0 },
            Some(false) => {}
            None => return ValueEnd::Behind(start),
        }
    }
    ValueEnd::Behind(text.len())
}

/// Whether one of `tags`, or the end of the text, follows. `None` if more text decides.
fn follows(text: &str, tags: &[&str], at_end: bool) -> Option<bool> {
    match begins_with(text.trim_start(), tags) {
        Beginning::Tag(_) => Some(true),
        Beginning::Undecided => at_end.then_some(true),
        Beginning::Other => Some(false),
    }
}
