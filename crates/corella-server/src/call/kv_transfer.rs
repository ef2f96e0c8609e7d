//! The field `kv_transfer_params`, by which a proxy has one server compute a prompt and another server decode. This
//! crate passes the field's content on, and reads only `do_remote_decode`.

use corella_engine::Generate;
use serde_json::{Map, Value};

/// Reads `kv_transfer_params`, and begins the fetch or the session that it names.
pub trait KvTransfer: Send + Sync {
    /// `request_name` is the request's `x-request-id`. Returns `None` when the field asks for nothing.
    fn begin(
        &self,
        params: &Map<String, Value>,
        request_name: &str,
    ) -> Result<Option<Box<dyn KvTransferCall>>, KvTransferError>;
}

/// One call with the field. The call's prompt is submitted to this object instead of to the server's generator.
pub trait KvTransferCall: Generate {
    /// Returns whether the call's answer has the field, too. HTTP does not stream such an answer.
    fn answers_with_params(&self) -> bool;

    /// Returns the field of the answer, once all tokens are there. `None` becomes `null`, which tells the proxy that
    /// there is nothing to transfer.
    fn params(&self) -> Option<Value>;
}

/// The fault of the field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvTransferError {
    /// The faulty member.
    pub field: String,
    pub message: String,
}
