//! The HTTP client: one connection and one streamed answer for each request, with the time of each
//! token.

use std::future::Future;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::event::{Event, EventReader, Usage};
use super::load::Item;
use super::prompt::Prompt;
use super::{BenchServeOptions, Endpoint};
use crate::{BenchError, RequestRecord};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

const MAX_ERROR_BYTES: usize = 64 << 10;
const MAX_ERROR_CHARS: usize = 300;

pub(super) struct Client {
    /// The server's address, `HOST:PORT`.
    address: String,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    host: HeaderValue,
    /// The part of every path before `/v1`, usually empty.
    prefix: String,
    authorization: Option<HeaderValue>,
    endpoint: Endpoint,
    /// The part of the body that all requests have in common.
    body: Value,
    idle_timeout: Duration,
}

impl Client {
    pub(super) fn new(options: &BenchServeOptions) -> Result<Self, BenchError> {
        let wrong = |reason: &str| {
            BenchError::Option(format!(
                "--base-url {}: {reason}; it should look like http://127.0.0.1:8000",
                options.base_url
            ))
        };
        let uri: Uri = options.base_url.parse().map_err(|_| wrong("not a URL"))?;
        let is_encrypted = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(wrong("only http and https are supported")),
        };
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or_else(|| wrong("no host"))?;
        let tls = match (is_encrypted, &options.tls) {
            (false, _) => None,
            (true, None) => return Err(wrong("no authority of certificates is known")),
            (true, Some(config)) => {
                let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned());
                let name = name.map_err(|_| wrong("not the name of a host"))?;
                Some((TlsConnector::from(config.clone()), name))
            }
        };
        let default_port = if is_encrypted { 443 } else { 80 };
        let address = format!("{host}:{}", uri.port_u16().unwrap_or(default_port));
        let path = uri.path().trim_end_matches('/');

        let authorization = match &options.api_key {
            None => None,
            Some(key) => Some(
                HeaderValue::try_from(format!("Bearer {key}"))
                    .map_err(|_| BenchError::Option("--api-key has control characters".into()))?,
            ),
        };
        let mut body = json!({
            "temperature": options.temperature,
            "seed": options.seed,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        if options.ignore_eos {
            body["ignore_eos"] = true.into();
        }
        Ok(Self {
            host: HeaderValue::try_from(&address).map_err(|_| wrong("not a host name"))?,
            address,
            tls,
            prefix: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
            authorization,
            endpoint: options.endpoint,
            body,
            idle_timeout: options.idle_timeout,
        })
    }

    pub(super) fn set_model(&mut self, model: &str) {
        self.body["model"] = model.into();
    }

    /// Returns the first model in the server's list.
    pub(super) async fn served_model(&self) -> Result<String, BenchError> {
        let scheme = match self.tls {
            None => "http",
            Some(_) => "https",
        };
        let error = |reason| {
            BenchError::Server(format!(
                "no model from {scheme}://{}: {reason}",
                self.address
            ))
        };
        let models = self.list_models().await.map_err(error)?;
        match models["data"][0]["id"].as_str() {
            Some(id) => Ok(id.to_owned()),
            None => Err(error(
                "/v1/models lists no model; name one with --model".into(),
            )),
        }
    }

    async fn list_models(&self) -> Result<Value, String> {
        let body = self.get("/v1/models").await?;
        serde_json::from_slice(&body).map_err(|error| format!("/v1/models is not JSON: {error}"))
    }

    /// The server's version, from `/version` of Corella or vLLM.
    pub(super) async fn version(&self) -> Option<String> {
        let body = self.get("/version").await.ok()?;
        let json: Value = serde_json::from_slice(&body).ok()?;
        json["version"].as_str().map(str::to_owned)
    }

    /// The server's Prometheus metrics.
    pub(super) async fn metrics(&self) -> Result<String, String> {
        let body = self.get("/metrics").await?;
        String::from_utf8(body.into()).map_err(|_| "/metrics is not UTF-8".into())
    }

    /// Returns the tokens of a text, from `/tokenize` of Corella or vLLM.
    pub(super) async fn tokenize(&self, text: &str) -> Result<Vec<u32>, BenchError> {
        #[derive(Deserialize)]
        struct Tokenized {
            tokens: Vec<u32>,
        }
        let body = json!({ "model": self.body["model"], "prompt": text }).to_string();
        let answer = self.call(Method::POST, "/tokenize", body.into()).await;
        let tokenized = answer.and_then(|body| {
            serde_json::from_slice::<Tokenized>(&body).map_err(|error| error.to_string())
        });
        tokenized
            .map(|tokenized| tokenized.tokens)
            .map_err(|reason| {
                let address = &self.address;
                BenchError::Server(format!("--pre-tokenize: {address}/tokenize: {reason}"))
            })
    }

    async fn get(&self, path: &str) -> Result<Bytes, String> {
        self.call(Method::GET, path, Bytes::new()).await
    }

    /// Sends a request with a short answer.
    async fn call(&self, method: Method, path: &str, body: Bytes) -> Result<Bytes, String> {
        const MAX_BYTES: usize = 16 << 20;
        let mut sender = self.connect().await?;
        let request = self.request(method, path, body)?;
        let response = self.in_time(sender.send_request(request)).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response).await);
        }
        let body = http_body_util::Limited::new(response.into_body(), MAX_BYTES).collect();
        Ok(self.in_time(body).await?.to_bytes())
    }

    /// Sends a request and reads its answer to the end. Never fails: the record contains the error.
    pub(super) async fn send(&self, item: &Item, on_tokens: impl Fn(u64)) -> RequestRecord {
        let mut timing = Timing::default();
        let outcome = self.stream(item, &mut timing, on_tokens).await;
        timing.record(outcome)
    }

    async fn stream(
        &self,
        item: &Item,
        timing: &mut Timing,
        on_tokens: impl Fn(u64),
    ) -> Result<(), String> {
        let request = self.request(Method::POST, self.endpoint.path(), self.body_of(item))?;
        let connecting = Instant::now();
        let mut sender = self.connect().await?;
        timing.connect = Some(connecting.elapsed());
        // The clock starts when the connection is open, because real clients reuse connections.
        timing.start = Some(Instant::now());
        let response = self.in_time(sender.send_request(request)).await?;
        if response.status() != StatusCode::OK {
            return Err(self.refusal(response).await);
        }

        let mut body = response.into_body();
        let mut reader = EventReader::default();
        let mut is_done = false;
        while let Some(frame) = self.in_time_opt(body.frame()).await? {
            let Ok(bytes) = frame.into_data() else {
                continue;
            };
            let now = Instant::now();
            let num_before = timing.num_events;
            reader.push(&bytes, |payload| {
                let (event, usage) = Event::parse(payload)?;
                timing.usage = usage.or(timing.usage);
                match event {
                    Event::Token => timing.token(now),
                    Event::Other => {}
                    Event::Done => is_done = true,
                }
                Ok(())
            })?;
            on_tokens(timing.num_events - num_before);
        }
        timing.end = Some(Instant::now());
        if is_done {
            Ok(())
        } else {
            Err("the stream ended without [DONE]".into())
        }
    }

    fn body_of(&self, item: &Item) -> Bytes {
        let mut body = self.body.clone();
        body["max_tokens"] = item.max_tokens.into();
        match (self.endpoint, &item.prompt) {
            (Endpoint::Completions, Prompt::Text(text)) => body["prompt"] = text.as_str().into(),
            (Endpoint::Completions, Prompt::Tokens(ids)) => body["prompt"] = ids.as_slice().into(),
            (Endpoint::Chat, Prompt::Text(text)) => {
                body["messages"] = json!([{ "role": "user", "content": text }]);
            }
            (Endpoint::Chat, Prompt::Tokens(_)) => {
                unreachable!("token ids for chat were not refused before the run")
            }
        }
        body.to_string().into()
    }

    fn request(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Request<Full<Bytes>>, String> {
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(HOST, &self.host)
            .header(ACCEPT, "text/event-stream, application/json")
            .header(CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request
            .body(Full::new(body))
            .map_err(|error| error.to_string())
    }

    async fn connect(&self) -> Result<http1::SendRequest<Full<Bytes>>, String> {
        let stream = self.in_time(TcpStream::connect(&self.address)).await?;
        stream
            .set_nodelay(true)
            .map_err(|error| error.to_string())?;
        match &self.tls {
            None => self.handshake(stream).await,
            Some((connector, name)) => {
                let encrypted = self.in_time(connector.connect(name.clone(), stream)).await;
                let encrypted = encrypted.map_err(|reason| {
                    format!(
                        "{reason}; if its certificate is your own or your network's, name the authority's file in \
                         SSL_CERT_FILE"
                    )
                })?;
                self.handshake(encrypted).await
            }
        }
    }

    async fn handshake(
        &self,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<http1::SendRequest<Full<Bytes>>, String> {
        let (sender, connection) = self.in_time(http1::handshake(TokioIo::new(stream))).await?;
        // The task ends when `sender` and the response's body are dropped. Both report the connection's errors.
        tokio::spawn(connection);
        Ok(sender)
    }

    async fn in_time<T, E: Into<BoxError>>(
        &self,
        future: impl Future<Output = Result<T, E>>,
    ) -> Result<T, String> {
        match tokio::time::timeout(self.idle_timeout, future).await {
            Ok(outcome) => outcome.map_err(|error| chain(error.into().as_ref())),
            Err(_) => Err(format!(
                "the server sent nothing for {} s",
                self.idle_timeout.as_secs_f64()
            )),
        }
    }

    async fn in_time_opt<T, E: Into<BoxError>>(
        &self,
        future: impl Future<Output = Option<Result<T, E>>>,
    ) -> Result<Option<T>, String> {
        self.in_time(async { future.await.transpose() }).await
    }

    /// The server's message when it refuses a request.
    async fn refusal(&self, response: Response<Incoming>) -> String {
        let status = response.status();
        let body = http_body_util::Limited::new(response.into_body(), MAX_ERROR_BYTES);
        let bytes = match tokio::time::timeout(self.idle_timeout, body.collect()).await {
            Ok(Ok(body)) => body.to_bytes(),
            Ok(Err(_)) | Err(_) => Bytes::new(),
        };
        let json: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let text = match json["error"]["message"].as_str() {
            Some(message) => message.to_owned(),
            None => String::from_utf8_lossy(&bytes).into_owned(),
        };
        let text: String = text.chars().take(MAX_ERROR_CHARS).collect();
        match (status, &self.authorization) {
            (StatusCode::UNAUTHORIZED, None) => {
                format!(
                    "{status}: the server wants a key: --api-key, CORELLA_API_KEY or OPENAI_API_KEY gives it"
                )
            }
            (StatusCode::UNAUTHORIZED, Some(_)) => {
                format!(
                    "{status}: the server does not accept the key of --api-key, CORELLA_API_KEY or OPENAI_API_KEY"
                )
            }
            _ => format!("{status}: {text}"),
        }
    }
}

/// Joins an error with its causes, because hyper's errors have the reason in a cause.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[derive(Default)]
struct Timing {
    connect: Option<Duration>,
    start: Option<Instant>,
    last_token: Option<Instant>,
    end: Option<Instant>,
    ttft: Option<Duration>,
    itls: Vec<Duration>,
    num_events: u64,
    usage: Option<Usage>,
}

impl Timing {
    fn token(&mut self, now: Instant) {
        self.num_events += 1;
        match self.last_token.replace(now) {
            Some(before) => self.itls.push(now - before),
            None => self.ttft = self.start.map(|start| now - start),
        }
    }

    /// The latency ends with the last token, so that it is the TTFT plus the sum of the ITLs. Without any token, it
    /// ends with the stream.
    fn record(self, outcome: Result<(), String>) -> RequestRecord {
        let end = self.last_token.or(self.end);
        let latency = self
            .start
            .zip(end)
            .map_or(Duration::ZERO, |(start, end)| end - start);
        RequestRecord {
            num_input_tokens: self.usage.map_or(0, |usage| usage.prompt_tokens),
            num_output_tokens: self
                .usage
                .map_or(self.num_events, |usage| usage.completion_tokens),
            // The caller sets these two fields, because it knows the request and the start of the run.
            max_output_tokens: None,
            start: Duration::ZERO,
            submit: self.connect,
            ttft: self.ttft,
            itls: self.itls,
            latency,
            queue: None,
            lag: None,
            error: outcome.err(),
        }
    }
}
