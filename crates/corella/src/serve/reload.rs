//! Reloads API keys and certificates while a server runs.

use std::io::{self, IsTerminal};
use std::sync::Arc;

use corella_server::{ServerParts, ServerTls};
use tokio::signal::unix::{SignalKind, signal};

use crate::arguments::api_key_file::KeySource;
use crate::process::supervisor;

pub struct Reload {
    pub keys: KeySource,
    pub tls: Option<ServerTls>,
}

impl Reload {
    /// Follows the files of certificates, and reads all files again at SIGHUP. Without such files, SIGHUP still ends a
    /// server that was started from a terminal without a supervisor; otherwise SIGHUP ends no server. Unusable files
    /// change nothing.
    pub fn start(self, parts: &Arc<ServerParts>) -> io::Result<()> {
        if let Some(tls) = &self.tls {
            tokio::spawn(tls.clone().follow_files());
        }
        let has_files = self.tls.is_some() || self.keys.file.is_some();
        if !has_files && !supervisor::is_there() && io::stdin().is_terminal() {
            return Ok(());
        }
        let mut hangup = signal(SignalKind::hangup())?;
        let parts = parts.clone();
        tokio::spawn(async move {
            while hangup.recv().await.is_some() {
                self.read_again(&parts);
            }
        });
        Ok(())
    }

    fn read_again(&self, parts: &ServerParts) {
        if self.keys.file.is_none() && self.tls.is_none() {
            tracing::info!(
                "SIGHUP: nothing to reload, since neither API keys nor certificates come from files"
            );
        }
        if self.keys.file.is_some() {
            match self.keys.read() {
                Ok(keys) => {
                    let num_keys = keys.len();
                    parts.replace_api_keys(keys);
                    tracing::info!(num_keys, "read the API keys again");
                }
                Err(error) => tracing::error!("the API keys were not reloaded: {error}"),
            }
        }
        if let Some(tls) = &self.tls {
            match tls.reload() {
                Ok(true) => tracing::info!("new connections use the renewed --tls-cert"),
                Ok(false) => tracing::info!("--tls-cert has not changed"),
                Err(error) => tracing::error!("the certificate was not reloaded: {error}"),
            }
        }
    }
}
