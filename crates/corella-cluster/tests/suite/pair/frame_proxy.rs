//! A proxy between two nodes that inspects each frame, and passes, holds, changes or cuts it.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;

use corella_cluster::transport::{BlockVerb, FRAME_BYTES, Frame, TRAILER_BYTES};
use corella_model::KvGeometry;
use serde_json::{Map, Value, json};

use crate::pair::blocks::named;

/// The fate of a frame and its payload.
#[derive(Clone, Debug)]
pub enum Verdict {
    Pass,
    /// Holds the frame until [`FrameProxy::release`], together with the later frames of its connection.
    Hold,
    /// Sends these bytes in place of the frame.
    Replace(Vec<u8>),
    /// Ends all connections as if a process were killed. New connections lead to the next node, if any.
    Kill,
    /// Like `Kill`, after half of the frame's bytes.
    Tear,
}

/// A frame on its way, with its payload.
pub struct Passing<'a> {
    pub frame: Frame,
    pub bytes: &'a [u8],
}

impl Passing<'_> {
    /// Returns whether the frame is a message of this kind about cached blocks.
    pub fn is(&self, wanted: BlockVerb) -> bool {
        matches!(&self.frame, Frame::Blocks(frame) if frame.verb == wanted)
    }

    pub fn is_rows(&self) -> bool {
        matches!(self.frame, Frame::Data(_))
    }
}

type Judge = Box<dyn FnMut(&Passing<'_>) -> Verdict + Send>;

pub struct FrameProxy {
    /// `kv_transfer_params` that name the proxy as the source of blocks.
    pub params: Map<String, Value>,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    geometry: KvGeometry,
}

struct State {
    source: Option<SocketAddr>,
    /// Replaces a killed source.
    next: Option<SocketAddr>,
    judge: Option<Judge>,
    streams: Vec<TcpStream>,
    num_held: usize,
    num_releases: u64,
    num_kills: u64,
    is_over: bool,
}

impl FrameProxy {
    /// Passes every frame until it gets a judge.
    pub fn start(source: SocketAddr, geometry: &KvGeometry) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                source: Some(source),
                next: None,
                judge: None,
                streams: Vec::new(),
                num_held: 0,
                num_releases: 0,
                num_kills: 0,
                is_over: false,
            }),
            changed: Condvar::new(),
            geometry: geometry.clone(),
        });
        let accepting = shared.clone();
        thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if !accepting.connect(&near) {
                    return;
                }
            }
        });
        Self {
            params: named(json!({"host": "127.0.0.1", "port": address.port()})),
            address,
            shared,
        }
    }

    /// Passes each frame of either end to `judge`.
    pub fn judge(&self, judge: impl FnMut(&Passing<'_>) -> Verdict + Send + 'static) {
        self.shared.lock().judge = Some(Box::new(judge));
    }

    /// Passes every frame from now on.
    pub fn pass_all(&self) {
        self.shared.lock().judge = None;
    }

    /// Sets the node for connections after the source has been killed.
    pub fn set_next(&self, next: SocketAddr) {
        self.shared.lock().next = Some(next);
    }

    pub fn num_kills(&self) -> u64 {
        self.shared.lock().num_kills
    }

    /// Returns the number of held frames.
    pub fn num_held(&self) -> usize {
        self.shared.lock().num_held
    }

    /// Passes every frame from now on, and the held ones.
    pub fn release(&self) {
        let mut state = self.shared.lock();
        state.judge = None;
        state.num_releases += 1;
        self.shared.changed.notify_all();
    }

    pub fn kill(&self) {
        self.shared.lock().kill();
        self.shared.changed.notify_all();
    }
}

impl Drop for FrameProxy {
    fn drop(&mut self) {
        self.shared.lock().is_over = true;
        self.kill();
        // This connection wakes the accepting thread.
        TcpStream::connect(self.address).ok();
    }
}

impl State {
    fn kill(&mut self) {
        self.num_kills += 1;
        self.source = self.next.take();
        for stream in self.streams.drain(..) {
            stream.shutdown(Shutdown::Both).ok();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Returns false when the proxy is dropped.
    fn connect(self: &Arc<Self>, near: &TcpStream) -> bool {
        // The lock is held, so that no connection escapes a kill.
        let mut state = self.lock();
        let far = state.source.map(TcpStream::connect);
        if let Some(Ok(far)) = far {
            for (from, to) in [(near, &far), (&far, near)] {
                let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                state.streams.push(from.try_clone().unwrap());
                let shared = self.clone();
                thread::spawn(move || {
                    shared.forward(&from, &to).ok();
                    to.shutdown(Shutdown::Both).ok();
                    from.shutdown(Shutdown::Both).ok();
                });
            }
        }
        !state.is_over
    }

    fn forward(&self, mut from: &TcpStream, mut to: &TcpStream) -> io::Result<()> {
        let mut bytes = vec![0; FRAME_BYTES];
        loop {
            bytes.resize(FRAME_BYTES, 0);
            from.read_exact(&mut bytes)?;
            let frame = Frame::decode(bytes.first_chunk().expect("a frame is there"));
            let frame = frame.expect("nodes send valid frames");
            bytes.resize(FRAME_BYTES + self.payload_bytes(&frame), 0);
            from.read_exact(&mut bytes[FRAME_BYTES..])?;
            let passing = Passing {
                frame,
                bytes: &bytes,
            };
            match self.verdict(&passing) {
                Verdict::Pass => to.write_all(&bytes)?,
                Verdict::Replace(other) => to.write_all(&other)?,
                Verdict::Hold => match self.wait() {
                    true => to.write_all(&bytes)?,
                    false => return Ok(()),
                },
                // Later frames are lost, too.
                Verdict::Kill => {
                    self.kill();
                    return Ok(());
                }
                Verdict::Tear => {
                    to.write_all(&bytes[..bytes.len() / 2])?;
                    self.kill();
                    return Ok(());
                }
            }
        }
    }

    fn payload_bytes(&self, frame: &Frame) -> usize {
        match frame {
            Frame::Blocks(frame) => frame.num_bytes as usize,
            Frame::Path(frame) => frame.num_bytes as usize,
            Frame::Data(run) => {
                let num_pages = run.num_rows.div_ceil(self.geometry.page_size) as usize;
                num_pages * self.geometry.layer_bytes() + TRAILER_BYTES
            }
            _ => 0,
        }
    }

    fn verdict(&self, passing: &Passing<'_>) -> Verdict {
        let mut state = self.lock();
        let judge = state.judge.as_mut();
        judge.map_or(Verdict::Pass, |judge| judge(passing))
    }

    /// Returns false if the connection has ended meanwhile.
    fn wait(&self) -> bool {
        let mut state = self.lock();
        let before = (state.num_releases, state.num_kills);
        state.num_held += 1;
        while (state.num_releases, state.num_kills) == before {
            state = self.changed.wait(state).unwrap();
        }
        state.num_held -= 1;
        state.num_kills == before.1
    }

    fn kill(&self) {
        self.lock().kill();
        self.changed.notify_all();
    }
}
