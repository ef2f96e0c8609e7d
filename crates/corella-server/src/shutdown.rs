//! Signals that ask the process to end.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// Ready at the first SIGTERM or SIGINT. From the call on they no longer kill the process.
pub fn shutdown_signal() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
