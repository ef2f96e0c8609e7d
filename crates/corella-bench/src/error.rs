//! The error type of benchmarks.

use corella_core::ConfigError;

/// Why a benchmark could not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BenchError {
    /// The scheduler refuses its configuration.
    #[error(transparent)]
    Config(ConfigError),
    /// An option has an impossible value.
    #[error("{0}")]
    Option(String),
    /// A file of prompts or results cannot be read or written.
    #[error("{0}")]
    File(String),
    /// No server answers at the base URL, or it answers unlike an OpenAI server.
    #[error("{0}")]
    Server(String),
    /// A warm-up request failed.
    #[error("the warm-up request failed: {0}")]
    Warmup(String),
    /// A worker of the load generator ended abnormally.
    #[error("the load generator failed: {0}")]
    Worker(String),
}
