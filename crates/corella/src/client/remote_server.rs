//! A remote server with OpenAI's API, over HTTP or HTTPS.
//!
//! Every error is one line that names the server and the change to make.

mod connection;
mod remote_models;

use serde_json::Value;

use crate::client::event_stream::{ChunkedBody, EventStream};
use connection::Address;
pub use connection::RemoteResponse;
pub use remote_models::{RemoteModel, RemoteModels};

/// The server that the operator names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteOptions {
    pub url: String,
    pub api_key: Option<String>,
    /// `None` means the first model in the server's list.
    pub model: Option<String>,
}

pub struct RemoteServer {
    address: Address,
    /// The part of paths before `/models` and `/chat/completions`.
    base: String,
    has_key: bool,
    models: Vec<Listed>,
    /// The name of the answering model.
    model: String,
}

/// A model in the server's list.
#[derive(Debug, PartialEq)]
struct Listed {
    name: String,
    /// `None` if the server does not report it.
    max_model_len: Option<u32>,
}

const MAX_LIST_BYTES: usize = 16 << 20;
const MAX_ERROR_BYTES: usize = 64 << 10;
const MAX_ERROR_CHARS: usize = 500;
/// Limits the names in an error.
const MAX_NAMES: usize = 12;

impl RemoteServer {
    /// Finds the server and its models.
    pub async fn open(options: &RemoteOptions) -> Result<Self, String> {
        let address = Address::parse(&options.url, options.api_key.as_deref())?;
        let mut server = Self {
            base: String::new(),
            has_key: options.api_key.is_some(),
            models: Vec::new(),
            model: String::new(),
            address,
        };
        server.find_models().await?;
        let first = server.models.first().map(|model| model.name.clone());
        let model = options.model.clone().or(first);
        server.model = model.ok_or_else(|| {
            format!(
                "{} lists no model; name one with --model",
                server.address.shown()
            )
        })?;
        Ok(server)
    }

    /// Describes server and model in one line.
    pub fn summary(&self) -> String {
        let others = self.models.iter().filter(|other| other.name != self.model);
        let others = match others.count() {
            0 => String::new(),
            count => format!(" ({count} more there; --model names one)"),
        };
        format!("{} at {}{others}", self.model, self.address.shown())
    }

    pub fn max_model_len(&self) -> Option<u32> {
        let found = self.models.iter().find(|model| model.name == self.model);
        found.and_then(|model| model.max_model_len)
    }

    /// Opens the stream of an answer. Dropping it, or the future, aborts the request.
    pub async fn chat(&self, mut body: Value) -> Result<EventStream<RemoteResponse>, String> {
        body["model"] = self.model.as_str().into();
        let path = format!("{}/chat/completions", self.base);
        let response = self.address.post(&path, body.to_string()).await?;
        if response.status() == 200 {
            return Ok(EventStream::of(response));
        }
        Err(self.refusal(&path, response).await)
    }

    /// Finds the models and the path of the API. Most servers have the API below `/v1`, which the URL may include.
    async fn find_models(&mut self) -> Result<(), String> {
        let given = self.address.path().to_owned();
        let below = format!("{given}/v1");
        let bases = match given.ends_with("/v1") {
            true => vec![given],
            false => vec![below, given],
        };
        let mut reason = String::new();
        for base in bases {
            let path = format!("{base}/models");
            let mut response = self.address.get(&path).await?;
            let found = match response.status() {
                200 => parse_models(&read(&mut response, MAX_LIST_BYTES).await?),
                404 | 405 => None,
                _ => return Err(self.refusal(&path, response).await),
            };
            if let Some(models) = found {
                self.base = base;
                self.models = models;
                return Ok(());
            }
            if reason.is_empty() {
                reason = format!(
                    "{} has no list of models at {path}: --url must lead to a server of OpenAI's API, as \
                     http://127.0.0.1:8000 does",
                    self.address.shown()
                );
            }
        }
        Err(reason)
    }

