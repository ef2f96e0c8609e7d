//! One line of a batch: its request, and how it is sent to the server.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use corella_engine::EngineState;
use serde_json::Value;
use tokio::time::sleep;

use crate::call::account::Account;
use crate::local_client::LocalClient;
use crate::model_set::driver::ModelSet;
use crate::state::server_state::ServerState;
use crate::store::batch_line::{RequestLine, ResultError, ResultResponse};

use crate::store::batch_table::Batches;

/// A line to be answered.
pub struct PendingLine {
    pub custom_id: String,
    path: String,
    /// The name of the model in the request, or an empty one.
    model: String,
    /// The JSON of the request, or the reason not to send it.
    body: Result<Vec<u8>, ResultError>,
}

impl PendingLine {
    pub fn new(request: RequestLine) -> Self {
        let model = request.body.get("model").and_then(Value::as_str);
        let model = model.unwrap_or_default().to_owned();
        let body = match request.refusal() {
            Some(error) => Err(error),
            None => Ok(serde_json::Value::Object(request.body)
                .to_string()
                .into_bytes()),
        };
        Self {
            custom_id: request.custom_id,
            path: request.url,
            model,
            body,
        }
    }

    /// Returns the bytes of memory that the line takes until it is answered.
    pub fn num_bytes(&self) -> usize {
        self.custom_id.len() + self.body.as_ref().map_or(0, Vec::len)
    }
}

/// The result of a line.
pub struct LineAnswer {
    pub custom_id: String,
    /// The bytes of memory that the line took.
    pub num_bytes: usize,
    pub outcome: LineOutcome,
}

pub enum LineOutcome {
    Answered(Result<ResultResponse, ResultError>),
    /// The server ends. The line is answered after the server's next start.
    Later,
    /// The key that pays for the line is no longer valid.
    KeyIsGone,
}

/// Sends requests on behalf of a batch.
#[derive(Clone)]
pub struct Asker {
    pub models: ModelSet,
    pub batches: Arc<Batches>,
    pub client: LocalClient,
    /// The name of the key that made the batch.
    pub owner: Option<Arc<str>>,
    pub patience: Arc<ModelPatience>,
}

/// The key that made a batch is no longer valid.
pub struct KeyIsGone;

impl Asker {
    /// Returns the account that pays for the next tokens. Keys may be changed while a batch runs.
    pub fn account(&self) -> Result<Option<Arc<Account>>, KeyIsGone> {
        let Some(owner) = &self.owner else {
            return Ok(None);
        };
        let keys = &self.models.parts().api_keys;
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
            model,
            body,
        } = line;
        let outcome = match body {
            Ok(body) => self.ask(&path, &model, body).await,
            Err(error) => LineOutcome::Answered(Err(error)),
        };
        LineAnswer {
            custom_id,
            num_bytes,
            outcome,
        }
    }

    /// Retries while the server is too busy, and for a while without the model. Leaves a line for later if the server
    /// ends.
    async fn ask(self, path: &str, model: &str, body: Vec<u8>) -> LineOutcome {
        const RETRY: Duration = Duration::from_secs(1);
        const MAX_LOSSES: u32 = 2;
        let Self {
            models, batches, ..
        } = &self;
        let server = models.parts();
        let ends_with_engine = !models.has_several();
        let mut num_losses = 0;
        loop {
            // A line holds no permit while it waits for the rate limit of its key, so other batches continue.
            let Ok(permit) = batches.permits.acquire().await else {
                return LineOutcome::Later;
            };
            wait_for_others(models).await;
            if server.is_draining() {
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
                Ok(response) if response.is_model_unavailable() => {
                    if !self.patience.waits(model, Instant::now()) {
                        return LineOutcome::Answered(result);
                    }
                }
                Ok(response) if response.status_code == 503 => {}
                // An answer interrupted by the server's end does not count.
                Err(_) if server.is_draining() => return LineOutcome::Later,
                // The error of a request whose engine was lost does not count, either.
                Ok(response) if response.status_code >= 500 && ends_with_engine => {
                    if is_lost(models) {
                        return LineOutcome::Later;
                    }
                    return LineOutcome::Answered(result);
                }
                // The engine of one model among several is loaded again. The line may be the reason for its loss.
                Ok(response) if response.status_code >= 500 && num_losses < MAX_LOSSES => {
                    num_losses += 1;
                }
                _ => {
                    self.patience.handle_answer(model);
                    return LineOutcome::Answered(result);
                }
            }
            tokio::select! {
                () = sleep(RETRY) => {}
                () = server.draining() => return LineOutcome::Later,
            }
        }
    }
}

/// Sends a line's request to a server.
async fn ask(
    client: &LocalClient,
    path: &str,
    body: Vec<u8>,
) -> Result<ResultResponse, ResultError> {
    let response = client.post(path, body).await;
    let mut response = response.map_err(ResultError::invalid_url)?;
    let body = response.bytes().await;
    ResultResponse::new(path, response.status, response.request_id, body)
}

/// How long the lines of a batch wait for models that cannot be loaded. A model is tried again now and then, for example
/// after its engine was lost.
#[derive(Default)]
pub struct ModelPatience {
    /// When a line was refused for the first time since the latest answer, by the name of the model.
    refused_since: Mutex<HashMap<String, Instant>>,
}

impl ModelPatience {
    /// Long enough for another try after a failed one.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Returns whether a line that was refused at `now` is to be asked again.
    fn waits(&self, model: &str, now: Instant) -> bool {
        let mut refused_since = self.lock();
        let since = match refused_since.get(model) {
            Some(since) => *since,
            None => *refused_since.entry(model.to_owned()).or_insert(now),
        };
        now.saturating_duration_since(since) < Self::LIMIT
    }

    fn handle_answer(&self, model: &str) {
        self.lock().remove(model);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        let refused_since = self.refused_since.lock();
        refused_since.unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether the engine of the server's only model is lost.
fn is_lost(models: &ModelSet) -> bool {
    matches!(models.only_engine_state(), Some(EngineState::Lost(_)))
}

/// Requests of waiting clients come first under every scheduling policy.
async fn wait_for_others(models: &ModelSet) {
    const PERIOD: Duration = Duration::from_millis(10);
    let waits = |state: &ServerState| state.engine.stats().scheduler.num_waiting > 0;
    while models.loaded().iter().any(|state| waits(state)) && !models.parts().is_draining() {
        sleep(PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_wait_a_while_for_a_model_that_cannot_be_loaded() {
        let patience = ModelPatience::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert!(patience.waits("a", at(0)));
        assert!(patience.waits("a", at(59)));
        // Other models have a time of their own.
        assert!(patience.waits("b", at(60)));
        // Later lines do not wait again, until the model has answered.
        assert!(!patience.waits("a", at(60)));
        assert!(!patience.waits("a", at(90)));
        patience.handle_answer("a");
        assert!(patience.waits("a", at(90)));
        assert!(!patience.waits("b", at(120)));
    }
}
