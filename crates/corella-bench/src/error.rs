//! The error type of benchmarks.

use std::fmt;

use corella_core::ConfigError;

/// Why a benchmark could not run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BenchError {
    /// The scheduler refuses its configuration.
    Config(ConfigError),
    /// An option has an impossible value.
    Option(String),
    /// A file of prompts or results cannot be read or written.
    File(String),
    /// No server answers at the base URL, or it answers unlike an OpenAI server.
    Server(String),
    /// A warm-up request failed.
    Warmup(String),
    /// A worker of the load generator ended abnormally.
    Worker(String),
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Option(reason) | Self::File(reason) | Self::Server(reason) => f.write_str(reason),
            Self::Warmup(reason) => write!(f, "the warm-up request failed: {reason}"),
            Self::Worker(reason) => write!(f, "the load generator failed: {reason}"),
        }
    }
}

impl std::error::Error for BenchError {}
