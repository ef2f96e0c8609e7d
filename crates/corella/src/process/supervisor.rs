//! Reports the server's state to systemd, if it was started as a service of the type `notify`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable with systemd's socket; unset without a supervisor.
const SOCKET: &str = "NOTIFY_SOCKET";

/// Returns whether a supervisor such as systemd has started the server.
pub fn is_there() -> bool {
    std::env::var_os(SOCKET).is_some()
}

/// Sends assignments like `sd_notify`, for example `READY=1`. Without a supervisor it does nothing.
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
