//! Fits the roles of a conversation to a chat template. Clients are written for models that take every role anywhere;
//! another model's template refuses some roles, or drops their messages silently.

use corella_text::{ChatTemplate, RoleSupport};
use serde_json::{Map, Value};

use crate::wire::api_error::ApiError;

/// Separates the parts of a merged message.
const SEPARATOR: &str = "\n\n";

/// Fits the messages that the template does not take as they are: `developer` messages become `system` ones, system
/// prompts at the beginning are joined, and a later system prompt moves into the user's next or previous text. A role
/// that the template leaves out is an error.
pub fn fit_roles(messages: Vec<Value>, template: &ChatTemplate) -> Result<Vec<Value>, ApiError> {
    let support = template.role_support();
    let mut fitted: Vec<Value> = Vec::with_capacity(messages.len());
    // Texts of system messages that wait for the user's next message.
    let mut waiting: Vec<String> = Vec::new();
    for (index, mut message) in messages.into_iter().enumerate() {
        if message["role"] == "developer" && !support.takes_developer {
            message["role"] = "system".into();
        }
        check_role(index, &message, template, support)?;
        match message["role"].as_str() {
            Some("system") if fitted.is_empty() => fitted.push(message),
            Some("system") if fitted.iter().all(|earlier| earlier["role"] == "system") => {
                match support.takes_second_system {
                    true => fitted.push(message),
                    false => append(&mut fitted[0], content_of(&message)),
                }
            }
            Some("system") if !support.takes_late_system => {
                waiting.push(content_of(&message).to_owned());
            }
            Some("user") => {
                if !waiting.is_empty() {
                    waiting.push(content_of(&message).to_owned());
                    message["content"] = waiting.join(SEPARATOR).into();
                    waiting.clear();
                }
                fitted.push(message);
            }
            _ => {
                flush(&mut fitted, &mut waiting);
                fitted.push(message);
            }
        }
    }
    flush(&mut fitted, &mut waiting);
    Ok(fitted)
}

/// Appends the waiting texts to a preceding message of the user, or adds a message with them.
fn flush(fitted: &mut Vec<Value>, waiting: &mut Vec<String>) {
    if waiting.is_empty() {
        return;
    }
    let text = waiting.join(SEPARATOR);
    waiting.clear();
    match fitted.last_mut().filter(|last| last["role"] == "user") {
        Some(last) => append(last, &text),
        None => fitted.push(Value::Object(Map::from_iter([
            ("role".to_owned(), "user".into()),
            ("content".to_owned(), text.into()),
        ]))),
    }
}

/// Roles that are passed to every template. A template that does not take one of these roles raises its own error.
const USUAL: [&str; 4] = ["system", "user", "assistant", "tool"];

fn check_role(
    index: usize,
    message: &Value,
    template: &ChatTemplate,
    support: RoleSupport,
) -> Result<(), ApiError> {
    let role = message["role"].as_str().unwrap_or_default();
    let is_taken = USUAL.contains(&role)
        || role == "developer" && support.takes_developer
        || support.takes_any_role
        || template.takes_role(role);
    match is_taken {
        true => Ok(()),
        false => Err(ApiError::invalid(
            format!("messages[{index}].role"),
            "is a role whose messages this model's chat template leaves out",
        )),
    }
}

pub fn content_of(message: &Value) -> &str {
    message["content"].as_str().unwrap_or_default()
}

pub fn append(message: &mut Value, text: &str) {
    append_to(&mut message["content"], text);
}

pub fn append_to(member: &mut Value, text: &str) {
    let before = member.as_str().unwrap_or_default();
    *member = format!("{before}{SEPARATOR}{text}").into();
}

#[cfg(test)]
mod tests {
    use corella_text::SpecialTokens;
    use serde_json::json;

    use super::*;

    /// Like Mistral's template: a system prompt at the beginning, and then alternating turns.
    const STRICT: &str = "{% if messages[0].role == 'system' %}[S]{{ messages[0].content }}{% set rest = messages[1:] %}\
                          {% else %}{% set rest = messages %}{% endif %}{% for m in rest %}\
                          {% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role not in ['user', 'assistant'] %}\
                          {{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    /// Like Qwen's template: a role of any name.
    const LENIENT: &str = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    /// Drops messages of unknown roles.
    const SILENT: &str = "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}\
                          [{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}";

    fn fitted(source: &str, roles: &[(&str, &str)]) -> Result<Vec<(String, String)>, String> {
        let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
        let message = |(role, content): &(&str, &str)| json!({"role": role, "content": content});
        let messages = roles.iter().map(message).collect();
        let fitted = fit_roles(messages, &template).map_err(|error| error.to_json())?;
        let text = |message: &Value, name: &str| message[name].as_str().unwrap().to_owned();
        Ok(fitted
            .iter()
            .map(|message| (text(message, "role"), text(message, "content")))
            .collect())
    }

    fn owned(roles: &[(&str, &str)]) -> Vec<(String, String)> {
        roles
            .iter()
            .map(|(role, content)| ((*role).to_owned(), (*content).to_owned()))
            .collect()
    }

    #[test]
    fn a_strict_template_gets_one_system_prompt_and_turns_that_alternate() {
        let found = fitted(
            STRICT,
            &[
                ("developer", "a"),
                ("system", "b"),
                ("user", "c"),
                ("assistant", "d"),
                ("system", "e"),
                ("user", "f"),
                ("system", "g"),
                ("assistant", "h"),
                ("system", "i"),
            ],
        );
        let expected = [
            ("system", "a\n\nb"),
            ("user", "c"),
            ("assistant", "d"),
            ("user", "e\n\nf\n\ng"),
            ("assistant", "h"),
            ("user", "i"),
        ];
        assert_eq!(found.unwrap(), owned(&expected));
    }

    #[test]
    fn a_template_that_takes_everything_gets_it_unchanged() {
        let roles = [
            ("developer", "a"),
            ("system", "b"),
            ("user", "c"),
            ("system", "d"),
            ("critic", "e"),
        ];
        let mut expected = owned(&roles);
        // The template would print any name, so its model need not know `developer`.
        expected[0].0 = "system".to_owned();
        assert_eq!(fitted(LENIENT, &roles).unwrap(), expected);
        let named = format!("{LENIENT}{{% if messages[0].role == 'developer' %}}{{% endif %}}");
        assert_eq!(fitted(&named, &roles).unwrap(), owned(&roles));
    }

    #[test]
    fn what_a_template_would_drop_becomes_the_system_prompt_or_an_error() {
        let found = fitted(SILENT, &[("developer", "a"), ("user", "b")]);
        assert_eq!(found.unwrap(), owned(&[("system", "a"), ("user", "b")]));
        let error = fitted(SILENT, &[("user", "a"), ("critic", "b")]).unwrap_err();
        assert!(error.contains("messages[1].role"), "{error}");
    }
}
