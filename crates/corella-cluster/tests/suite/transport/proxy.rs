//! A connection that a test holds up, throttles and cuts.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use crate::transport::fixture::loopback;

/// Forwards everything to a sender; what comes back from it goes on only as far as was allowed.
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
    num_forwarded: u64,
    /// The next byte forwarded is another one than the sender's.
    damages: bool,
    streams: Vec<TcpStream>,
    is_over: bool,
}

impl Proxy {
    /// At first nothing comes back.
    pub fn new(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind(loopback(0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let accepting = shared.clone();
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if accepting.state.lock().unwrap().is_over {
                    return;
                }
                let Ok(far) = TcpStream::connect(upstream) else {
                    continue;
                };
                limit_receive_buffer(&far);
                let (near_in, mut far_out) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let ends = [near.try_clone().unwrap(), far.try_clone().unwrap()];
                accepting.state.lock().unwrap().streams.extend(ends);
                thread::spawn(move || {
                    std::io::copy(&mut &near_in, &mut far_out).ok();
                    far_out.shutdown(Shutdown::Both).ok();
                });
                let shared = accepting.clone();
                thread::spawn(move || shared.forward(far, near));
            }
        });
        Self { address, shared }
    }

    /// Lets `num_bytes` more come back.
    pub fn allow(&self, num_bytes: u64) {
        let mut state = self.shared.state.lock().unwrap();
        state.num_allowed = state.num_allowed.saturating_add(num_bytes);
        self.shared.changed.notify_all();
    }

    pub fn allow_all(&self) {
        self.allow(u64::MAX);
    }

    /// Lets bytes through at this speed, until it is dropped.
    pub fn throttle(&self, bytes_per_s: u64) {
        let shared = Arc::downgrade(&self.shared);
        thread::spawn(move || {
            while let Some(shared) = shared.upgrade() {
                let mut state = shared.state.lock().unwrap();
                // What is not used is not saved.
                let num_forwarded = state.num_forwarded;
                state.num_allowed = num_forwarded + bytes_per_s / 100;
                shared.changed.notify_all();
                drop(state);
                drop(shared);
                thread::sleep(Duration::from_millis(10));
            }
        });
    }

    pub fn num_forwarded(&self) -> u64 {
        self.shared.state.lock().unwrap().num_forwarded
    }

    pub fn damage_next_byte(&self) {
        self.shared.state.lock().unwrap().damages = true;
    }

    /// Closes what is open.
    pub fn cut(&self) {
        for stream in self.shared.state.lock().unwrap().streams.drain(..) {
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

/// So that what the proxy holds up is held up at the sender.
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
    fn forward(&self, mut from: TcpStream, mut to: TcpStream) {
        let mut buffer = [0; 16 << 10];
        loop {
            let mut state = self.state.lock().unwrap();
            while state.num_forwarded >= state.num_allowed && !state.is_over {
                state = self.changed.wait(state).unwrap();
            }
            let most = (state.num_allowed - state.num_forwarded).min(buffer.len() as u64) as usize;
            let is_over = state.is_over;
            drop(state);
            let num_bytes = match from.read(&mut buffer[..most]) {
                Ok(num_bytes) if num_bytes > 0 && !is_over => num_bytes,
                _ => break,
            };
            let mut state = self.state.lock().unwrap();
            state.num_forwarded += num_bytes as u64;
            if std::mem::take(&mut state.damages) {
                buffer[num_bytes / 2] ^= 4;
            }
            drop(state);
            if to.write_all(&buffer[..num_bytes]).is_err() {
                break;
            }
        }
        to.shutdown(Shutdown::Both).ok();
        from.shutdown(Shutdown::Both).ok();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap().is_over = true;
        self.shared.changed.notify_all();
        self.cut();
        // Wakes the thread that accepts.
        TcpStream::connect(self.address).ok();
    }
}
