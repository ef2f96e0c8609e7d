//! The field `kv_transfer_params`, by which a proxy has one server compute a prompt and another
//! decode. What stands in it is between the two, and this server only passes it on.

use corella_engine::Generate;
use serde_json::{Map, Value};

/// Reads the field and does what it asks for.
pub trait KvTransfer: Send + Sync {
    /// `request_name` is the request's `x-request-id`. `None` when nothing is asked for.
    fn begin(
        &self,
        params: &Map<String, Value>,
        request_name: &str,
    ) -> Result<Option<Box<dyn KvTransferCall>>, KvTransferError>;
}

/// One call with the field. Its prompt is submitted here, and not to the server's generator.
pub trait KvTransferCall: Generate {
    /// Whether its answer carries the field, too. Such an answer is no stream.
    fn answers_with_params(&self) -> bool;

    /// The field of the answer, asked for when all tokens are there. `None` is `null`, from which the
    /// proxy learns that there is nothing to transfer.
    fn params(&self) -> Option<Value>;
}

/// What is wrong with the field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvTransferError {
    /// The member that is to blame.
    pub field: String,
    pub message: String,
}
