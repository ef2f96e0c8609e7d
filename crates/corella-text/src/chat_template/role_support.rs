//! The roles that a chat template supports, and their places. Templates reject unknown roles or drop them silently, so
//! short conversations with marks are rendered as a test.

use serde_json::{Value, json};

use crate::chat_template::template_support::RoleSupport;
use crate::chat_template::{ChatInput, ChatTemplate};

impl ChatTemplate {
    /// The roles that the template accepts.
    pub fn role_support(&self) -> RoleSupport {
        *self.role_support.get_or_init(|| RoleSupport::of(self))
    }

    /// Whether the template writes messages of this role, at the beginning or after the first turn.
    pub fn takes_role(&self, role: &str) -> bool {
        let shows = |roles: &[&str]| shows_all(self, roles);
        shows(&[role, "user"])
            || shows(&["user", "assistant", role, "user"])
            || shows(&["user", "assistant", role])
    }
}

impl RoleSupport {
    pub fn of(template: &ChatTemplate) -> Self {
        let shows = |roles: &[&str]| shows_all(template, roles);
        let takes_any_role = template.takes_role("proberole");
        // If a template prints any role name, the model need not know the name `developer`.
        let is_known = !takes_any_role || template.sources().contains("developer");
        let writes_calls = shows_calls(template, 1);
        Self {
            takes_developer: is_known && shows(&["developer", "user"]),
            takes_second_system: shows(&["system", "system", "user"]),
            takes_late_system: shows(&["user", "assistant", "system", "user"]),
            takes_any_role,
            takes_calls_together: shows_calls(template, 2) || !writes_calls,
            takes_calls_as_metadata: !writes_calls && shows_metadata(template),
        }
    }
}

/// Whether a message with `num_calls` calls is rendered, with the name of each.
fn shows_calls(template: &ChatTemplate, num_calls: usize) -> bool {
    let name = |index: usize| format!("probe{index}call");
    let arguments = match template.needs_text_arguments() {
        true => json!("{}"),
        false => json!({}),
    };
    let call = |index: usize| {
        json!({
            // Some templates accept only ids of nine letters and digits.
            "id": format!("probe000{index}"), "type": "function",
            "function": {"name": name(index), "arguments": arguments},
        })
    };
    let calls: Vec<Value> = (0..num_calls).map(call).collect();
    let messages = [
        json!({"role": "user", "content": "probe"}),
        json!({"role": "assistant", "content": "", "tool_calls": calls}),
    ];
    let rendered = template.render(ChatInput {
        messages: &messages,
        ..ChatInput::default()
    });
    rendered.is_ok_and(|prompt| (0..num_calls).all(|index| prompt.contains(&name(index))))
}

/// Whether a call is rendered whose name is the `metadata` of its message.
fn shows_metadata(template: &ChatTemplate) -> bool {
    let marks = ["probename", "probecall", "proberesult"];
    let messages = [
        json!({"role": "user", "content": "probe"}),
        json!({"role": "assistant", "metadata": marks[0], "content": marks[1]}),
        json!({"role": "observation", "content": marks[2]}),
    ];
    let rendered = template.render(ChatInput {
        messages: &messages,
        ..ChatInput::default()
    });
    rendered.is_ok_and(|prompt| marks.iter().all(|mark| prompt.contains(mark)))
}

/// Whether a conversation of these roles is rendered, with the content of each message in its place.
fn shows_all(template: &ChatTemplate, roles: &[&str]) -> bool {
    let mark = |index: usize| format!("probe{index}mark");
    let messages: Vec<Value> = roles
        .iter()
        .enumerate()
        .map(|(index, role)| json!({"role": role, "content": mark(index)}))
        .collect();
    let rendered = template.render(ChatInput {
        messages: &messages,
        add_generation_prompt: true,
        ..ChatInput::default()
    });
    rendered.is_ok_and(|prompt| (0..roles.len()).all(|index| prompt.contains(&mark(index))))
}
