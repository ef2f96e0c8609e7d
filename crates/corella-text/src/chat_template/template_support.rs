//! The conversations and tools that a chat template accepts.

/// The roles that a template accepts, besides the system prompt, the user and the assistant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleSupport {
    /// `developer`, OpenAI's newer name for the system prompt.
    pub takes_developer: bool,
    /// Two system prompts at the beginning.
    pub takes_second_system: bool,
    /// A system message after the first turn.
    pub takes_late_system: bool,
    /// Roles of any name.
    pub takes_any_role: bool,
    /// Several calls in one message of the assistant. Also true if the template writes no calls at all.
    pub takes_calls_together: bool,
    /// A call as the text of a message of the assistant whose `metadata` is the tool's name, with its result as an
    /// `observation`. Such a template, like GLM-4's, writes no calls in another form.
    pub takes_calls_as_metadata: bool,
}

/// The members of a tool that may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToolSupport {
    /// `description`
    pub without_description: bool,
    /// `parameters`
    pub without_parameters: bool,
    /// `parameters.properties`
    pub without_properties: bool,
    /// `parameters.required`
    pub without_required: bool,
    /// `description` of a parameter
    pub without_parameter_description: bool,
}

/// The turns of clients that a template accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TurnSupport {
    /// Two messages of the user, one after the other.
    pub takes_users_together: bool,
    /// A message of the user after a tool's result. Also true if the template writes no results of tools.
    pub takes_user_behind_result: bool,
    /// Ids of calls that are not nine letters and digits. Also true if the template writes no results of tools.
    pub takes_long_call_ids: bool,
    pub thoughts: ThoughtSupport,
}

/// The form of thoughts after a call in a template.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThoughtSupport {
    /// `reasoning_content`, or no thoughts.
    Usual,
    /// `thinking`, as in gpt-oss.
    Thinking {
        /// Whether a message with calls may have text, too.
        beside_text: bool,
    },
}
