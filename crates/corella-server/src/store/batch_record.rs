//! The record of a batch, as kept on disk and shown to callers.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchStatus {
    Validating,
    InProgress,
    Finalizing,
    Completed,
    Failed,
    Expired,
    Cancelling,
    Cancelled,
}

impl BatchStatus {
    pub fn has_ended(self) -> bool {
        matches!(
            self,
            Self::Completed | Self::Failed | Self::Expired | Self::Cancelled
        )
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRecord {
    pub id: String,
    /// The name of the API key that owns the batch; `None` if the server required none.
    pub owner: Option<String>,
    pub endpoint: String,
    pub input_file_id: String,
    pub completion_window: String,
    pub metadata: Option<Map<String, Value>>,
    /// The lifetime of the files of answers, in seconds.
    pub output_life_s: u64,
    pub status: BatchStatus,
    /// The outcome of the batch, once no more lines are answered.
    pub outcome: Option<BatchStatus>,
    /// The faults of the input file, or why the batch cannot continue.
    pub errors: Vec<BatchError>,
    pub output_file_id: Option<String>,
    pub error_file_id: Option<String>,
    pub times: BatchTimes,
    pub counts: BatchCounts,
}

/// The time of each status of the batch, in seconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchTimes {
    pub created_at: u64,
    pub expires_at: u64,
    pub in_progress_at: Option<u64>,
    pub finalizing_at: Option<u64>,
    pub completed_at: Option<u64>,
    pub failed_at: Option<u64>,
    pub expired_at: Option<u64>,
    pub cancelling_at: Option<u64>,
    pub cancelled_at: Option<u64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchCounts {
    pub total: usize,
    pub completed: usize,
    pub failed: usize,
}

/// A mistake in the input file, or the reason why a batch cannot continue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchError {
    pub code: String,
    pub message: String,
    pub param: Option<String>,
    pub line: Option<usize>,
}

/// Limits an error's message, which may repeat a part of the input file: batches stay in memory and appear in lists.
const MAX_MESSAGE_CHARS: usize = 600;

impl BatchError {
    pub fn new(code: &str, mut message: String, param: Option<&str>, line: Option<usize>) -> Self {
        if let Some((end, _)) = message.char_indices().nth(MAX_MESSAGE_CHARS) {
            message.truncate(end);
            message.push('…');
        }
        Self {
            code: code.to_owned(),
            message,
            param: param.map(str::to_owned),
            line,
        }
    }
}

/// Returns the reason why a whole batch cannot continue.
pub fn failure(code: &str, message: impl Into<String>) -> Vec<BatchError> {
    vec![BatchError::new(code, message.into(), None, None)]
}

pub fn disk_failure(error: impl std::fmt::Display) -> Vec<BatchError> {
    let message = format!("The server could not use its disk: {error}");
    failure("disk_error", message)
}

impl BatchRecord {
    /// Records the time of a new status.
    pub fn reach(&mut self, status: BatchStatus, now_s: u64) {
        let times = &mut self.times;
        let time = match status {
            BatchStatus::Validating => None,
            BatchStatus::InProgress => Some(&mut times.in_progress_at),
            BatchStatus::Finalizing => Some(&mut times.finalizing_at),
            BatchStatus::Completed => Some(&mut times.completed_at),
            BatchStatus::Failed => Some(&mut times.failed_at),
            BatchStatus::Expired => Some(&mut times.expired_at),
            BatchStatus::Cancelling => Some(&mut times.cancelling_at),
            BatchStatus::Cancelled => Some(&mut times.cancelled_at),
        };
        if let Some(time) = time {
            time.get_or_insert(now_s);
        }
        self.status = status;
    }

    pub fn object(&self) -> Value {
        // The files exist once the batch has ended.
        let files = self.status.has_ended();
        let file = |id: &Option<String>| id.clone().filter(|_| files);
        let errors =
            (!self.errors.is_empty()).then(|| json!({"object": "list", "data": self.errors}));
        let mut object = json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": file(&self.output_file_id),
            "error_file_id": file(&self.error_file_id),
            "request_counts": self.counts,
            "metadata": self.metadata,
        });
        if let (Value::Object(object), Ok(Value::Object(times))) =
            (&mut object, serde_json::to_value(&self.times))
        {
            object.extend(times);
        }
        object
    }
}
