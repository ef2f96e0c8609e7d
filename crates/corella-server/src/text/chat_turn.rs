//! Fits turns, thoughts and ids of calls to a chat template. Some templates require alternating turns, but coding
//! agents send consecutive user messages, and text after a tool's result.

use corella_text::{ChatTemplate, ThoughtSupport};
use serde_json::Value;

use crate::text::chat_role::{append, append_to, content_of};

/// Joins consecutive user messages, joins text after a tool's result to the result, renames thoughts and shortens ids
/// of calls. Each change is made only if the template needs it.
pub fn fit_turns(messages: Vec<Value>, template: &ChatTemplate) -> Vec<Value> {
    let support = template.turn_support();
    let mut fitted: Vec<Value> = Vec::with_capacity(messages.len());
    for mut message in messages {
        if let ThoughtSupport::Thinking { beside_text } = support.thoughts {
            rename_thoughts(&mut message, beside_text);
        }
        if !support.takes_long_call_ids {
            shorten_ids(&mut message);
        }
        let joins = |last: &&mut Value| match last["role"].as_str() {
            Some("user") => !support.takes_users_together,
            Some("tool") => !support.takes_user_behind_result,
            _ => false,
        };
        match fitted.last_mut().filter(joins) {
            Some(last) if message["role"] == "user" => append(last, content_of(&message)),
            _ => fitted.push(message),
        }
    }
    fitted
}

/// Copies `reasoning_content` to `thinking`. Text beside calls joins the thoughts if the template takes only one of the
/// two.
fn rename_thoughts(message: &mut Value, beside_text: bool) {
    let Value::Object(fields) = message else {
        return;
    };
    let thoughts = match fields.get("reasoning_content") {
        Some(Value::String(thoughts)) if !thoughts.is_empty() => thoughts.clone(),
        _ => return,
    };
    fields.entry("thinking").or_insert_with(|| thoughts.into());
    let has_calls = fields.contains_key("tool_calls");
    let text = content_of(message).to_owned();
    if has_calls && !text.is_empty() && !beside_text {
        append_to(&mut message["thinking"], &text);
        message["content"] = "".into();
    }
}

/// Ids of other servers become nine letters and digits, the same for a call and its result.
fn shorten_ids(message: &mut Value) {
    let shorten = |member: &mut Value| {
        let is_short =
            |id: &str| id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if let Some(id) = member.as_str().filter(|id| !is_short(id)) {
            *member = short_id(id).into();
        }
    };
    if let Some(id) = message.get_mut("tool_call_id") {
        shorten(id);
    }
    if let Some(Value::Array(calls)) = message.get_mut("tool_calls") {
        calls
            .iter_mut()
            .filter_map(|call| call.get_mut("id"))
            .for_each(shorten);
    }
}

/// A digest of 36 bits, by FNV-1a: enough for the few calls of a conversation, and the same in every request.
fn short_id(id: &str) -> String {
    const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let digest = id.bytes().fold(OFFSET, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(PRIME)
    });
    format!("{:09x}", digest >> 28)
}

#[cfg(test)]
mod tests {
    use corella_text::SpecialTokens;
    use serde_json::json;

    use super::*;

    /// Like Mistral's template: alternating turns, with any calls and results between them.
    const STRICT: &str = "{% set ns = namespace(turns=0) %}{% for m in messages %}\
                          {% if m.role != 'tool' and m.tool_calls is not defined %}\
                          {% if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}\
                          {% set ns.turns = ns.turns + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    const LENIENT: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}";
    /// Like gpt-oss's template: calls beside thoughts or text, but not both.
    const THINKING: &str = "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}\
                            {{ raise_exception('both') }}{% endif %}[{{ m.role }}]{{ m.thinking }}{{ m.content }}{% endfor %}";

    fn fitted(source: &str, messages: &[Value]) -> Vec<Value> {
        let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
        fit_turns(messages.to_vec(), &template)
    }

    fn user(content: &str) -> Value {
        json!({"role": "user", "content": content})
    }

    fn result(content: &str) -> Value {
        json!({"role": "tool", "content": content, "tool_call_id": "123456789"})
    }

    fn call(members: Value) -> Value {
        let function = json!({"name": "read", "arguments": {}});
        let mut turn = json!({
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "123456789", "type": "function", "function": function}],
        });
        for (name, value) in members.as_object().unwrap() {
            turn[name] = value.clone();
        }
        turn
    }

    #[test]
    fn turns_alternate_where_they_have_to() {
        let messages = [
            user("a"),
            user("b"),
            call(json!({})),
            result("c"),
            user("d"),
            user("e"),
        ];
        let expected = [user("a\n\nb"), call(json!({})), result("c\n\nd\n\ne")];
        assert_eq!(fitted(STRICT, &messages), expected);
        assert_eq!(fitted(LENIENT, &messages), messages);
    }

    #[test]
    fn ids_have_nine_characters_where_they_have_to() {
        let strict = "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}\
                      {{ raise_exception('nine') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";
        let mut messages = [user("a"), call(json!({})), result("b")];
        assert_eq!(fitted(strict, &messages), messages);
        messages[1]["tool_calls"][0]["id"] = "toolu_01A09q90qw90lq917835lq9".into();
        messages[2]["tool_call_id"] = "toolu_01A09q90qw90lq917835lq9".into();
        assert_eq!(fitted(LENIENT, &messages), messages);
        let found = fitted(strict, &messages);
        let id = found[2]["tool_call_id"].as_str().unwrap();
        assert_eq!(id.len(), 9);
        assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        assert_eq!(found[1]["tool_calls"][0]["id"], id);
    }

    #[test]
    fn thoughts_have_the_name_that_the_template_reads() {
        let thought = json!({"reasoning_content": "hm"});
        let both = json!({"reasoning_content": "hm", "content": "I look."});
        let messages = [
            user("a"),
            call(thought),
            result("b"),
            call(both),
            result("c"),
        ];
        let found = fitted(THINKING, &messages);
        assert_eq!(found[1]["thinking"], "hm");
        assert_eq!(found[1]["content"], "");
        assert_eq!(found[3]["thinking"], "hm\n\nI look.");
        assert_eq!(found[3]["content"], "");
        assert_eq!(fitted(LENIENT, &messages), messages);
    }
}
