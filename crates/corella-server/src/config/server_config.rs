//! The configuration of the server: its limits, its callers and its end.

use std::sync::Arc;
use std::time::Duration;

use corella_engine::Tracer;

use crate::config::allowed_origins::AllowedOrigins;
use crate::config::api_key::{ApiKey, Clock};
use crate::config::tls::ServerTls;

/// Requests that exceed a limit are refused with an error that names it.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// The keys for endpoints that compute or change something. If there are none, callers need no key.
    pub api_keys: Vec<ApiKey>,
    /// The name of the key by which calls without a key count on the gRPC port. With `None`, they are refused if keys
    /// are required.
    pub grpc_key: Option<Arc<str>>,
    /// The clock of the keys' limits.
    pub clock: Clock,
    pub max_body_bytes: usize,
    /// Limits the memory of all bodies being read or prepared.
    pub max_body_memory: usize,
    /// Limits the memory of responses that later requests may name. With 0, no response is kept.
    pub max_stored_response_bytes: usize,
    /// Limits the time from the end of the headers to the end of the body.
    pub body_timeout: Duration,
    /// Limits the time until a request's headers are complete, and an idle connection's wait for its next request.
    pub header_timeout: Duration,
    /// A connection is closed when its client takes no byte of a waiting answer for this long.
    pub write_timeout: Duration,
    pub max_num_connections: usize,
    /// Encrypts connections. With `None`, they are plain HTTP.
    pub tls: Option<ServerTls>,
    pub allowed_origins: AllowedOrigins,
    /// A prefix of all paths, such as `/llm`, by which a proxy finds this server; empty for none. Paths without the
    /// prefix are accepted too, because some proxies remove it.
    pub root_path: String,
    /// Receives the spans of requests, if tracing is on.
    pub tracer: Option<Tracer>,
    /// Whether the log gets a line for each answered request.
    pub logs_requests: bool,
    /// Whether every answer explains which part of its prompt was cached, and why the rest was not.
    pub explains_cache: bool,
    /// Whether fields with unknown names are ignored instead of refused.
    pub allow_unknown_fields: bool,
    /// Time for running requests to finish after a signal to stop.
    pub drain_timeout: Duration,
    /// A server without a request for this long ends. Probes do not count as requests.
    pub exit_when_idle: Option<Duration>,
    /// Whether another process keeps the listening socket open, and starts the next server. Connections that come while
    /// this server ends then wait for the next one.
    pub has_inherited_socket: bool,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            api_keys: Vec::new(),
            grpc_key: None,
            clock: Clock::default(),
            max_body_bytes: 8 << 20,
            max_body_memory: 256 << 20,
            max_stored_response_bytes: 64 << 20,
            body_timeout: Duration::from_secs(60),
            header_timeout: Duration::from_secs(60),
            write_timeout: Duration::from_secs(60),
            max_num_connections: 16_384,
            tls: None,
            allowed_origins: AllowedOrigins::default(),
            root_path: String::new(),
            tracer: None,
            logs_requests: false,
            explains_cache: false,
            allow_unknown_fields: false,
            drain_timeout: Duration::from_secs(30),
            exit_when_idle: None,
            has_inherited_socket: false,
        }
    }
}
