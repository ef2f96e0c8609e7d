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
