//! The server-sent events of a completion: bytes in, tokens and usage out.

use serde::Deserialize;

/// The limit of a line's bytes. Without it, a broken server could fill the memory.
const MAX_LINE_BYTES: usize = 4 << 20;

/// Splits a byte stream into the payloads of its `data:` lines.
#[derive(Default)]
pub(super) struct EventReader {
    line: Vec<u8>,
}

impl EventReader {
    /// Calls `handle` with every payload that `bytes` completes.
    pub(super) fn push(
        &mut self,
        mut bytes: &[u8],
        mut handle: impl FnMut(&str) -> Result<(), String>,
    ) -> Result<(), String> {
        while let Some(end) = bytes.iter().position(|&byte| byte == b'\n') {
            self.line.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end + 1..];
            let line = std::str::from_utf8(&self.line).map_err(|_| "an event is not UTF-8")?;
            if let Some(payload) = line.trim_end_matches('\r').strip_prefix("data:") {
                handle(payload.trim_start())?;
            }
            self.line.clear();
        }
        if self.line.len() + bytes.len() > MAX_LINE_BYTES {
            return Err("an event is longer than several megabytes".into());
        }
        self.line.extend_from_slice(bytes);
        Ok(())
    }
}

/// The meaning of one payload.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// A part of the answer: the text of one token or of several.
    Token,
    /// The role, the finish reason, or an event without a choice.
    Other,
    Done,
}

/// The token counts that a server sends with `include_usage`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(super) struct Usage {
    #[serde(default)]
    pub(super) prompt_tokens: u64,
    #[serde(default)]
    pub(super) completion_tokens: u64,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    role: Option<String>,
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<serde_json::Value>>,
}

impl Event {
    pub(super) fn parse(payload: &str) -> Result<(Self, Option<Usage>), String> {
        if payload == "[DONE]" {
            return Ok((Self::Done, None));
        }
        let chunk: Chunk = serde_json::from_str(payload)
            .map_err(|error| format!("an event is not JSON: {error}"))?;
        if let Some(error) = chunk.error {
            let message = error["message"]
                .as_str()
                .map_or_else(|| error.to_string(), str::to_owned);
            return Err(format!(
                "the server ended the stream with an error: {message}"
            ));
        }
        let event = if chunk.choices.iter().any(Choice::has_token) {
            Self::Token
        } else {
            Self::Other
        };
        Ok((event, chunk.usage))
    }
}

impl Choice {
    /// Whether the choice carries a token. Empty text counts as a token, because a token may end in the middle of a
    /// character. An event that only announces the role or the finish reason has no token.
    fn has_token(&self) -> bool {
        let delta = self.delta.as_ref();
        let has_calls = delta
            .and_then(|delta| delta.tool_calls.as_ref())
            .is_some_and(|c| !c.is_empty());
        let texts = [
            &self.text,
            delta.map_or(&None, |delta| &delta.content),
            delta.map_or(&None, |delta| &delta.reasoning_content),
            delta.map_or(&None, |delta| &delta.reasoning),
        ];
        let mut texts = texts.into_iter().flatten();
        match texts.next() {
            _ if has_calls => true,
            None => false,
            Some(first) if !first.is_empty() || texts.any(|text| !text.is_empty()) => true,
            Some(_) => {
                self.finish_reason.is_none() && delta.is_none_or(|delta| delta.role.is_none())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_may_be_cut_anywhere() {
        let stream = ": hello\r\ndata: {\"a\": \"🦜\"}\r\n\r\nevent: x\ndata:[DONE]\n\n".as_bytes();
        for step in 1..=stream.len() {
            let mut reader = EventReader::default();
            let mut payloads = Vec::new();
            for bytes in stream.chunks(step) {
                let handle = |payload: &str| {
                    payloads.push(payload.to_owned());
                    Ok(())
                };
                reader.push(bytes, handle).unwrap();
            }
            assert_eq!(payloads, ["{\"a\": \"🦜\"}", "[DONE]"]);
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut reader = EventReader::default();
        let result = (0..64).try_for_each(|_| reader.push(&[b'x'; 100_000], |_| Ok(())));
        assert!(result.is_err());
    }

    #[test]
    fn what_counts_as_a_token() {
        for (payload, expected) in [
            (
                r#"{"choices":[{"text":" a","finish_reason":null}]}"#,
                Event::Token,
            ),
            (
                r#"{"choices":[{"text":"","finish_reason":null}]}"#,
                Event::Token,
            ),
            (
                r#"{"choices":[{"text":"","finish_reason":"stop"}]}"#,
                Event::Other,
            ),
            (
                r#"{"choices":[{"text":"end","finish_reason":"stop"}]}"#,
                Event::Token,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
                Event::Other,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant"}}]}"#,
                Event::Other,
            ),
            (
                r#"{"choices":[{"delta":{"role":"assistant","content":"Hi"}}]}"#,
                Event::Token,
            ),
            (r#"{"choices":[{"delta":{"content":"Hi"}}]}"#, Event::Token),
            (r#"{"choices":[{"delta":{"content":""}}]}"#, Event::Token),
            (
                r#"{"choices":[{"delta":{"content":null,"reasoning_content":"Hm"}}]}"#,
                Event::Token,
            ),
            (
                r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
                Event::Token,
            ),
            (
                r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#,
                Event::Other,
            ),
            (
                r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}"#,
                Event::Other,
            ),
            ("[DONE]", Event::Done),
        ] {
            assert_eq!(Event::parse(payload).unwrap().0, expected, "{payload}");
        }
    }

    #[test]
    fn usage_and_errors() {
        let (_, usage) = Event::parse(
            r#"{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"x":{}}}"#,
        )
        .unwrap();
        assert_eq!(
            usage,
            Some(Usage {
                prompt_tokens: 3,
                completion_tokens: 2
            })
        );
        let error = Event::parse(r#"{"error":{"message":"no pages","type":"x"}}"#).unwrap_err();
        assert!(error.ends_with("no pages"), "{error}");
        assert!(Event::parse("{").is_err());
    }
}
