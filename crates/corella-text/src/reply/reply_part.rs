//! The parts of a reply: reasoning, text and calls.

/// The next part of a reply, as soon as it is known. Joined together, the parts give the whole reasoning, the whole text
/// and the whole arguments of each call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyPart {
    /// The model's reasoning before it answers, without the markup around it.
    Reasoning(String),
    /// The text for the user.
    Text(String),
    /// The beginning of a tool call. Calls count from 0 within a reply, and the name is complete.
    CallStart { call: usize, name: String },
    /// More of a call's arguments, which are JSON.
    CallArguments { call: usize, json: String },
}

impl ReplyPart {
    /// Appends this part to earlier ones, joined with the last one if that is of the same kind and call.
    pub fn append_to(self, parts: &mut Vec<Self>) {
        match (parts.last_mut(), &self) {
            (Some(Self::Reasoning(last)), Self::Reasoning(text))
            | (Some(Self::Text(last)), Self::Text(text)) => last.push_str(text),
            (
                Some(Self::CallArguments { call: of, json }),
                Self::CallArguments { call, json: more },
            ) if of == call => json.push_str(more),
            _ => parts.push(self),
        }
    }
}
