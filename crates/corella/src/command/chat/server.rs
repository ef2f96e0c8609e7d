//! The answering server: a model of this process, or a remote server.

use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::answer::TokenCounts;
use crate::Error;
use crate::arguments::config::ChatWith;
use crate::client::event_stream::EventStream;
use crate::client::patient_client::PatientResponse;
use crate::client::remote_server::{RemoteResponse, RemoteServer};
use crate::serve::local_server::LocalServer;

const PATH: &str = "/v1/chat/completions";

pub enum Server {
    Local(Box<LocalServer>),
    Remote(Box<RemoteServer>),
}

/// The events of an answer.
pub enum Events {
    Local(EventStream<PatientResponse>),
    Remote(EventStream<RemoteResponse>),
}

impl Server {
    /// Loads the model, or connects to the server.
    pub fn open(with: ChatWith, runtime: &Runtime) -> Result<Self, Error> {
        match with {
            ChatWith::Model(config) => {
                let mut server = LocalServer::load(*config)?;
                // This error comes first, because a model without text may have no chat template either.
                if let Some(error) = server.no_text.take() {
                    return Err(error);
                }
                if !server.has_chat_template {
                    return Err(Error::Config(format!(
                        "{} has no chat template, so it cannot converse; `corella generate --raw -p \
                         TEXT` continues a text",
                        server.name
                    )));
                }
                Ok(Self::Local(Box::new(server)))
            }
            ChatWith::Server(options) => {
                let server = runtime.block_on(RemoteServer::open(&options));
                Ok(Self::Remote(Box::new(server.map_err(Error::Config)?)))
            }
        }
    }

    /// Describes the server in one line.
    pub fn summary(&self) -> String {
        match self {
            Self::Local(server) => server.summary.clone(),
            Self::Remote(server) => server.summary(),
        }
    }

    /// `None` if a remote server does not report it.
    pub fn max_model_len(&self) -> Option<u32> {
        match self {
            Self::Local(server) => Some(server.max_model_len),
            Self::Remote(server) => server.max_model_len(),
        }
    }

    /// Opens the stream of an answer. Dropping it, or the future, aborts the request.
    ///
    /// The error is the message of a failed request.
    pub async fn chat(&self, mut body: Value) -> Result<Events, String> {
        body["stream_options"] = json!({"include_usage": true});
        match self {
            Self::Local(server) => {
                let response = server
                    .client
                    .post(PATH, body.to_string().into_bytes())
                    .await?;
                match EventStream::open(response).await? {
                    Ok(events) => Ok(Events::Local(events)),
                    Err(refusal) => Err(refusal_message(&refusal.body)),
                }
            }
            Self::Remote(server) => Ok(Events::Remote(server.chat(body).await?)),
        }
    }

    /// Returns the tokens since the local server's start. The difference after an answer gives the answer's tokens.
    /// Returns `None` for a remote server, which also has other users.
    pub fn counts(&self) -> Option<TokenCounts> {
        let Self::Local(server) = self else {
            return None;
        };
        let stats = server.engine.stats().scheduler;
        Some(TokenCounts {
            num_prompt_tokens: stats.num_prompt_tokens,
            num_cached_tokens: stats.num_prefix_hit_tokens,
            num_output_tokens: stats.num_generated_tokens,
        })
    }
}

impl Events {
    /// Returns the data of the next event; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, String> {
        match self {
            Self::Local(events) => events.next().await,
            Self::Remote(events) => events.next().await,
        }
    }
}

fn refusal_message(body: &[u8]) -> String {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let error = &body["error"];
    let message = error["message"].as_str().unwrap_or("the request failed");
    match error["code"].as_str() {
        Some("context_length_exceeded") => format!("{message} /clear starts a new conversation."),
        _ => message.to_owned(),
    }
}
