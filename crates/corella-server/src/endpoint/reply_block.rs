//! A reply as a list of blocks, the form of Anthropic's messages and OpenAI's responses.

use corella_text::ReplyPart;

/// Consecutive parts of the same kind, or of the same call, joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyBlock {
    Reasoning(String),
    Text(String),
    /// A tool call, with its arguments as JSON.
    Call {
        name: String,
        arguments: String,
    },
}

impl ReplyBlock {
    /// The block that begins with `part`, without the part's text.
    pub fn begun_by(part: &ReplyPart) -> Self {
        match part {
            ReplyPart::Reasoning(_) => Self::Reasoning(String::new()),
            ReplyPart::Text(_) => Self::Text(String::new()),
            ReplyPart::CallStart { name, .. } => Self::Call {
                name: name.clone(),
                arguments: String::new(),
            },
            // Arguments follow the start of their call, so they begin no block.
            ReplyPart::CallArguments { .. } => Self::Call {
                name: String::new(),
                arguments: String::new(),
            },
        }
    }

    /// Returns whether `part` continues this block. Otherwise it begins the next one.
    pub fn is_continued_by(&self, part: &ReplyPart) -> bool {
        matches!(
            (self, part),
            (Self::Reasoning(_), ReplyPart::Reasoning(_))
                | (Self::Text(_), ReplyPart::Text(_))
                | (Self::Call { .. }, ReplyPart::CallArguments { .. })
        )
    }

    pub fn push(blocks: &mut Vec<Self>, part: &ReplyPart) {
        if !blocks.last().is_some_and(|last| last.is_continued_by(part)) {
            blocks.push(Self::begun_by(part));
        }
        match (blocks.last_mut(), part) {
            (Some(Self::Reasoning(all)), ReplyPart::Reasoning(more))
            | (Some(Self::Text(all)), ReplyPart::Text(more))
            | (
                Some(Self::Call { arguments: all, .. }),
                ReplyPart::CallArguments { json: more, .. },
            ) => all.push_str(more),
            // A call's start has no text of its own.
            _ => {}
        }
    }

    pub fn all(parts: &[ReplyPart]) -> Vec<Self> {
        let mut blocks = Vec::new();
        for part in parts {
            Self::push(&mut blocks, part);
        }
        blocks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_kind_and_call_are_one_block() {
        let text = |text: &str| ReplyPart::Text(text.into());
        let start = |call, name: &str| ReplyPart::CallStart {
            call,
            name: name.into(),
        };
        let arguments = |call, json: &str| ReplyPart::CallArguments {
            call,
            json: json.into(),
        };
        let parts = [
            ReplyPart::Reasoning("h".into()),
            ReplyPart::Reasoning("m".into()),
            text("a"),
            text("b"),
            start(0, "f"),
            arguments(0, "{"),
            arguments(0, "}"),
            start(1, "f"),
            text("c"),
        ];
        let call = |arguments: &str| ReplyBlock::Call {
            name: "f".into(),
            arguments: arguments.into(),
        };
        let expected = [
            ReplyBlock::Reasoning("hm".into()),
            ReplyBlock::Text("ab".into()),
            call("{}"),
            call(""),
            ReplyBlock::Text("c".into()),
        ];
        assert_eq!(ReplyBlock::all(&parts), expected);
    }
}