    /// Returns why the server refused a request.
    async fn refusal(&self, path: &str, mut response: RemoteResponse) -> String {
        let status = response.status();
        let location = response.location();
        let body = read(&mut response, MAX_ERROR_BYTES)
            .await
            .unwrap_or_default();
        let shown = self.address.shown();
        let (message, code) = parse_error(&body);
        let told = told(&message);
        match status {
            300..=399 => format!(
                "{shown} answered {status} and leads elsewhere; give --url the address {}",
                location.unwrap_or_default()
            ),
            401 | 403 => key_refusal(shown, self.has_key, &message),
            404 if message.is_empty() => format!(
                "{shown} has no {path}: --url must lead to a server of OpenAI's API, as \
                 http://127.0.0.1:8000 does"
            ),
            400 | 404 if !self.lists(&self.model) && !self.models.is_empty() => format!(
                "{shown} refuses the model {}{told}; --model names one of {}",
                self.model,
                self.names()
            ),
            _ if code == "context_length_exceeded" => {
                format!("{message} /clear starts a new conversation.")
            }
            400 | 422 if !message.is_empty() => message,
            _ => format!("{shown} answered {status}{told}"),
        }
    }

    fn lists(&self, name: &str) -> bool {
        self.models.iter().any(|model| model.name == name)
    }

    fn names(&self) -> String {
        let names = self
            .models
            .iter()
            .take(MAX_NAMES)
            .map(|model| model.name.as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        match self.models.len() > MAX_NAMES {
            true => format!("{names}, …"),
            false => names,
        }
    }
}

/// Returns the models of a list, if the text is one.
fn parse_models(body: &[u8]) -> Option<Vec<Listed>> {
    let body: Value = serde_json::from_slice(body).ok()?;
    let models = body["data"].as_array()?.iter().filter_map(|model| {
        Some(Listed {
            name: model["id"].as_str()?.to_owned(),
            max_model_len: { model["max_model_len"].as_u64() }
                .and_then(|len| u32::try_from(len).ok()),
        })
    });
    Some(models.collect())
}

fn key_refusal(shown: &str, has_key: bool, message: &str) -> String {
    let told = told(message);
    match has_key {
        true => format!("{shown} does not accept the key of --api-key{told}"),
        false => format!("{shown} wants a key: give one with --api-key{told}"),
    }
}

/// Returns the server's message as the end of a sentence, which words of this program may follow.
fn told(message: &str) -> String {
    match message.is_empty() {
        true => String::new(),
        false => format!(": {}", message.trim_end_matches('.')),
    }
}

/// Returns message and code of an error, which servers write in several forms; the message is one
/// line.
fn parse_error(body: &[u8]) -> (String, String) {
    let json: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &json["error"];
    let known = [&error["message"], error, &json["message"], &json["detail"]];
    let message = known.iter().find_map(|message| message.as_str());
    let text = String::from_utf8_lossy(body);
    // An HTML page is no message for a terminal.
    let is_page = text.trim_start().starts_with('<');
    let message = message.unwrap_or(if is_page { "" } else { &text });
    let words = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let message = words.chars().filter(|character| !character.is_control());
    let code = error["code"].as_str().unwrap_or_default();
    (message.take(MAX_ERROR_CHARS).collect(), code.to_owned())
}

async fn read(response: &mut RemoteResponse, max_bytes: usize) -> Result<Vec<u8>, String> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() > max_bytes {
            body.truncate(max_bytes);
            break;
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_several_servers_are_read() {
        let list =
            br#"{"object": "list", "data": [{"id": "a", "max_model_len": 2048}, {"id": "b"}]}"#;
        let names = [("a", Some(2048)), ("b", None)];
        let expected = names.map(|(name, max_model_len)| Listed {
            name: name.to_owned(),
            max_model_len,
        });
        assert_eq!(parse_models(list).unwrap(), expected);
        for none in ["", "<html>", r#"{"data": 3}"#, r#"{"models": []}"#] {
            assert_eq!(parse_models(none.as_bytes()), None, "{none}");
        }
    }

    #[test]
    fn errors_of_several_servers_are_one_line() {
        for (body, message, code) in [
            (
                r#"{"error": {"message": "no\n such", "code": "c"}}"#,
                "no such",
                "c",
            ),
            (
                r#"{"error": "model 'x' not found"}"#,
                "model 'x' not found",
                "",
            ),
            (
                r#"{"object": "error", "message": "m", "code": 404}"#,
                "m",
                "",
            ),
            (r#"{"detail": "Not Found"}"#, "Not Found", ""),
            ("plain\u{1b}[2J words", "plain[2J words", ""),
            ("<!DOCTYPE html><p>502", "", ""),
            ("", "", ""),
        ] {
            let expected = (message.to_owned(), code.to_owned());
            assert_eq!(parse_error(body.as_bytes()), expected, "{body}");
        }
        let long = "x".repeat(5000);
        assert_eq!(parse_error(long.as_bytes()).0.len(), MAX_ERROR_CHARS);
    }
}
