//! A receiver's connection, on the sender's side.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use corella_core::Incarnation;
use corella_core::session::SessionKey;
use corella_model::PageForm;

use super::bandwidth_meter::BandwidthMeter;
use super::chunk::ChunkWriter;
use super::frame::{Frame, LoadFrame, Refusal};
use super::frame_queue::FrameQueue;
use super::frame_reader::{FrameReader, violation};
use super::outgoing::{Next, Outgoing};
use super::sender_state::SenderState;
use super::socket::Socket;
use super::store_table::Lookup;

/// What is stored for anybody is stored about when others hear of it.
const ANYBODY_WAIT: Duration = Duration::from_secs(1);

pub struct SenderConnection {
    pub socket: Socket,
    pub form: PageForm,
    /// Whether the receiver reads native pages from this node's memory.
    sends_places: bool,
    peer_incarnation: u64,
    max_loads: usize,
    frames: FrameQueue,
    loads: Mutex<Loads>,
    meter: Arc<Mutex<BandwidthMeter>>,
}

#[derive(Default)]
struct Loads {
    by_id: HashMap<u64, Load>,
    /// Those that have something to send, each once and in turn.
    ready: VecDeque<u64>,
    is_closed: bool,
}

#[derive(Clone)]
enum Load {
    Waiting(SessionKey),
    Serving(Arc<Outgoing>),
}

impl SenderConnection {
    pub fn new(
        socket: Socket,
        form: PageForm,
        sends_places: bool,
        peer_incarnation: u64,
        max_loads: usize,
        meter: Arc<Mutex<BandwidthMeter>>,
    ) -> Self {
        Self {
            socket,
            form,
            sends_places,
            peer_incarnation,
            max_loads,
            frames: FrameQueue::default(),
            loads: Mutex::default(),
            meter,
        }
    }

