//! A client of the local server that retries while the server is busy with its other requests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use corella_server::{LocalClient, LocalResponse};
use serde_json::Value;
use tokio::time::sleep;

/// The pause before a request that found the queue full is sent again.
const RETRY: Duration = Duration::from_millis(100);

/// A client that sends a request again when the server's queue is full, instead of returning the answer 429. Clones
/// count their requests in the server together.
#[derive(Clone)]
pub struct PatientClient {
    client: LocalClient,
    traffic: Arc<Traffic>,
}

/// A response whose body has not been read. Dropping it before its end aborts its request.
pub struct PatientResponse {
    response: LocalResponse,
    /// The body, if it had to be read to classify the answer.
    read: Option<Vec<u8>>,
    _turn: Turn,
}

impl PatientClient {
    pub fn new(client: LocalClient) -> Self {
        Self {
            client,
            traffic: Arc::default(),
        }
    }

    /// Returns the same client, whose requests are checked and not computed.
    pub fn only_checking(&self) -> Self {
        let client = self.client.only_checking();
        Self {
            client,
            ..self.clone()
        }
    }

    /// Returns the same client, whose requests have this number. The server's seed and the number determine the seed of
    /// a request without `seed`.
    pub fn with_number(&self, number: u64) -> Self {
        let client = self.client.with_number(number);
        Self {
            client,
            ..self.clone()
        }
    }

    /// Posts a JSON body. Dropping the future aborts the request.
    ///
    /// The error says why there is no response.
    pub async fn post(&self, path: &str, json: Vec<u8>) -> Result<PatientResponse, String> {
        loop {
            let turn = self.traffic.clone().enter();
            let mut response = self.client.post(path, json.clone()).await?;
            let read = match response.status {
                429 => Some(response.bytes().await?),
                _ => None,
            };
            // A request that was refused while the server had no other request would be refused forever.
            let is_crowded = read.as_deref().is_some_and(is_queue_full) && !turn.is_alone();
            if !is_crowded {
                return Ok(PatientResponse {
                    response,
                    read,
                    _turn: turn,
                });
            }
            drop(turn);
            sleep(RETRY).await;
        }
    }
}

fn is_queue_full(body: &[u8]) -> bool {
    serde_json::from_slice(body).is_ok_and(|body: Value| body["error"]["code"] == "queue_full")
}

impl PatientResponse {
    pub fn status(&self) -> u16 {
        self.response.status
    }

    /// The name of the request in the log and in `x-request-id`.
    pub fn request_id(&self) -> &str {
        &self.response.request_id
    }

    /// Returns the next part of the body; `None` at its end. The error says why the rest is missing.
    pub async fn chunk(&mut self) -> Result<Option<Vec<u8>>, String> {
        match self.read.take() {
            Some(read) => Ok(Some(read)),
            None => Ok(self.response.chunk().await?.map(Vec::from)),
        }
    }

    /// Returns the rest of the body.
    pub async fn bytes(&mut self) -> Result<Vec<u8>, String> {
        match self.read.take() {
            Some(read) => Ok(read),
            None => self.response.bytes().await,
        }
    }
}

/// Counts the client's requests in the server.
#[derive(Default)]
struct Traffic {
    num_active: AtomicUsize,
    num_sent: AtomicUsize,
}

/// A request in the server. Dropping the turn says that the request has ended.
struct Turn {
    traffic: Arc<Traffic>,
    began_alone: bool,
    /// The number of requests sent so far, including this one.
    num_sent: usize,
}

impl Traffic {
    fn enter(self: Arc<Self>) -> Turn {
        Turn {
            began_alone: self.num_active.fetch_add(1, Ordering::SeqCst) == 0,
            num_sent: self.num_sent.fetch_add(1, Ordering::SeqCst) + 1,
            traffic: self,
        }
    }
}

impl Turn {
    /// Returns whether the server has had no other request since this request began.
    fn is_alone(&self) -> bool {
        self.began_alone && self.traffic.num_sent.load(Ordering::SeqCst) == self.num_sent
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.traffic.num_active.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_alone_while_no_other_begins() {
        let traffic = Arc::new(Traffic::default());
        let first = traffic.clone().enter();
        assert!(first.is_alone());
        let second = traffic.clone().enter();
        assert!(!first.is_alone() && !second.is_alone());
        // The second request ends, but it may have caused the refusal of the first.
        drop(second);
        assert!(!first.is_alone());
        drop(first);
        assert!(traffic.enter().is_alone());
    }

    #[test]
    fn only_a_full_queue_is_worth_another_try() {
        assert!(is_queue_full(br#"{"error":{"code":"queue_full"}}"#));
        assert!(!is_queue_full(br#"{"error":{"code":"rate_limit"}}"#));
        assert!(!is_queue_full(b""));
    }
}
