//! The models of a remote server: which are loaded, and the wish to unload one.

use serde_json::{Value, json};

use super::connection::{Address, RemoteResponse};
use super::{MAX_ERROR_BYTES, MAX_LIST_BYTES, key_refusal, parse_error, read};

pub struct RemoteModels {
    address: Address,
    has_key: bool,
    /// The path of the server without `/v1`.
    base: String,
}

/// A model that is not simply unloaded.
#[derive(Debug, PartialEq)]
pub struct RemoteModel {
    pub name: String,
    /// `None` if it is not loaded.
    pub size: Option<u64>,
    pub state: String,
    /// When it is unloaded, as the server writes it, unless a request uses it before.
    pub expires_at: Option<String>,
}

impl RemoteModels {
    /// Reads `--url`, and connects to nothing yet.
    pub fn new(url: &str, api_key: Option<&str>) -> Result<Self, String> {
        let api_key = api_key.filter(|key| !key.is_empty());
        let address = Address::parse(url, api_key)?;
        let path = address.path();
        Ok(Self {
            base: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            has_key: api_key.is_some(),
            address,
        })
    }

    /// Returns the loaded models, and those that come, go or have failed.
    pub async fn list(&self) -> Result<Vec<RemoteModel>, String> {
        let running = self.get("/api/ps").await?;
        let all = self.get("/v1/models").await?;
        Ok(models(&running, &all))
    }

    /// Asks to unload a model when its requests have ended.
    pub async fn stop(&self, model: &str) -> Result<(), String> {
        let path = format!("{}/api/generate", self.base);
        let body = json!({"model": model, "keep_alive": 0, "stream": false});
        let response = self.address.post(&path, body.to_string()).await?;
        let answer = self.json(&path, response).await?;
        match answer["done_reason"].as_str() {
            Some("unload") => Ok(()),
            _ => Err(format!(
                "{} keeps {model} loaded: start it with --keep-alive, or with several models; /models/unload unloads a \
                 pinned one",
                self.address.shown()
            )),
        }
    }

    async fn get(&self, path: &str) -> Result<Value, String> {
        let path = format!("{}{path}", self.base);
        let response = self.address.get(&path).await?;
        self.json(&path, response).await
    }

    async fn json(&self, path: &str, mut response: RemoteResponse) -> Result<Value, String> {
        let shown = self.address.shown();
        let status = response.status();
        let max_bytes = if status == 200 {
            MAX_LIST_BYTES
        } else {
            MAX_ERROR_BYTES
        };
        let body = read(&mut response, max_bytes).await?;
        let (message, _) = parse_error(&body);
        let leads_elsewhere = || {
            format!(
                "{shown} has no {path}: --url must lead to a server of Corella or Ollama, as \
                 http://127.0.0.1:8000 does"
            )
        };
        match status {
            200 => serde_json::from_slice(&body).map_err(|_| leads_elsewhere()),
            401 | 403 => Err(key_refusal(shown, self.has_key, &message)),
            404 | 405 if message.is_empty() => Err(leads_elsewhere()),
            _ if message.is_empty() => Err(format!("{shown} answered {status}")),
            _ => Err(message),
        }
    }
}

/// Joins `/api/ps` with the states of `/v1/models`, which Ollama's servers lack.
fn models(running: &Value, all: &Value) -> Vec<RemoteModel> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = list(&all["data"]);
    let state = |name: &str| {
        let known = all.iter().find(|model| model["id"] == name);
        let known = known.and_then(|model| model["status"]["value"].as_str());
        known.unwrap_or("loaded").to_owned()
    };
    let mut models = Vec::new();
    for model in list(&running["models"]) {
        let tagged = text(&model["name"]);
        let untagged = tagged.strip_suffix(":latest").unwrap_or(&tagged);
        let is_listed = all.iter().any(|model| model["id"] == untagged);
        let name = if is_listed {
            untagged.to_owned()
        } else {
            tagged
        };
        models.push(RemoteModel {
            state: state(&name),
            size: model["size"].as_u64(),
            expires_at: model["expires_at"].as_str().map(str::to_owned),
            name,
        });
    }
    for model in &all {
        let name = text(&model["id"]);
        let state = text(&model["status"]["value"]);
        let is_in_motion = ["loading", "unloading", "failed"].contains(&&*state);
        if is_in_motion && !models.iter().any(|known| known.name == name) {
            models.push(RemoteModel {
                name,
                size: model["status"]["memory_bytes"].as_u64(),
                state,
                expires_at: None,
            });
        }
    }
    models
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_in_motion_are_listed_behind_the_loaded_ones() {
        let running = json!({"models": [
            {"name": "b:latest", "size": 7, "expires_at": "2030-01-01T00:00:00Z"}, {"name": "x:latest"},
        ]});
        let all = json!({"data": [
            {"id": "a", "status": {"value": "loading", "memory_bytes": 5}},
            {"id": "b", "status": {"value": "loaded"}},
            {"id": "c", "status": {"value": "unloaded"}},
            {"id": "d", "status": {"value": "failed"}},
        ]});
        let model = |name: &str, size, state: &str, expires_at: Option<&str>| RemoteModel {
            name: name.to_owned(),
            size,
            state: state.to_owned(),
            expires_at: expires_at.map(str::to_owned),
        };
        let expected = [
            model("b", Some(7), "loaded", Some("2030-01-01T00:00:00Z")),
            model("x:latest", None, "loaded", None),
            model("a", Some(5), "loading", None),
            model("d", None, "failed", None),
        ];
        assert_eq!(models(&running, &all), expected);
        assert_eq!(models(&json!({}), &json!([])), []);
    }

    #[test]
    fn the_path_of_the_api_may_be_part_of_the_address() {
        for (url, base) in [
            ("http://box:1", ""),
            ("http://box:1/v1/", ""),
            ("box/llm/v1", "/llm"),
        ] {
            assert_eq!(RemoteModels::new(url, None).unwrap().base, base, "{url}");
        }
    }
}
