//! Calls to LMCache's server.

use std::time::Duration;

use prost::Message;
use serde_json::Value;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};
use tonic_prost::ProstCodec;

use crate::registry::HttpClient;

/// The version of LMCache whose messages are spoken. Other versions have other messages.
pub const LMCACHE_VERSION: &str = "0.5.6";

/// The limit of the wait for a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// The limit of the wait for an answer to a call that waits for nothing else.
const CALL_LIMIT: Duration = Duration::from_secs(2);

/// A failed call, in the words for the log.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The server does not answer, or answers with an error.
    #[error("{0}")]
    Failed(String),
    /// The server cannot be used as it was started, or it is another version.
    #[error("{0}")]
    Unsuitable(String),
}

/// The server on this host.
pub struct Client {
    channel: Channel,
    /// The server's HTTP port, which tells the version. The gRPC port does not.
    status: HttpClient,
}

impl Client {
    /// Must be called within a tokio runtime. Connects at the first call.
    pub fn new(port: u16, status_port: u16) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}"));
        let endpoint = endpoint.expect("an address and a number are a URL");
        Self {
            channel: endpoint.connect_timeout(CONNECT_LIMIT).connect_lazy(),
            status: HttpClient::new(&format!("127.0.0.1:{status_port}")),
        }
    }

    pub async fn check_version(&self) -> Result<(), CallError> {
        let version = self.status.get("/lmc_version").await;
        let version = version.map_err(CallError::Failed)?;
        match version {
            Value::String(version) if version == LMCACHE_VERSION => Ok(()),
            other => Err(CallError::Unsuitable(format!(
                "LMCache's server has the version {other}, and this version of Corella speaks with \
                 {LMCACHE_VERSION} only: install lmcache=={LMCACHE_VERSION}"
            ))),
        }
    }

    pub async fn call<Q, A>(&self, method: &'static str, request: Q) -> Result<A, CallError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.call_within(method, request, CALL_LIMIT).await
    }

    pub async fn call_within<Q, A>(
        &self,
        method: &'static str,
        request: Q,
        limit: Duration,
    ) -> Result<A, CallError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        let name = method.rsplit('/').next().unwrap_or(method);
        let call = async {
            let mut grpc = tonic::client::Grpc::new(self.channel.clone());
            let ready = grpc.ready().await;
            ready.map_err(|error| CallError::Failed(format!("{name}: {error}")))?;
            let codec: ProstCodec<Q, A> = ProstCodec::default();
            let path = PathAndQuery::from_static(method);
            let answer = grpc.unary(Request::new(request), path, codec).await;
            let answer = answer.map_err(|status| match status.code() {
                Code::Unimplemented => CallError::Unsuitable(format!(
                    "LMCache's server has no {name}: start it with --transport grpc and \
                     --supported-transfer-mode engine_driven"
                )),
                _ => CallError::Failed(format!("{name}: {}", status.message())),
            })?;
            Ok(answer.into_inner())
        };
        let late = || CallError::Failed(format!("{name}: no answer within {limit:?}"));
        tokio::time::timeout(limit, call)
            .await
            .unwrap_or_else(|_| Err(late()))
    }
}
