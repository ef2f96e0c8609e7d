//! `cache_control`: the marks after which the prefix cache retains the prompt.

use serde_json::{Map, Value};

use super::MessageFields;
use crate::text::cache_mark::{CacheMarks, MarkedText};
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::messages::CACHE_CONTROL;

const FIELD: &str = "cache_control";
const MAX_MARKS: usize = 4;
const MINUTE_US: u64 = 60_000_000;

/// Returns the marks of a request, or `None` if it has none.
pub fn cache_marks(
    fields: &MessageFields,
    check: FieldCheck,
) -> Result<Option<CacheMarks>, ApiError> {
    let mut reader = MarkReader {
        check,
        num_marks: 0,
    };
    let mut marks = CacheMarks::default();
    for (index, tool) in fields.tools.iter().flatten().enumerate() {
        let ttl_us = reader.read(tool.get(FIELD), || format!("tools[{index}]"))?;
        marks.head_ttl_us = marks.head_ttl_us.max(ttl_us);
    }
    if let Some(Value::Array(blocks)) = &fields.system {
        for (index, block) in blocks.iter().enumerate() {
            let ttl_us = reader.read(block.get(FIELD), || format!("system[{index}]"))?;
            let is_last = index + 1 == blocks.len();
            if is_last {
                marks.head_ttl_us = marks.head_ttl_us.max(ttl_us);
            }
            marks.system.push(MarkedText {
                text: text_of(block),
                ttl_us: ttl_us.filter(|_| !is_last),
            });
        }
    }
    for (index, message) in fields.messages.iter().flatten().enumerate() {
        reader.read_message(index, message, &mut marks.messages)?;
    }
    // A mark on the request itself stands for one after its last block.
    let ttl_us = reader.read(fields.cache_control.as_ref(), String::new)?;
    match marks.messages.last_mut() {
        Some(last) => last.ttl_us = last.ttl_us.max(ttl_us),
        None => marks.head_ttl_us = marks.head_ttl_us.max(ttl_us),
    }
    if reader.num_marks > MAX_MARKS {
        let num_marks = reader.num_marks;
        let message = format!("marks {num_marks} places of the prompt, of at most {MAX_MARKS}");
        return Err(ApiError::invalid(FIELD, message));
    }
    let last = { marks.messages.iter() }.rposition(|block| block.ttl_us.is_some());
    marks.messages.truncate(last.map_or(0, |last| last + 1));
    Ok((reader.num_marks > 0).then_some(marks))
}

struct MarkReader {
    check: FieldCheck,
    num_marks: usize,
}

impl MarkReader {
    /// Reads the mark of the block at `path`, if it has one, as a lifetime.
    fn read(
        &mut self,
        mark: Option<&Value>,
        path: impl FnOnce() -> String,
    ) -> Result<Option<u64>, ApiError> {
        let mark = match mark {
            None | Some(Value::Null) => return Ok(None),
            Some(mark) => mark,
        };
        self.num_marks += 1;
        let path = match path() {
            path if path.is_empty() => FIELD.to_owned(),
            path => format!("{path}.{FIELD}"),
        };
        let Value::Object(fields) = mark else {
            return Err(ApiError::invalid(path, "must be an object"));
        };
        self.check.check(&CACHE_CONTROL, &path, fields)?;
        if fields.get("type").and_then(Value::as_str) != Some("ephemeral") {
            let message = "must be \"ephemeral\"";
            return Err(ApiError::invalid(format!("{path}.type"), message));
        }
        let num_minutes = match fields.get("ttl") {
            None | Some(Value::Null) => 5,
            Some(ttl) => match ttl.as_str() {
                Some("5m") => 5,
                Some("1h") => 60,
                _ => {
                    let message = "must be \"5m\" or \"1h\"";
                    return Err(ApiError::invalid(format!("{path}.ttl"), message));
                }
            },
        };
        Ok(Some(num_minutes * MINUTE_US))
    }

    /// Reads the blocks of a message. A text in place of a list of blocks has no mark.
    fn read_message(
        &mut self,
        index: usize,
        message: &Map<String, Value>,
        texts: &mut Vec<MarkedText>,
    ) -> Result<(), ApiError> {
        let blocks = match message.get("content") {
            Some(Value::Array(blocks)) => blocks,
            Some(content) => {
                texts.push(MarkedText {
                    text: content.as_str().unwrap_or_default().to_owned(),
                    ttl_us: None,
                });
                return Ok(());
            }
            None => return Ok(()),
        };
        for (at, block) in blocks.iter().enumerate() {
            let path = || format!("messages[{index}].content[{at}]");
            let mut ttl_us = self.read(block.get(FIELD), path)?;
            for (part_at, part) in parts(block).enumerate() {
                let path = || format!("{}.content[{part_at}]", path());
                ttl_us = ttl_us.max(self.read(part.get(FIELD), path)?);
            }
            texts.push(MarkedText {
                text: text_of(block),
                ttl_us,
            });
        }
        Ok(())
    }
}

/// The blocks within a tool's result.
fn parts(block: &Value) -> impl Iterator<Item = &Value> {
    block["content"].as_array().into_iter().flatten()
}

/// The text by which a block is found in the prompt. Templates write the arguments of a call in many ways.
fn text_of(block: &Value) -> String {
    let text = match block["type"].as_str() {
        Some("tool_use") => &block["name"],
        Some("tool_result") => &block["content"],
        _ => &block["text"],
    };
    match text.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let texts = parts(block).filter_map(|part| part["text"].as_str());
            texts.collect::<Vec<_>>().join("\n")
        }
    }
}
