//! Calls the server within its own process: the same router, without a socket.

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{CONTENT_TYPE, HOST};
use axum::http::{Extensions, HeaderValue, Method, Request, Uri};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;

use crate::call::account::Account;
use crate::call::call_context::{Background, OnlyCheck, RequestNumber};
use crate::http::router::{batch_router, router};
use crate::model_set::driver::ModelSet;
use crate::state::server_state::ServerState;

/// Sends requests to a server that need not listen on a socket. Requests are treated as over a socket, with the same
/// checks, limits, errors and events.
#[derive(Clone)]
pub struct LocalClient {
    service: TowerToHyperService<Router>,
    /// The facts about the caller that layers before a handler would find.
    extensions: Extensions,
}

/// A response whose body has not been read. Dropping the response before its end aborts the request.
pub struct LocalResponse {
    pub status: u16,
    /// The name of the request in the log and in `x-request-id`.
    pub request_id: String,
    body: Body,
}

impl LocalClient {
    pub fn new(state: Arc<ServerState>) -> Self {
        Self {
            service: TowerToHyperService::new(router(ModelSet::of(state))),
            extensions: Extensions::new(),
        }
    }

    /// Returns a client for the lines of a batch. Requests of waiting clients come before this client's requests.
    pub(crate) fn for_batch(models: ModelSet) -> Self {
        let mut extensions = Extensions::new();
        extensions.insert(Background);
        Self {
            service: TowerToHyperService::new(batch_router(models)),
            extensions,
        }
    }

    /// Returns the same client with `account` paying for its requests.
    pub(crate) fn paid_by(&self, account: Option<Arc<Account>>) -> Self {
        let mut client = self.clone();
        if let Some(account) = account {
            client.extensions.insert(account);
        }
        client
    }

    /// Returns the same client, whose requests are checked and not computed. The answer to a request without fault has
    /// status 204 and no content.
    pub fn only_checking(&self) -> Self {
        let mut client = self.clone();
        client.extensions.insert(OnlyCheck);
        client
    }

    /// Returns the same client, whose requests have this number. The server's seed and the number determine the seed of
    /// a request without `seed`.
    pub fn with_number(&self, number: u64) -> Self {
        let mut client = self.clone();
        client.extensions.insert(RequestNumber(number));
        client
    }

    /// Posts a JSON body. Dropping the future aborts the request.
    ///
    /// The error says why `path` cannot be part of a request.
    pub async fn post(&self, path: &str, json: Vec<u8>) -> Result<LocalResponse, String> {
        let uri: Uri = path
            .parse()
            .map_err(|error| format!("{path} is no path: {error}"))?;
        let mut request = Request::new(Body::from(json));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        request.extensions_mut().extend(self.extensions.clone());
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        let host = HeaderValue::from_static("localhost");
        request.headers_mut().insert(HOST, host);
        let response = match self.service.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let request_id = response
            .headers()
            .get("x-request-id")
            .and_then(|name| name.to_str().ok())
            .unwrap_or_default()
            .to_owned();
        Ok(LocalResponse {
            status: response.status().as_u16(),
            request_id,
            body: response.into_body(),
        })
    }
}

impl LocalResponse {
    /// Returns the next part of the body; `None` at its end. The error says why the rest is
    /// missing.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, String> {
        loop {
            let body = &mut self.body;
            let frame = std::future::poll_fn(|cx| std::pin::Pin::new(&mut *body).poll_frame(cx));
            match frame.await {
                None => return Ok(None),
                Some(Err(error)) => return Err(error.to_string()),
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// Returns the rest of the body.
    pub async fn bytes(&mut self) -> Result<Vec<u8>, String> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }
}
