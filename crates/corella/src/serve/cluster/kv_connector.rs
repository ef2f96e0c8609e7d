//! Passes `kv_transfer_params` of a server's requests to the cluster.

use corella_cluster::kv_connector::ConnectorCall;
use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use corella_server::{KvTransfer, KvTransferCall, KvTransferError};
use serde_json::{Map, Value};

use super::Cluster;

struct Call(ConnectorCall);

impl KvTransfer for Cluster {
    fn begin(
        &self,
        params: &Map<String, Value>,
        request_name: &str,
    ) -> Result<Option<Box<dyn KvTransferCall>>, KvTransferError> {
        let role = self.0.running_role();
        // While a node changes its role, it has no connector, and serves the request like one without
        // `kv_transfer_params`.
        let Some(connector) = role.connector() else {
            return Ok(None);
        };
        let call = connector.begin(params, request_name);
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
