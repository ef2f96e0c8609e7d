//! The forms of tools that a chat template reads. Clients leave out members that a tool does not need, but some
//! templates fail without them. A test shows which: it renders a tool without the member, and looks for the tool's name
//! in the prompt.

use serde_json::{Value, json};

use crate::chat_template::template_support::ToolSupport;
use crate::chat_template::{ChatInput, ChatTemplate};

/// The tool's name, which is searched for in the prompt.
const NAME: &str = "probe_tool";

impl ChatTemplate {
    /// The forms of tools that the template reads.
    pub fn tool_support(&self) -> ToolSupport {
        *self.tool_support.get_or_init(|| ToolSupport::of(self))
    }
}

impl ToolSupport {
    /// A template that does not print even the complete tool counts as one that reads all forms.
    pub fn of(template: &ChatTemplate) -> Self {
        let is_taken = |remove: &dyn Fn(&mut Value)| {
            let mut function = json!({
                "name": NAME,
                "description": "A probe.",
                "parameters": {
                    "type": "object",
                    "properties": {"probe": {"type": "string", "description": "A probe."}},
                    "required": [],
                },
            });
            remove(&mut function);
            shows(template, function)
        };
        let shows_none = !is_taken(&|_| {});
        let without = |parent: &'static str, member: &'static str| {
            shows_none
                || is_taken(&|function| {
                    if let Some(Value::Object(parent)) = function.pointer_mut(parent) {
                        parent.remove(member);
                    }
                })
        };
        Self {
            without_description: without("", "description"),
            without_parameters: without("", "parameters"),
            without_properties: without("/parameters", "properties"),
            without_required: without("/parameters", "required"),
            without_parameter_description: without("/parameters/properties/probe", "description"),
        }
    }
}

fn shows(template: &ChatTemplate, function: Value) -> bool {
    let rendered = template.render(ChatInput {
        messages: &[json!({"role": "user", "content": "probe"})],
        tools: Some(&json!([{"type": "function", "function": function}])),
        add_generation_prompt: true,
        ..ChatInput::default()
    });
    rendered.is_ok_and(|prompt| prompt.contains(NAME))
}