    pub fn meter(&self) -> MutexGuard<'_, BandwidthMeter> {
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn loads(&self) -> MutexGuard<'_, Loads> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn send(&self, frame: &Frame) {
        if !self.frames.push(frame) {
            self.socket.shut_down();
        }
    }

    /// Whether there is room for a load that has to wait.
    pub fn add_waiting(&self, load_id: u64, key: SessionKey) -> bool {
        self.add(load_id, Load::Waiting(key))
    }

    /// Returns false when the connection is lost, or has as many loads as it may.
    pub fn add_load(&self, load_id: u64, outgoing: &Arc<Outgoing>) -> bool {
        self.add(load_id, Load::Serving(outgoing.clone()))
    }

    fn add(&self, load_id: u64, load: Load) -> bool {
        let mut loads = self.loads();
        let has_room = !loads.is_closed && loads.by_id.len() < self.max_loads;
        if has_room {
            loads.by_id.insert(load_id, load);
        }
        has_room
    }

    pub fn remove_load(&self, load_id: u64) {
        let mut loads = self.loads();
        loads.by_id.remove(&load_id);
        loads.ready.retain(|&other| other != load_id);
    }

    /// The writer looks at this load when it is its turn.
    pub fn queue(&self, load_id: u64) {
        self.loads().ready.push_back(load_id);
        self.frames.wake.notify_one();
    }

    fn next_ready(&self) -> Option<(u64, Arc<Outgoing>)> {
        let mut loads = self.loads();
        while let Some(load_id) = loads.ready.pop_front() {
            if let Some(Load::Serving(outgoing)) = loads.by_id.get(&load_id) {
                return Some((load_id, outgoing.clone()));
            }
        }
        None
    }

    fn is_closed(&self) -> bool {
        self.loads().is_closed
    }

    /// Serves the peer until its connection ends, or this is dropped.
    pub async fn run(
        self: &Arc<Self>,
        sender: &Arc<SenderState>,
        reader: FrameReader,
    ) -> io::Result<()> {
        let _closing = Closing(self, sender);
        let writer = tokio::spawn({
            let (connection, sender) = (self.clone(), sender.clone());
            async move {
                let result = connection.write(&sender).await;
                connection.socket.shut_down();
                result
            }
        });
        tokio::select! {
            result = self.read(sender, reader) => result,
            // A panic is as much of an end.
            result = writer => result.unwrap_or_else(|error| Err(io::Error::other(error))),
        }
    }

    /// Everybody who was served here is told, so that nothing waits for a connection that is gone.
    fn close(self: &Arc<Self>, sender: &Arc<SenderState>) {
        self.socket.shut_down();
        let loads = {
            let mut loads = self.loads();
            loads.is_closed = true;
            loads.ready.clear();
            std::mem::take(&mut loads.by_id)
        };
        for (load_id, load) in loads {
            self.stop(sender, load_id, load);
        }
        self.frames.wake.notify_one();
    }

    fn stop(self: &Arc<Self>, sender: &SenderState, load_id: u64, load: Load) {
        match load {
            Load::Waiting(key) => sender.table().cancel(self, load_id, &key),
            Load::Serving(outgoing) => outgoing.stop_serving(load_id),
        }
    }

    async fn read(
        self: &Arc<Self>,
        sender: &Arc<SenderState>,
        mut reader: FrameReader,
    ) -> io::Result<()> {
        loop {
            let idle_timeout = sender.config.idle_timeout;
            let frame = match tokio::time::timeout(idle_timeout, reader.next(&self.socket)).await {
                Ok(frame) => frame?,
                // Loads have deadlines of their own.
                Err(_) if !self.loads().by_id.is_empty() => continue,
                Err(_) => return Ok(()),
            };
            let now = Instant::now();
            match frame {
                Frame::Load(load) => self.handle_load(sender, load, now)?,
                Frame::Credit { load_id, num_bytes } => {
                    if let Some(outgoing) = self.serving(load_id) {
                        outgoing.handle_credit(load_id, num_bytes.into(), now);
                    }
                }
                Frame::Received { load_id } => {
                    if let Some(outgoing) = self.serving(load_id) {
                        outgoing.handle_received(load_id, now);
                    }
                }
                Frame::Cancel { load_id } => {
                    let load = self.loads().by_id.get(&load_id).cloned();
                    if let Some(load) = load {
                        self.stop(sender, load_id, load);
                        self.remove_load(load_id);
                    }
                }
                _ => return Err(violation("a frame that a receiver must not send here")),
            }
        }
    }

    fn serving(&self, load_id: u64) -> Option<Arc<Outgoing>> {
        match self.loads().by_id.get(&load_id) {
            Some(Load::Serving(outgoing)) => Some(outgoing.clone()),
            _ => None,
        }
    }

    fn handle_load(
        self: &Arc<Self>,
        sender: &Arc<SenderState>,
        load: LoadFrame,
        now: Instant,
    ) -> io::Result<()> {
        let LoadFrame { load_id, key, .. } = load;
        if self.loads().by_id.contains_key(&load_id) {
            return Err(violation("a load's id a second time"));
        }
        let is_theirs = key.decode_incarnation == Incarnation::ANY
            || key.decode_incarnation.0 == self.peer_incarnation;
        let reason = if !is_theirs {
            Refusal::OtherIncarnation
        } else if self.loads().by_id.len() >= self.max_loads {
            Refusal::Busy
        } else {
            let most = match key.decode_incarnation {
                Incarnation::ANY => ANYBODY_WAIT,
                _ => sender.config.max_wait,
            };
            let wait = Duration::from_millis(load.wait_ms.into()).min(most);
            let lookup = sender.table().look_up(self, load, now + wait, now);
            match lookup {
                Lookup::Stored(outgoing) => {
                    outgoing.serve(self, &load);
                    return Ok(());
                }
                Lookup::Waits => {
                    sender.deadlines_changed.notify_one();
                    return Ok(());
                }
                Lookup::Refused(reason) => reason,
            }
        };
        self.send(&Frame::Failed { load_id, reason });
        Ok(())
    }

    async fn write(&self, sender: &SenderState) -> io::Result<()> {
        let stall_timeout = sender.config.stall_timeout;
        let mut chunks = ChunkWriter::new(self.sends_places, stall_timeout);
        let (mut frames, mut pages) = (Vec::new(), Vec::new());
        loop {
            self.frames.take(&mut frames);
            chunks.write_bytes(&self.socket, &frames).await?;
            let Some((load_id, outgoing)) = self.next_ready() else {
                if self.is_closed() {
                    return Ok(());
                }
                self.frames.wake.notified().await;
                continue;
            };
            match outgoing.next(load_id, self.form, sender.chunk_bytes, &mut pages) {
                Next::Data(run) => {
                    let num_bytes = pages.len() * outgoing.pages.geometry().layer_bytes();
                    let wait = sender.take_bandwidth(num_bytes);
                    if !wait.is_zero() {
                        tokio::time::sleep(wait).await;
                    }
                    chunks.write(&self.socket, &outgoing, run, &pages).await?;
                    outgoing.note_sent(num_bytes, pages.len());
                    self.requeue(load_id);
                    // Sockets inside a host may never block: others have their turn.
                    tokio::task::yield_now().await;
                }
                Next::Frame(frame) => {
                    self.send(&frame);
                    self.requeue(load_id);
                }
                Next::Nothing => {}
            }
        }
    }

    fn requeue(&self, load_id: u64) {
        let mut loads = self.loads();
        if loads.by_id.contains_key(&load_id) {
            loads.ready.push_back(load_id);
        }
    }
}

struct Closing<'a>(&'a Arc<SenderConnection>, &'a Arc<SenderState>);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close(self.1);
    }
}

#[cfg(test)]
mod tests;
