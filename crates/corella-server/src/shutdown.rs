//! Being asked to end, by signals or by whoever embeds the server.

use std::io;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

/// The first request starts the grace period, the second ends it.
pub struct Shutdown {
    requests: mpsc::Receiver<()>,
}

/// Asks a server to end. Dropping it asks for nothing.
pub type ShutdownSender = mpsc::Sender<()>;

impl Shutdown {
    pub fn channel() -> (ShutdownSender, Self) {
        let (sender, requests) = mpsc::channel(2);
        (sender, Self { requests })
    }

    /// Never, once nobody can ask.
    pub async fn requested(&mut self) {
        if self.requests.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

/// SIGTERM and SIGINT, which from this call on no longer kill the process.
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
