//! Calls as Qwen3-Coder writes them, in tags: `<tool_call><function=name><parameter=key>value
//! </parameter></function></tool_call>`. Values are not JSON, so the schema of the tool says what they
//! are.

use serde_json::Value;

use super::call_reader::{CallReader, OfferedTools, is_name, may_become_name, read_text};
use super::part_list::PartList;
use super::tag::{Beginning, Sight, begins_with, find_tag};

/// The model sometimes leaves out the outermost tag.
const OUTSIDE: [&str; 4] = ["<tool_call>", "</tool_call>", FUNCTION, FUNCTION_END];
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const IN_FUNCTION: [&str; 4] = [PARAMETER, FUNCTION_END, "</tool_call>", FUNCTION];
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: [&str; 1] = ["</parameter>"];

pub(crate) struct QwenCoderReader {
    tools: OfferedTools,
    state: State,
    name: String,
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
    /// A string, of which the line break that may belong to the markup is held back.
    TextValue {
        is_first: bool,
        line_break: bool,
    },
    /// A value that is only understood as a whole.
    Value {
        key: String,
        value: String,
    },
}

impl QwenCoderReader {
    pub(crate) fn new(tools: OfferedTools) -> Self {
        Self {
            tools,
            state: State::Text,
            name: String::new(),
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
        let tools = self.tools.as_ref();
        self.state = match tools.is_none_or(|tools| tools.is_text(&self.name, key)) {
            true => {
                out.arguments("\"");
                State::TextValue {
                    is_first: true,
                    line_break: false,
                }
            }
            false => State::Value {
                key: key.to_owned(),
                value: String::new(),
            },
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
                    // This is no call, and is not lost.
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
                let (settled, ends) = match find_tag(text, &PARAMETER_END) {
                    Sight::Tag { start, .. } => (start, true),
                    Sight::Clear(settled) => (settled, false),
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
                if ends {
                    out.arguments("\"");
                    self.state = State::Function;
                    return Some(settled + PARAMETER_END[0].len());
                }
                (settled > 0).then_some(settled)
            }
            State::Value { key, value } => match find_tag(text, &PARAMETER_END) {
                Sight::Tag { start, .. } => {
                    value.push_str(&text[..start]);
                    let value = value.strip_prefix('\n').unwrap_or(value);
                    let value = value.strip_suffix('\n').unwrap_or(value);
                    if let Some(tools) = &self.tools {
                        out.arguments(&tools.json_of(&self.name, key, value));
                    }
                    self.state = State::Function;
                    Some(start + PARAMETER_END[0].len())
                }
                Sight::Clear(settled) => {
                    value.push_str(&text[..settled]);
                    (settled > 0).then_some(settled)
                }
            },
        }
    }
}
