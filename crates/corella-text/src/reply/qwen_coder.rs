//! Calls in the format of Qwen3-Coder, in tags: `<tool_call><function=name><parameter=key>value
//! </parameter></function></tool_call>`. Values are not JSON, so the schema of the tool gives their types.

use serde_json::Value;

use super::call_reader::{CallReader, OfferedTools, is_name, may_become_name, read_text};
use super::part_list::PartList;
use super::tag::{Beginning, Sight, begins_with, find_tag};
use super::tool_set::ToolSet;

/// The model sometimes omits the outermost tag.
const OUTSIDE: [&str; 4] = ["<tool_call>", "</tool_call>", FUNCTION, FUNCTION_END];
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const IN_FUNCTION: [&str; 4] = [PARAMETER, FUNCTION_END, "</tool_call>", FUNCTION];
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// The text behind the end of a function.
const AFTER_FUNCTION: [&str; 3] = ["</tool_call>", "<tool_call>", FUNCTION];

pub(crate) struct QwenCoderReader {
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
    /// A string. A line break that may belong to the markup is held back.
    TextValue {
        is_first: bool,
        line_break: bool,
    },
    /// A value that is only understood as a whole.
    Value(String),
}

impl QwenCoderReader {
    pub(crate) fn new(tools: OfferedTools) -> Self {
        Self {
            tools,
            state: State::Text,
            name: String::new(),
            key: String::new(),
            num_parameters: 0,
        }
    }

    fn handle_outer_tag(&mut self, tag: &str) {
        self.state = match tag {
            FUNCTION => State::FunctionName,
            "<tool_call>" => State::Call,
            _ => State::Text,
        };
    }

    fn start_parameter(&mut self, key: &str, out: &mut PartList) {
        let separator = if self.num_parameters == 0 { "" } else { ", " };
        out.arguments(&format!("{separator}{}: ", Value::from(key)));
        self.num_parameters += 1;
        key.clone_into(&mut self.key);
        let tools = self.tools.as_ref();
        self.state = match tools.is_none_or(|tools| tools.is_text(&self.name, key)) {
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
}

impl CallReader for QwenCoderReader {
    fn step(&mut self, text: &str, at_end: bool, out: &mut PartList) -> Option<usize> {
        match &mut self.state {
            State::Text => {
                let (read, tag) = read_text(text, &OUTSIDE, at_end, out);
                if let Some(tag) = tag {
                    self.handle_outer_tag(OUTSIDE[tag]);
                }
                read
            }
            State::Call => {
                let rest = text.trim_start();
                let len = text.len() - rest.len();
                match begins_with(rest, &OUTSIDE) {
                    Beginning::Tag(tag) => {
                        self.handle_outer_tag(OUTSIDE[tag]);
                        Some(len + OUTSIDE[tag].len())
                    }
                    Beginning::Undecided => (len > 0).then_some(len),
                    // This is no call, and becomes text.
                    Beginning::Other => {
                        self.state = State::Text;
                        Some(len)
                    }
                }
            }
            State::FunctionName => match text.find('>') {
                Some(end) if is_name(text[..end].trim()) => {
                    self.name = text[..end].trim().to_owned();
                    self.num_parameters = 0;
                    out.start_call(&self.name);
                    out.arguments("{");
                    self.state = State::Function;
                    Some(end + 1)
                }
                None if may_become_name(text) => None,
                _ => {
                    self.state = State::Text;
                    Some(0)
                }
            },
            State::Function => match find_tag(text, &IN_FUNCTION) {
                Sight::Tag { start, tag } => {
                    let tag = IN_FUNCTION[tag];
                    if tag == PARAMETER {
                        self.state = State::ParameterName;
                    } else {
                        out.arguments("}");
                        self.handle_outer_tag(tag);
                    }
                    Some(start + tag.len())
                }
                Sight::Clear(settled) => (settled > 0).then_some(settled),
            },
            State::ParameterName => {
                let end = text.find('>')?;
                self.start_parameter(text[..end].trim(), out);
                Some(end + 1)
            }
            State::TextValue {
                is_first,
                line_break,
            } => {
                let end = value_end(text, &self.name, &self.key, self.tools.as_deref(), at_end);
                let (settled, end_len) = match end {
                    ValueEnd::At { start, len } => (start, Some(len)),
                    ValueEnd::Behind(settled) => (settled, None),
                };
                let mut value = &text[..settled];
                if *is_first && !value.is_empty() {
                    *is_first = false;
                    value = value.strip_prefix('\n').unwrap_or(value);
                }
                if !value.is_empty() && std::mem::take(line_break) {
                    out.arguments("\\n");
                }
                if let Some(shorter) = value.strip_suffix('\n') {
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
                match value_end(text, &self.name, &self.key, self.tools.as_deref(), at_end) {
                    ValueEnd::At { start, len } => {
                        value.push_str(&text[..start]);
                        let value = value.strip_prefix('\n').unwrap_or(value);
                        let value = value.strip_suffix('\n').unwrap_or(value);
                        if let Some(tools) = &self.tools {
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
    /// No end before this byte.
    Behind(usize),
}

/// Looks for the end of a value. The model sometimes omits `</parameter>`. The value then ends with the function, or
/// where another parameter of the tool begins. A value may contain such tags, as files do: the end of a function counts
/// only before the end of the call, the next call or the end of the reply.
fn value_end(
    text: &str,
    function: &str,
    key: &str,
    tools: Option<&ToolSet>,
    at_end: bool,
) -> ValueEnd {
    let is_other =
        |name: &str| name != key && tools.is_some_and(|tools| tools.has_parameter(function, name));
    for (start, _) in text.match_indices('<') {
        let rest = &text[start..];
        if rest.starts_with(PARAMETER_END) {
            let len = PARAMETER_END.len();
            return ValueEnd::At { start, len };
        }
        let is_end = if let Some(behind) = rest.strip_prefix(FUNCTION_END) {
            follows(behind, &AFTER_FUNCTION, at_end)
        } else if let Some(behind) = rest.strip_prefix("</tool_call>") {
            follows(behind, &AFTER_FUNCTION[1..], at_end)
        } else if let Some(name) = rest.strip_prefix(PARAMETER) {
            match name.split_once('>') {
                Some((name, _)) => Some(is_other(name.trim())),
                None if at_end || !may_become_name(name) => Some(false),
                None => None,
            }
        } else {
            let tags = [PARAMETER_END, FUNCTION_END, "</tool_call>", PARAMETER];
            match tags.iter().any(|tag| tag.starts_with(rest)) {
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
