//! JSON over HTTP/1.1, as etcd and Kubernetes speak it: one connection for each call.

use std::future::Future;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;

/// The limit of the wait for a server's answer. A slower registry counts as unreachable.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The limit of bytes of one answer, which contains a whole list of nodes.
const MAX_BODY_BYTES: usize = 64 << 20;
const MAX_SHOWN_CHARS: usize = 200;

/// One server, by `HOST:PORT`.
#[derive(Clone, Debug)]
pub(crate) struct HttpClient {
    address: String,
    bearer_token: Option<String>,
}

impl HttpClient {
    pub fn new(address: &str) -> Self {
        Self {
            address: address.to_owned(),
            bearer_token: None,
        }
    }

    pub fn with_token(mut self, bearer_token: Option<String>) -> Self {
        self.bearer_token = bearer_token;
        self
    }

    pub async fn get(&self, path: &str) -> Result<Value, String> {
        self.call(Method::GET, path, String::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        self.call(Method::POST, path, body.to_string()).await
    }

    /// One answer, or the first of several.
    async fn call(&self, method: Method, path: &str, body: String) -> Result<Value, String> {
        let response = self.send(method, path, body).await?;
        let body = Limited::new(response.into_body(), MAX_BODY_BYTES).collect();
        let body = self.in_time(path, body).await?.to_bytes();
        let mut values = serde_json::Deserializer::from_slice(&body).into_iter();
        match values.next() {
            Some(Ok(value)) => Ok(value),
            _ => Err(format!(
                "http://{}{path} did not answer with JSON",
                self.address
            )),
        }
    }

    /// Sends a request whose answer is JSON lines. The answer may last for any time.
    pub async fn get_lines(&self, path: &str) -> Result<JsonLines, String> {
        self.lines(Method::GET, path, String::new()).await
    }

    pub async fn post_lines(&self, path: &str, body: &Value) -> Result<JsonLines, String> {
        self.lines(Method::POST, path, body.to_string()).await
    }

    async fn lines(&self, method: Method, path: &str, body: String) -> Result<JsonLines, String> {
        let response = self.send(method, path, body).await?;
        Ok(JsonLines {
            url: format!("http://{}{path}", self.address),
            body: response.into_body(),
            unread: Vec::new(),
        })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: String,
    ) -> Result<Response<Incoming>, String> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.address)
            .header(CONTENT_TYPE, "application/json");
        if let Some(token) = &self.bearer_token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| format!("http://{}{path}: {error}", self.address))?;

        let stream = self.in_time("", TcpStream::connect(&self.address)).await?;
        let handshake = http1::handshake(TokioIo::new(stream));
        let (mut sender, connection) = self.in_time("", handshake).await?;
        // The task ends when the answer has been read or dropped. The answer's reader gets the connection's errors.
        tokio::spawn(connection);
        let response = self.in_time(path, sender.send_request(request)).await?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = Limited::new(response.into_body(), MAX_BODY_BYTES).collect();
        let body = self.in_time(path, body).await?.to_bytes();
        let text = String::from_utf8_lossy(&body);
        let shown: String = text.trim().chars().take(MAX_SHOWN_CHARS).collect();
        Err(format!(
            "http://{}{path} answered {status}: {shown}",
            self.address
        ))
    }

    async fn in_time<T, E: std::fmt::Display>(
        &self,
        path: &str,
        what: impl Future<Output = Result<T, E>>,
    ) -> Result<T, String> {
        match tokio::time::timeout(TIMEOUT, what).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(format!("http://{}{path}: {error}", self.address)),
            Err(_) => Err(format!(
                "http://{}{path} did not answer within {} s",
                self.address,
                TIMEOUT.as_secs()
            )),
        }
    }
}

/// An answer of JSON lines that lasts until the server ends it.
pub(crate) struct JsonLines {
    url: String,
    body: Incoming,
    unread: Vec<u8>,
}

impl JsonLines {
    /// Waits for the next line for any time, and returns it. Returns `None` when the server has ended the answer. A
    /// caller that stops waiting loses nothing.
    pub async fn next(&mut self) -> Result<Option<Value>, String> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let value = serde_json::from_slice(&line);
                return value
                    .map(Some)
                    .map_err(|error| format!("{} sent a line that is no JSON: {error}", self.url));
            }
            let Some(frame) = self.body.frame().await else {
                return Ok(None);
            };
            let frame = frame.map_err(|error| format!("{}: {error}", self.url))?;
            self.unread
                .extend_from_slice(frame.data_ref().map_or(&[], |data| data));
            if self.unread.len() > MAX_BODY_BYTES {
                return Err(format!(
                    "{} sent a line of more than {MAX_BODY_BYTES} bytes",
                    self.url
                ));
            }
        }
    }
}
