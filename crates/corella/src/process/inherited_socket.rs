//! The listening socket that a supervisor such as systemd has opened for this process (`sd_listen_fds`).

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;

/// A listening socket that outlives this process.
#[derive(Debug)]
pub enum InheritedSocket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// The variables with the number of sockets, and with the process for which they are meant.
const NUM_SOCKETS: &str = "LISTEN_FDS";
const PROCESS: &str = "LISTEN_PID";
/// The first socket's descriptor; the others follow.
const FIRST: RawFd = 3;

impl InheritedSocket {
    /// Returns `None` if this process has not inherited a socket. Must be called at most once.
    pub fn take() -> Result<Option<Self>, String> {
        let variable = |name| std::env::var(name).ok();
        let num_sockets = num_sockets(variable(PROCESS), variable(NUM_SOCKETS), std::process::id());
        match num_sockets? {
            0 => Ok(None),
            1 => {
                // SAFETY: the supervisor has opened this descriptor for this process, which takes it once.
                let socket = unsafe { OwnedFd::from_raw_fd(FIRST) };
                let taken = Self::from_fd(socket).map(Some);
                taken.map_err(|error| format!("the socket of {NUM_SOCKETS} {error}"))
            }
            number => Err(format!(
                "{NUM_SOCKETS} is {number}: a server listens on one socket, so give its socket unit one \
                 ListenStream"
            )),
        }
    }

    fn from_fd(socket: OwnedFd) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot be used: {error}");
        if !is_listening(&socket) {
            let advice =
                "does not listen for streams: a socket unit needs ListenStream, and no Accept=yes";
            return Err(advice.to_owned());
        }
        set_close_on_exec(&socket).map_err(failed)?;
        let tcp = TcpListener::from(socket);
        if tcp.local_addr().is_ok() {
            tcp.set_nonblocking(true).map_err(failed)?;
            return Ok(Self::Tcp(tcp));
        }
        let unix = UnixListener::from(OwnedFd::from(tcp));
        unix.local_addr().map_err(failed)?;
        unix.set_nonblocking(true).map_err(failed)?;
        Ok(Self::Unix(unix))
    }
}

/// Reads the variables as `sd_listen_fds` does. A child of the server inherits the variables and no socket. Its process
/// id differs from LISTEN_PID, so the result is 0.
fn num_sockets(process: Option<String>, num: Option<String>, own: u32) -> Result<u32, String> {
    let (Some(process), Some(num)) = (process, num) else {
        return Ok(0);
    };
    match process.parse::<u32>() {
        Ok(process) if own == process => num.parse().map_err(|_| {
            format!("{NUM_SOCKETS} is {num}, and should be the number of inherited sockets")
        }),
        _ => Ok(0),
    }
}

fn is_listening(socket: &OwnedFd) -> bool {
    let option = |name| {
        let mut value: libc::c_int = 0;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        let place = (&raw mut value).cast();
        // SAFETY: `place` has room for `len` bytes, and both outlive the call. A closed descriptor is an error.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                name,
                place,
                &raw mut len,
            )
        };
        (done == 0).then_some(value)
    };
    option(libc::SO_ACCEPTCONN) == Some(1) && option(libc::SO_TYPE) == Some(libc::SOCK_STREAM)
}

/// Programs that this process starts must not keep the socket.
fn set_close_on_exec(socket: &OwnedFd) -> io::Result<()> {
    // SAFETY: changes a flag of a descriptor that `socket` keeps open.
    match unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn sockets_of_another_process_are_left() {
        let text = |text: &str| Some(text.to_owned());
        for (process, num, expected) in [
            (None, None, Ok(0)),
            (None, text("1"), Ok(0)),
            (text("7"), None, Ok(0)),
            (text("7"), text("0"), Ok(0)),
            (text("7"), text("2"), Ok(2)),
            (text("8"), text("1"), Ok(0)),
            (text("x"), text("1"), Ok(0)),
        ] {
            assert_eq!(num_sockets(process, num, 7), expected);
        }
        for num in ["", "x", "-1"] {
            assert!(num_sockets(text("7"), text(num), 7).is_err(), "{num}");
        }
    }

    fn take(socket: impl AsFd) -> Result<InheritedSocket, String> {
        let socket = socket.as_fd().try_clone_to_owned();
        InheritedSocket::from_fd(socket.expect("it is open"))
    }

    #[test]
    fn only_a_listening_socket_is_taken() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        let taken = take(&tcp);
        assert!(
            matches!(&taken, Ok(InheritedSocket::Tcp(taken)) if taken.local_addr().unwrap() == address),
            "{taken:?}"
        );
        let path = std::env::temp_dir().join(format!("corella-inherited-{}", std::process::id()));
        let unix = UnixListener::bind(&path).unwrap();
        let taken = take(&unix);
        assert!(matches!(taken, Ok(InheritedSocket::Unix(_))), "{taken:?}");
        std::fs::remove_file(&path).unwrap();

        let connection = take(TcpStream::connect(address).unwrap()).unwrap_err();
        assert!(connection.contains("Accept=yes"), "{connection}");
        let datagrams = take(UdpSocket::bind("127.0.0.1:0").unwrap()).unwrap_err();
        assert!(datagrams.contains("ListenStream"), "{datagrams}");
        let file = take(std::fs::File::open("/dev/null").unwrap()).unwrap_err();
        assert!(file.contains("does not listen"), "{file}");
    }
}
