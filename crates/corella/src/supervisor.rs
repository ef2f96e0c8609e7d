//! Tells systemd what the server does, if it was started as a service of the type `notify`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Where systemd listens; not set if nobody does.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Whether something like systemd has started the server and looks after it.
pub fn is_there() -> bool {
    std::env::var_os(SOCKET).is_some()
}

/// Sends assignments as `sd_notify` does, for example `READY=1`. Whoever does not listen is not told.
pub fn notify(state: &str) {
    if let Err(error) = try_notify(state) {
        tracing::warn!(%error, state, "cannot notify the supervisor");
    }
}

fn try_notify(state: &str) -> io::Result<()> {
    let Some(name) = std::env::var_os(SOCKET) else {
        return Ok(());
    };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(&name)?,
    };
    UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}
