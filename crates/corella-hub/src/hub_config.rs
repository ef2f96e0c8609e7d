//! The configuration of access to the hub.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct HubConfig {
    /// The hub's address, such as `https://huggingface.co`.
    pub endpoint: String,
    /// The credential for the hub.
    pub token: Option<String>,
    /// The cache's folder, which need not exist.
    pub cache: PathBuf,
    /// Certificates in PEM format to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// Whether fetching is disabled.
    pub is_offline: bool,
    /// The number of files to fetch at once.
    pub num_parallel: usize,
    /// A connection without data for this time is given up, and the fetch continued on another.
    pub read_timeout: Duration,
}
