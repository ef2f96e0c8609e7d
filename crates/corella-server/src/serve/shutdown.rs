//! Requests to shut down, by signals or by a program that embeds the server.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// Receives requests to shut down. The first starts the drain, the second ends it.
pub struct Shutdown {
    requests: mpsc::Receiver<()>,
}

/// Requests a shutdown with each message. Dropping the sender has no effect.
pub type ShutdownSender = mpsc::Sender<()>;

impl Shutdown {
    pub fn channel() -> (ShutdownSender, Self) {
        let (sender, requests) = mpsc::channel(2);
        (sender, Self { requests })
    }

    /// Waits for the next request; forever if all senders have been dropped.
    pub async fn requested(&mut self) {
        if self.requests.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

/// Converts SIGTERM and SIGINT to requests to shut down; the signals no longer kill the process.
pub fn shutdown_signal() -> io::Result<Shutdown> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (sender, shutdown) = Shutdown::channel();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            if sender.send(()).await.is_err() {
                return;
            }
        }
    });
    Ok(shutdown)
}
