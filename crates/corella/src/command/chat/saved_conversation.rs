//! A conversation in a file, as an API request, so that other programs can continue it.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::input::option_file;

#[derive(Debug, Default, PartialEq)]
pub struct SavedConversation {
    pub system: Option<String>,
    /// Messages and their answers.
    pub turns: Vec<(String, String)>,
    /// The other fields of the request.
    pub fields: Map<String, Value>,
}

impl SavedConversation {
    /// Writes a file that only its user can read. A file without a conversation stays unchanged.
    pub fn save(&self, path: &str) -> Result<(), String> {
        let failed = |error: io::Error| format!("/save {path}: {error}");
        let file = expanded(path);
        if file.exists() && read(&file).is_err() {
            return Err(format!(
                "/save {path}: the file is there and holds no conversation; give another name"
            ));
        }
        let text = format!("{:#}\n", self.to_json());
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let mut file = options.open(file).map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)
    }

    pub fn load(path: &str) -> Result<Self, String> {
        read(&expanded(path)).map_err(|reason| {
            format!(
                "/load {path}: {reason}; it reads what /save wrote, and `corella run` loads a model"
            )
        })
    }

    /// Returns the fields of a request, with the conversation as its `messages`.
    pub fn to_json(&self) -> Value {
        let as_message = |role: &str, content: &str| json!({"role": role, "content": content});
        let mut messages = Vec::new();
        messages.extend(
            self.system
                .iter()
                .map(|system| as_message("system", system)),
        );
        for (message, answer) in &self.turns {
            messages.push(as_message("user", message));
            messages.push(as_message("assistant", answer));
        }
        let mut body = self.fields.clone();
        body.insert("messages".to_owned(), Value::Array(messages));
        Value::Object(body)
    }

    fn from_json(body: Value) -> Result<Self, String> {
        let Value::Object(mut fields) = body else {
            return Err("a conversation is a JSON object".to_owned());
        };
        let Some(Value::Array(messages)) = fields.remove("messages") else {
            return Err("a conversation has a list `messages`".to_owned());
        };
        let mut read = Self {
            fields,
            ..Self::default()
        };
        let mut question: Option<String> = None;
        for (index, message) in messages.iter().enumerate() {
            let Some(content) = message["content"].as_str() else {
                return Err(format!("messages[{index}].content must be a text"));
            };
            let content = content.to_owned();
            match (message["role"].as_str(), question.take()) {
                (Some("system"), None) if index == 0 => read.system = Some(content),
                (Some("user"), None) => question = Some(content),
                (Some("assistant"), Some(question)) => read.turns.push((question, content)),
                _ => {
                    return Err(format!(
                        "messages[{index}].role is out of turn: user and assistant alternate, behind a \
                         system message if there is one"
                    ));
                }
            }
        }
        match question {
            Some(_) => {
                Err("the last of `messages` must be an answer, of the role assistant".to_owned())
            }
            None => Ok(read),
        }
    }
}

fn read(path: &Path) -> Result<SavedConversation, String> {
    let text = option_file::read_text(path).map_err(|error| error.to_string())?;
    let body =
        serde_json::from_str(&text).map_err(|error| format!("the file is not JSON: {error}"))?;
    SavedConversation::from_json(body)
}

/// Replaces a leading `~/` by the home folder.
fn expanded(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::var_os("HOME")) {
        (Some(rest), Some(home)) => PathBuf::from(home).join(rest),
        _ => PathBuf::from(path),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("corella-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn turn(message: &str, answer: &str) -> (String, String) {
        (message.to_owned(), answer.to_owned())
    }

    #[test]
    fn a_conversation_comes_back_from_its_file() {
        let folder = folder("saved-conversation");
        let path = folder.join("fox.json");
        let path = path.to_str().unwrap();
        let mut fields = Map::new();
        fields.insert("seed".to_owned(), json!(7));
        let mut saved = SavedConversation {
            system: Some("Be brief.".to_owned()),
            turns: vec![turn("A fox?\n\"Yes\"", "Once…")],
            fields,
        };
        for _ in 0..2 {
            saved.save(path).unwrap();
            assert_eq!(SavedConversation::load(path).unwrap(), saved);
            saved.turns.push(turn("And then?", ""));
        }
        assert_eq!(
            fs::metadata(path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_models_name_is_not_loaded() {
        let error = SavedConversation::load("llama3.2").unwrap_err();
        assert!(
            error.contains("No such file") && error.contains("`corella run`"),
            "{error}"
        );
    }

    #[test]
    fn other_files_are_neither_read_nor_overwritten() {
        let folder = folder("no-conversation");
        let path = folder.join("notes");
        let shown = path.to_str().unwrap();
        for (text, reason) in [
            ("notes", "not JSON"),
            ("[]", "a JSON object"),
            ("{}", "a list `messages`"),
            (
                r#"{"messages": [{"role": "user", "content": []}]}"#,
                "messages[0].content",
            ),
            (
                r#"{"messages": [{"role": "user", "content": "a"}]}"#,
                "must be an answer",
            ),
            (
                r#"{"messages": [{"role": "assistant", "content": "a"}]}"#,
                "messages[0].role is out of turn",
            ),
        ] {
            fs::write(&path, text).unwrap();
            let error = SavedConversation::load(shown).unwrap_err();
            assert!(
                error.contains(reason) && error.starts_with("/load "),
                "{error}"
            );
            let error = SavedConversation::default().save(shown).unwrap_err();
            assert!(error.contains("give another name"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let missing = SavedConversation::load("/nowhere/at/all").unwrap_err();
        assert!(missing.starts_with("/load /nowhere/at/all: "), "{missing}");
        fs::remove_dir_all(folder).unwrap();
    }
}
