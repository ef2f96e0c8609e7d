//! Fits tool calls to a chat template. Some templates, such as Llama 3.1's, take one call in a message, but models make
//! several at once, and clients send them back. GLM-4's template takes a call as a text with a name.

use corella_text::ChatTemplate;
use serde_json::{Value, json};

use crate::text::chat_role::content_of;

/// If the template takes only one call in a message, splits a message of several calls into messages of one call each.
/// Each of these messages is followed by the call's result. Calls become texts if the template takes them as such.
pub fn fit_calls(messages: Vec<Value>, template: &ChatTemplate) -> Vec<Value> {
    let support = template.role_support();
    if support.takes_calls_as_metadata {
        return split_calls(messages)
            .into_iter()
            .flat_map(with_metadata)
            .collect();
    }
    match support.takes_calls_together {
        true => messages,
        false => split_calls(messages),
    }
}

/// Splits a message of one call into a message with its text, if it has one, and a message with the call. A result
/// becomes an observation.
fn with_metadata(mut message: Value) -> Vec<Value> {
    if message["role"] == "tool" {
        message["role"] = "observation".into();
        return vec![message];
    }
    let Some(Value::Array(calls)) = message.get_mut("tool_calls").map(Value::take) else {
        return vec![message];
    };
    let calls = calls.into_iter().map(|mut call| {
        let arguments = match call["function"]["arguments"].take() {
            Value::String(text) => text,
            Value::Null => "{}".to_owned(),
            arguments => arguments.to_string(),
        };
        json!({"role": "assistant", "metadata": call["function"]["name"], "content": arguments})
    });
    let text = Some(message.clone()).filter(|message| !content_of(message).is_empty());
    text.into_iter().chain(calls).collect()
}

fn split_calls(messages: Vec<Value>) -> Vec<Value> {
    let mut fitted = Vec::with_capacity(messages.len());
    let mut messages = messages.into_iter().peekable();
    while let Some(mut message) = messages.next() {
        let calls = match message.get_mut("tool_calls") {
            Some(Value::Array(calls)) if calls.len() > 1 => std::mem::take(calls),
            _ => {
                fitted.push(message);
                continue;
            }
        };
        let mut results = Vec::new();
        while let Some(result) = messages.next_if(|next| next["role"] == "tool") {
            results.push(result);
        }
        for (index, call) in calls.into_iter().enumerate() {
            let mut turn = message.clone();
            if index > 0 {
                // The text and the thoughts came before the first call.
                turn["content"] = "".into();
                if let Some(turn) = turn.as_object_mut() {
                    turn.remove("reasoning_content");
                }
            }
            let id = call["id"].clone();
            turn["tool_calls"] = Value::from(vec![call]);
            fitted.push(turn);
            let is_its_own = |result: &Value| !id.is_null() && result["tool_call_id"] == id;
            // Results without ids come in the order of the calls.
            let place = results.iter().position(is_its_own).or_else(|| {
                results
                    .iter()
                    .position(|result| result.get("tool_call_id").is_none_or(Value::is_null))
            });
            fitted.extend(place.map(|place| results.remove(place)));
        }
        fitted.append(&mut results);
    }
    fitted
}

#[cfg(test)]
mod tests {
    use corella_text::{ChatInput, SpecialTokens};
    use serde_json::json;

    use super::*;

    const ONE: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}\
                       {% if m.tool_calls | length != 1 %}{{ raise_exception('one call at once') }}{% endif %}\
                       {{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}";

    fn call(id: &str) -> Value {
        json!({"id": id, "type": "function", "function": {"name": format!("tool_{id}"), "arguments": {}}})
    }

    fn result(id: Value, content: &str) -> Value {
        json!({"role": "tool", "tool_call_id": id, "content": content})
    }

    fn turn(content: &str, calls: Vec<Value>) -> Value {
        json!({"role": "assistant", "content": content, "tool_calls": calls})
    }

    #[test]
    fn calls_become_turns_of_their_own_with_their_results() {
        let template = ChatTemplate::new(ONE, SpecialTokens::default()).unwrap();
        let user = json!({"role": "user", "content": "hi"});
        let messages = vec![
            user.clone(),
            turn("I look.", vec![call("a"), call("b"), call("c")]),
            result(json!("b"), "2"),
            result(json!("a"), "1"),
            user.clone(),
        ];
        let expected = vec![
            user.clone(),
            turn("I look.", vec![call("a")]),
            result(json!("a"), "1"),
            turn("", vec![call("b")]),
            result(json!("b"), "2"),
            turn("", vec![call("c")]),
            user,
        ];
        assert_eq!(fit_calls(messages, &template), expected);
        let unnamed = vec![
            turn("", vec![call("a"), call("b")]),
            result(Value::Null, "1"),
            result(Value::Null, "2"),
        ];
        let expected = vec![
            turn("", vec![call("a")]),
            result(Value::Null, "1"),
            turn("", vec![call("b")]),
            result(Value::Null, "2"),
        ];
        assert_eq!(fit_calls(unnamed, &template), expected);
    }

    #[test]
    fn calls_become_texts_for_a_template_that_takes_these() {
        // Like GLM-4's template.
        let template = "{% for m in messages %}{% set meta = m.get('metadata', '') %}{% if m.role == 'assistant' %}\
                        <|assistant|>{{ meta }}\n{{ m.content.strip() }}{% elif m.role in ['user', 'observation'] %}\
                        <|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}";
        let template = ChatTemplate::new(template, SpecialTokens::default()).unwrap();
        let mut first = call("a");
        first["function"]["arguments"] = json!({"city": "Zürich", "days": 3});
        let messages = vec![
            json!({"role": "user", "content": "hi"}),
            turn("I look.", vec![first, call("b")]),
            result(json!("b"), "2"),
            result(json!("a"), "1"),
        ];
        let prompt = template.render(ChatInput {
            messages: &fit_calls(messages, &template),
            tools: None,
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: None,
        });
        assert_eq!(
            prompt.expect("it is rendered"),
            "<|user|>\nhi<|assistant|>\nI look.<|assistant|>tool_a\n{\"city\":\"Zürich\",\"days\":3}<|observation|>\n1\
             <|assistant|>tool_b\n{}<|observation|>\n2"
        );
    }

    #[test]
    fn a_template_that_takes_several_gets_them_together() {
        let several = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}\
                       {% endfor %}";
        let template = ChatTemplate::new(several, SpecialTokens::default()).unwrap();
        let messages = vec![turn("", vec![call("a"), call("b")])];
        assert_eq!(fit_calls(messages.clone(), &template), messages);
    }
}
