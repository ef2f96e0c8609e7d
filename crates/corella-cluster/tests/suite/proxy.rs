//! A proxy whose gate a test opens and closes, and whose connections the test cuts.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

/// Forwards everything to a server, and the server's bytes to the client up to an allowance.
pub struct Proxy {
    pub address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    num_allowed: u64,
    /// Bytes read from the server.
    num_read: u64,
    num_forwarded: u64,
    /// Bytes written to the client's socket.
    num_delivered: u64,
    num_accepted: u64,
    /// Whether the next forwarded byte is changed.
    damages: bool,
    streams: Vec<TcpStream>,
    num_cuts: u64,
    is_over: bool,
}

impl Proxy {
    /// The allowance is 0 at first.
    pub fn new(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let accepting = shared.clone();
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if !accepting.connect(near, upstream) {
                    return;
                }
            }
        });
        Self { address, shared }
    }

    /// Lets `num_bytes` more return from the server.
    pub fn allow(&self, num_bytes: u64) {
        let mut state = self.shared.lock();
        state.num_allowed = state.num_allowed.saturating_add(num_bytes);
        self.shared.changed.notify_all();
    }

    pub fn allow_all(&self) {
        self.allow(u64::MAX);
    }

    /// Takes the rest of the allowance away.
    pub fn hold(&self) {
        let mut state = self.shared.lock();
        state.num_allowed = state.num_forwarded;
    }

    pub fn num_forwarded(&self) -> u64 {
        self.shared.lock().num_forwarded
    }

    pub fn num_delivered(&self) -> u64 {
        self.shared.lock().num_delivered
    }

    /// Returns the bytes from the server that wait here.
    pub fn num_held(&self) -> u64 {
        let state = self.shared.lock();
        state.num_read - state.num_forwarded
    }

    /// Returns how often clients have connected, with or without a running server.
    pub fn num_accepted(&self) -> u64 {
        self.shared.lock().num_accepted
    }

    pub fn damage_next_byte(&self) {
        self.shared.lock().damages = true;
    }

    /// Closes all open connections.
    pub fn cut(&self) {
        self.shared.lock().cut();
        self.shared.changed.notify_all();
    }
}

/// Limits the buffer, so that bytes held by the proxy also hold up the server.
fn limit_receive_buffer(stream: &TcpStream) {
    let num_bytes: libc::c_int = 64 << 10;
    // SAFETY: an option of an open descriptor, and its value.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVBUF,
            (&raw const num_bytes).cast(),
            size_of_val(&num_bytes) as libc::socklen_t,
        )
    };
    assert_eq!(result, 0);
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns false when the proxy is dropped.
    fn connect(self: &Arc<Self>, near: TcpStream, upstream: SocketAddr) -> bool {
        // The lock is held, so that no connection known to the server escapes a cut.
        let mut state = self.lock();
        if state.is_over {
            return false;
        }
        state.num_accepted += 1;
        let Ok(far) = TcpStream::connect(upstream) else {
            return true;
        };
        limit_receive_buffer(&far);
        let (near_in, mut far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let ends = [near.try_clone().unwrap(), far.try_clone().unwrap()];
        state.streams.extend(ends);
        let (shared, num_cuts) = (self.clone(), state.num_cuts);
        thread::spawn(move || {
            std::io::copy(&mut &near_in, &mut far_out).ok();
            far_out.shutdown(Shutdown::Both).ok();
        });
        thread::spawn(move || shared.forward(far, near, num_cuts));
        true
    }

    fn forward(&self, mut from: TcpStream, mut to: TcpStream, num_cuts: u64) {
        let mut buffer = [0; 16 << 10];
        while let Ok(num_bytes @ 1..) = from.read(&mut buffer) {
            self.lock().num_read += num_bytes as u64;
            if !self.pass_on(&mut buffer[..num_bytes], &mut to, num_cuts) {
                break;
            }
        }
        to.shutdown(Shutdown::Both).ok();
        from.shutdown(Shutdown::Both).ok();
    }

    /// Returns false when the connection has ended.
    fn pass_on(&self, mut bytes: &mut [u8], to: &mut TcpStream, num_cuts: u64) -> bool {
        while !bytes.is_empty() {
            let Some(num_bytes) = self.take_allowance(bytes, num_cuts) else {
                return false;
            };
            if to.write_all(&bytes[..num_bytes]).is_err() {
                return false;
            }
            self.lock().num_delivered += num_bytes as u64;
            bytes = &mut bytes[num_bytes..];
        }
        true
    }

    /// Waits until some of the bytes may pass, and returns their number. Returns `None` when their connection has been
    /// cut.
    fn take_allowance(&self, bytes: &mut [u8], num_cuts: u64) -> Option<usize> {
        let mut state = self.lock();
        while state.num_forwarded >= state.num_allowed && state.num_cuts == num_cuts {
            state = self.changed.wait(state).unwrap();
        }
        if state.num_cuts != num_cuts {
            return None;
        }
        let num_allowed = state.num_allowed - state.num_forwarded;
        let num_bytes = num_allowed.min(bytes.len() as u64) as usize;
        state.num_forwarded += num_bytes as u64;
        if std::mem::take(&mut state.damages) {
            bytes[num_bytes / 2] ^= 4;
        }
        Some(num_bytes)
    }
}

impl State {
    fn cut(&mut self) {
        self.num_cuts += 1;
        // Waiting bytes are discarded.
        self.num_read = self.num_forwarded;
        for stream in self.streams.drain(..) {
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.cut();
        // This connection wakes the accepting thread.
        TcpStream::connect(self.address).ok();
    }
}
