//! One line of a batch: what it asks for, and how the server is asked.

use std::sync::Arc;
use std::time::Duration;

use corella_engine::EngineState;
use tokio::time::sleep;

use crate::api_key::Account;
use crate::batch_line::{RequestLine, ResultError, ResultResponse, ask};
use crate::local_client::LocalClient;
use crate::server_state::ServerState;

use super::table::Batches;

/// A line that is to be answered.
pub struct PendingLine {
    pub custom_id: String,
    path: String,
    /// The JSON of the request, or why nobody is asked.
    body: Result<Vec<u8>, ResultError>,
}

impl PendingLine {
    pub fn new(request: RequestLine) -> Self {
        let body = match request.refusal() {
            Some(error) => Err(error),
            None => Ok(serde_json::Value::Object(request.body)
                .to_string()
                .into_bytes()),
        };
        Self {
            custom_id: request.custom_id,
            path: request.url,
            body,
        }
    }

    /// What the line takes in memory until it is answered.
    pub fn num_bytes(&self) -> usize {
        self.custom_id.len() + self.body.as_ref().map_or(0, Vec::len)
    }
}

/// What became of a line.
pub struct LineAnswer {
    pub custom_id: String,
    /// What the line took in memory.
    pub num_bytes: usize,
    pub outcome: LineOutcome,
}

pub enum LineOutcome {
    Answered(Result<ResultResponse, ResultError>),
    /// The server ends, and the line is answered after its next start.
    Later,
    /// The key that would pay for the line is no longer valid.
    KeyIsGone,
}

/// Whoever asks on behalf of a batch.
#[derive(Clone)]
pub struct Asker {
    pub state: Arc<ServerState>,
    pub batches: Arc<Batches>,
    pub client: LocalClient,
    /// The name of the key that made the batch.
    pub owner: Option<Arc<str>>,
}

/// The key that made a batch is no longer valid.
pub struct KeyIsGone;

impl Asker {
    /// Whoever pays for the next tokens: keys may be changed while a batch runs.
    pub fn account(&self) -> Result<Option<Arc<Account>>, KeyIsGone> {
        let Some(owner) = &self.owner else {
            return Ok(None);
        };
        let keys = &self.state.api_keys;
        match keys.named(owner) {
            None if keys.are_required() => Err(KeyIsGone),
            account => Ok(account),
        }
    }

    pub async fn answer(self, line: PendingLine) -> LineAnswer {
        let num_bytes = line.num_bytes();
        let PendingLine {
            custom_id,
            path,
            body,
        } = line;
        let outcome = match body {
            Ok(body) => self.ask(&path, body).await,
            Err(error) => LineOutcome::Answered(Err(error)),
        };
        LineAnswer {
            custom_id,
            num_bytes,
            outcome,
        }
    }

    /// Asks again and again while the server is too busy, and leaves a line for later if the server ends.
    async fn ask(self, path: &str, body: Vec<u8>) -> LineOutcome {
        const RETRY: Duration = Duration::from_secs(1);
        let Self { state, batches, .. } = &self;
        loop {
            // A line that waits for the limit of its key does not keep other batches waiting.
            let Ok(permit) = batches.permits.acquire().await else {
                return LineOutcome::Later;
            };
            wait_for_others(state).await;
            if state.is_draining() {
                return LineOutcome::Later;
            }
            let Ok(account) = self.account() else {
                return LineOutcome::KeyIsGone;
            };
            let client = self.client.paid_by(account);
            let result = ask(&client, path, body.clone()).await;
            drop(permit);
            match &result {
                Ok(response) if response.is_queue_full() || response.is_rate_limited() => {}
                Ok(response) if response.status_code == 503 => {}
                // An answer that broke off because the server ends is none.
                Err(_) if state.is_draining() => return LineOutcome::Later,
                // Nor is the error of a request that an engine has dropped when it was lost.
                Ok(response) if response.status_code >= 500 && is_lost(state) => {
                    return LineOutcome::Later;
                }
                _ => return LineOutcome::Answered(result),
            }
            tokio::select! {
                () = sleep(RETRY) => {}
                () = state.draining() => return LineOutcome::Later,
            }
        }
    }
}

fn is_lost(state: &ServerState) -> bool {
    matches!(state.engine.state(), EngineState::Lost(_))
}

/// Requests of clients that wait go first, whatever the scheduling policy.
async fn wait_for_others(state: &ServerState) {
    const PERIOD: Duration = Duration::from_millis(10);
    while state.engine.stats().scheduler.num_waiting > 0 && !state.is_draining() {
        sleep(PERIOD).await;
    }
}
