//! What a reply consists of, beyond its text.

/// The next part of a reply, as it becomes known. Joined together, the parts of one kind and one call
/// are what the whole reply says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyPart {
    /// What the model thinks before it answers, without the markup around it.
    Reasoning(String),
    /// What it says to the user.
    Text(String),
    /// A call of a tool begins. Calls count from 0 within a reply, and the name is complete.
    CallStart { call: usize, name: String },
    /// More of a call's arguments, which are JSON.
    CallArguments { call: usize, json: String },
}

impl ReplyPart {
    /// Appends this part to those before it, joined with the last one if that is of the same kind and
    /// call.
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
