//! How `kv_transfer_params` of a server's requests reach the cluster.

use corella_cluster::entrance::{Entrance, EntranceCall};
use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use corella_server::{KvTransfer, KvTransferCall, KvTransferError};
use serde_json::{Map, Value};

pub struct ServerEntrance(pub Entrance);

struct Call(EntranceCall);

impl KvTransfer for ServerEntrance {
    fn begin(
        &self,
        params: &Map<String, Value>,
        request_name: &str,
    ) -> Result<Option<Box<dyn KvTransferCall>>, KvTransferError> {
        let call = self.0.begin(params, request_name);
        let call = call.map_err(|error| KvTransferError {
            field: error.field.to_owned(),
            message: error.message,
        })?;
        Ok(call.map(|call| Box::new(Call(call)) as Box<dyn KvTransferCall>))
    }
}

impl Generate for Call {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.0.submit(submission)
    }
}

impl KvTransferCall for Call {
    fn answers_with_params(&self) -> bool {
        self.0.keeps_prompt()
    }

    fn params(&self) -> Option<Value> {
        self.0.response()
    }
}
