//! Options of a server's socket and of its clients.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use corella_server::{AllowedOrigins, ServerConfig};

use crate::{Error, LlmOptions};

#[derive(Args)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// Address or host name to listen on; 0.0.0.0 listens on every address of this machine
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port to listen on; 0 takes any free port
    #[arg(long, default_value_t = 8000)]
    pub port: u16,
    /// Listen on a Unix domain socket at this path, instead of a port
    #[arg(long, value_name = "PATH", conflicts_with = "tls_cert")]
    pub uds: Option<PathBuf>,
    /// Serve gRPC too, on this port, by the services through which gateways reach vLLM; 0 takes any free port
    #[arg(long, value_name = "PORT", conflicts_with = "exit_when_idle")]
    pub grpc_port: Option<u16>,
    /// Address or host name of --grpc-port; gateways send no keys and speak no TLS there
    #[arg(
        long,
        value_name = "HOST",
        default_value = "127.0.0.1",
        requires = "grpc_port"
    )]
    pub grpc_host: String,
    /// Count calls without a key on --grpc-port as calls by the key of this name in --api-keys. Without this
    /// option, they are refused if keys are required
    #[arg(
        long,
        value_name = "NAME",
        requires = "grpc_port",
        requires = "api_keys"
    )]
    pub grpc_api_key: Option<String>,
    /// Path before all others, such as /llm, for a proxy that passes it on. Requests without it are
    /// answered too
    #[arg(long, value_name = "PATH")]
    pub root_path: Option<String>,
    /// Require this bearer token in every API request
    #[arg(
        long,
        value_name = "KEY",
        env = "CORELLA_API_KEY",
        hide_env_values = true
    )]
    pub api_key: Option<String>,
    /// Require one of the keys of this TOML file, which have limits of their own; SIGHUP reads it again
    #[arg(long, value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// Serve HTTPS with this PEM certificate, followed by its intermediate certificates; renewed files
    /// are used without a restart
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Let web pages of this origin use the API from a browser, for example https://chat.example.org;
    /// * allows all. Repeat the option for more origins
    #[arg(long, value_name = "ORIGIN")]
    pub cors_allow_origin: Vec<String>,
    /// Maximum number of connections; further ones wait in the system's queue
    #[arg(long, value_name = "N", default_value_t = 16_384, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: u32,
    /// Memory for the bodies of all requests that are being read or prepared; beyond it, requests get 429
    #[arg(long, value_name = "SIZE", value_parser = super::byte_size::parse_size, default_value = "256M")]
    pub max_body_memory: u64,
    /// Memory for stored answers of /v1/responses, which later requests continue by previous_response_id;
    /// the least recently used are dropped first. 0 stores none
    #[arg(long, value_name = "SIZE", value_parser = super::byte_size::parse_size_or_zero, default_value = "64M")]
    pub max_stored_response_bytes: u64,
    /// Show the limits in force when the server starts, and a request to try
    #[arg(short, long)]
    pub verbose: bool,
    /// Log format: text, or one JSON object per line
    #[arg(long, value_name = "FORMAT", default_value = "text")]
    pub log_format: LogFormatArg,
    /// Leave out the line of the log that each answered request has, except for probes, /metrics
    /// and the files of the page
    #[arg(long)]
    pub no_log_requests: bool,
    /// Add to every answer why its prompt was computed and not found in the prefix cache, as the request
    /// header `x-corella-explain: cache` does for one answer
    #[arg(long)]
    pub explain_cache: bool,
    /// Send traces to this OpenTelemetry collector, by OTLP over HTTP, for example
    /// http://127.0.0.1:4318
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    pub otlp_endpoint: Option<String>,
    /// Publish by ZMQ which blocks the prefix cache holds, as vLLM does and with its JSON: keys
    /// enable_kv_cache_events, publisher, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic
    #[arg(long, value_name = "JSON")]
    pub kv_events_config: Option<String>,
    /// Time for running requests to finish after a signal to stop; then they are aborted. A supervisor
    /// must wait longer than this before it kills the process
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub drain_timeout: u32,
    /// End the server when no request has come for this long, for example 10m; probes and /metrics do not count.
    /// systemd starts it again with the next request, if it holds the socket
    #[arg(long, value_name = "DURATION", value_parser = super::duration::parse_duration)]
    pub exit_when_idle: Option<Duration>,
    /// End the server when a step takes longer than this, so that its supervisor can restart it; 0
    /// disables this
    #[arg(long, value_name = "SECONDS", default_value_t = LlmOptions::default().step_deadline.as_secs())]
    pub step_deadline: u64,
}

impl ServerArgs {
    pub fn step_deadline(&self) -> Duration {
        match self.step_deadline {
            0 => Duration::MAX,
            seconds => Duration::from_secs(seconds),
        }
    }

    /// Returns the configuration of a server, without keys.
    pub fn config(&self) -> Result<ServerConfig, Error> {
        Ok(ServerConfig {
            max_num_connections: self.max_connections as usize,
            grpc_key: self.grpc_api_key.as_deref().map(Into::into),
            max_body_memory: self.max_body_memory as usize,
            max_stored_response_bytes: self.max_stored_response_bytes as usize,
            drain_timeout: Duration::from_secs(self.drain_timeout.into()),
            exit_when_idle: self.exit_when_idle,
            logs_requests: !self.no_log_requests,
            explains_cache: self.explain_cache,
            allowed_origins: allowed_origins(&self.cors_allow_origin)?,
            root_path: root_path(self.root_path.as_deref().unwrap_or_default())?,
            ..ServerConfig::default()
        })
    }
}

fn root_path(given: &str) -> Result<String, Error> {
    let path = given.trim_end_matches('/');
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte);
    let is_path = path.is_empty() || path.starts_with('/');
    if !is_path || path.contains("//") || !path.bytes().all(is_plain) {
        return Err(Error::Config(format!(
            "--root-path {given} must be a path such as /llm, of letters, digits, and the signs - _ . ~"
        )));
    }
    Ok(path.to_owned())
}

fn allowed_origins(origins: &[String]) -> Result<AllowedOrigins, Error> {
    AllowedOrigins::parse(origins).map_err(|wrong| {
        Error::Config(format!(
            "--cors-allow-origin {wrong} is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT \
             without a path, or *"
        ))
    })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatArg {
    Text,
    Json,
}
