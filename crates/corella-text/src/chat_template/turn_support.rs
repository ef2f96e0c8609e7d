//! The sequences of turns that a chat template accepts, and its handling of thoughts. Short conversations with marks
//! are rendered as a test.

use serde_json::{Value, json};

use crate::chat_template::template_support::{ThoughtSupport, TurnSupport};
use crate::chat_template::{ChatInput, ChatTemplate};

impl ChatTemplate {
    /// The turns that the template accepts in sequence, and its handling of thoughts.
    pub fn turn_support(&self) -> TurnSupport {
        *self.turn_support.get_or_init(|| TurnSupport::of(self))
    }
}

impl TurnSupport {
    pub fn of(template: &ChatTemplate) -> Self {
        let [user, late_user] =
            ["probe0mark", "probe3mark"].map(|text| json!({"role": "user", "content": text}));
        let shows = |messages: &[Value], marks: &[&str]| shows(template, messages, marks);
        let turn = |members: Value| {
            let mut turn = call(template);
            for (name, value) in members.as_object().into_iter().flatten() {
                turn[name] = value.clone();
            }
            turn
        };
        let result = json!({"role": "tool", "tool_call_id": CALL_ID, "content": "probe2mark"});
        let round = |turn: Value| [user.clone(), turn, result.clone()];
        let mut long = round(call(template));
        long[1]["tool_calls"][0]["id"] = LONG_CALL_ID.into();
        long[2]["tool_call_id"] = LONG_CALL_ID.into();
        let takes_result = shows(&round(call(template)), &["probe2mark"]);
        let behind_result = [
            round(call(template)).as_slice(),
            std::slice::from_ref(&late_user),
        ]
        .concat();
        let reads = |members: Value, marks: &[&str]| shows(&round(turn(members)), marks);
        let thoughts = if reads(json!({"reasoning_content": "probe4mark"}), &["probe4mark"])
            || !reads(json!({"thinking": "probe4mark"}), &["probe4mark"])
        {
            ThoughtSupport::Usual
        } else {
            let both = json!({"thinking": "probe4mark", "content": "probe5mark"});
            ThoughtSupport::Thinking {
                beside_text: reads(both, &["probe4mark", "probe5mark"]),
            }
        };
        Self {
            takes_users_together: shows(&[user.clone(), late_user], &["probe0mark", "probe3mark"]),
            takes_user_behind_result: !takes_result
                || shows(&behind_result, &["probe2mark", "probe3mark"]),
            takes_long_call_ids: !takes_result || shows(&long, &["probe2mark"]),
            thoughts,
        }
    }
}

/// Some templates accept only ids of nine letters and digits.
const CALL_ID: &str = "probe0000";
const LONG_CALL_ID: &str = "call_probe000000000";

fn call(template: &ChatTemplate) -> Value {
    let arguments = match template.needs_text_arguments() {
        true => json!("{}"),
        false => json!({}),
    };
    let function = json!({"name": "probe", "arguments": arguments});
    let call = json!({"id": CALL_ID, "type": "function", "function": function});
    json!({"role": "assistant", "content": "", "tool_calls": [call]})
}

fn shows(template: &ChatTemplate, messages: &[Value], marks: &[&str]) -> bool {
    let rendered = template.render(ChatInput {
        messages,
        add_generation_prompt: true,
        ..ChatInput::default()
    });
    rendered.is_ok_and(|prompt| marks.iter().all(|mark| prompt.contains(mark)))
}
