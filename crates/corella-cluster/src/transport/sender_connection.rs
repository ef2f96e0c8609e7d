//! A receiver's connection at the sender.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::Incarnation;
use corella_core::session::{LoadFailure, LoadKey, SessionKey, ToFetcher};
use corella_model::PageForm;

use super::block_message::BlockMessage;
use super::block_server::BlockReply;
use super::chunk::ChunkWriter;
use super::connection_queue::ConnectionQueue;
use super::frame::{Frame, LoadFrame, Refusal};
use super::frame_reader::{FrameReader, violation};
use super::outgoing::{Next, Outgoing};
use super::sender_state::SenderState;
use super::socket::Socket;
use super::timed_exports::Lookup;

/// The limit of the wait for a prompt that is kept for any node. The other node learns of the prompt at about the time
/// of the export.
const ANYBODY_WAIT: Duration = Duration::from_secs(1);

pub struct SenderConnection {
    queue: Arc<ConnectionQueue>,
    socket: Socket,
    form: PageForm,
    /// Whether the receiver reads native pages from this node's memory.
    sends_regions: bool,
    peer_incarnation: u64,
}

impl SenderConnection {
    pub fn new(
        queue: ConnectionQueue,
        socket: Socket,
        form: PageForm,
        sends_regions: bool,
        peer_incarnation: u64,
    ) -> Self {
        Self {
            queue: Arc::new(queue),
            socket,
            form,
            sends_regions,
            peer_incarnation,
        }
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
            error = self.queue.frames.overflow() => Err(error),
            // A panic ends the connection like an error.
            result = writer => result.unwrap_or_else(|error| Err(io::Error::other(error))),
        }
    }

    /// Tells every session served here, so that none waits for a closed connection.
    fn close(&self, sender: &SenderState) {
        self.socket.shut_down();
        for (load_id, key) in self.queue.close() {
            self.stop(sender, load_id, &key);
        }
        if let Some(server) = sender.blocks.get() {
            server.handle_lost(self.queue.id);
        }
    }

    fn stop(&self, sender: &SenderState, load_id: u64, key: &SessionKey) {
        let outgoing = {
            let mut table = sender.table();
            table.cancel(self.queue.id, load_id, key);
            table.get(key).cloned()
        };
        if let Some(outgoing) = outgoing {
            outgoing.stop_serving(self.queue.id, load_id);
        }
    }

    async fn read(&self, sender: &SenderState, mut reader: FrameReader) -> io::Result<()> {
        loop {
            let idle_timeout = sender.config.idle_timeout;
            let frame = match tokio::time::timeout(idle_timeout, reader.next(&self.socket)).await {
                Ok(frame) => frame?,
                // Loads have their own deadlines.
                Err(_) if !self.queue.is_empty() => continue,
                Err(_) => return Ok(()),
            };
            let now = Instant::now();
            match frame {
                Frame::Load(load) => self.handle_load(sender, load, now)?,
                Frame::Credit { load_id, num_bytes } => {
                    if let Some(outgoing) = self.serving(sender, load_id) {
                        outgoing.handle_credit(self.queue.id, load_id, num_bytes.into(), now);
                    }
                }
                Frame::Received { load_id } => {
                    if let Some(outgoing) = self.serving(sender, load_id) {
                        outgoing.handle_received(self.queue.id, load_id, now);
                    }
                }
                Frame::Cancel { load_id } => {
                    if let Some(key) = self.queue.key_of(load_id) {
                        self.stop(sender, load_id, &key);
                        self.queue.remove_load(load_id);
                    }
                }
                Frame::Blocks(frame) => {
                    let message = reader.block_message(&self.socket, &frame).await?;
                    self.handle_blocks(sender, frame.key, message)?;
                }
                _ => return Err(violation("a frame that a receiver must not send here")),
            }
        }
    }

    /// Returns the session that a load asks for, if it is exported.
    fn serving(&self, sender: &SenderState, load_id: u64) -> Option<Arc<Outgoing>> {
        let key = self.queue.key_of(load_id)?;
        sender.exported(&key)
    }

    fn handle_load(&self, sender: &SenderState, load: LoadFrame, now: Instant) -> io::Result<()> {
        let LoadFrame { load_id, key, .. } = load;
        if self.queue.key_of(load_id).is_some() {
            return Err(violation("a load's id a second time"));
        }
        let is_theirs = key.decode_incarnation == Incarnation::ANY
            || key.decode_incarnation.0 == self.peer_incarnation;
        let reason = if !is_theirs {
            Refusal::OtherIncarnation
        } else if self.queue.is_full() {
            Refusal::Busy
        } else {
            let most = match key.decode_incarnation {
                Incarnation::ANY => ANYBODY_WAIT,
                _ => sender.config.max_wait,
            };
            let wait = Duration::from_millis(load.wait_ms.into()).min(most);
            let lookup = sender.table().look_up(&self.queue, load, now + wait, now);
            match lookup {
                Lookup::Exported(outgoing) => {
                    outgoing.serve(&self.queue, &load);
                    return Ok(());
                }
                Lookup::Waits => {
                    sender.deadlines_changed.notify_one();
                    return Ok(());
                }
                Lookup::Refused(reason) => reason,
            }
        };
        self.queue.send(&Frame::Failed { load_id, reason });
        Ok(())
    }

    fn handle_blocks(
        &self,
        sender: &SenderState,
        key: LoadKey,
        message: BlockMessage,
    ) -> io::Result<()> {
        let BlockMessage::ToSource(message) = message else {
            return Err(violation("the answer of a source of blocks"));
        };
        if key.fetcher.0 != self.peer_incarnation {
            return Err(violation("the key of another node's load"));
        }
        let reply = BlockReply::new(self.queue.clone());
        match sender.blocks.get() {
            Some(server) => server.handle_message(&reply, key, message),
            None => reply.send(key, ToFetcher::Failed(LoadFailure::Refused)),
        }
        Ok(())
    }

    async fn write(&self, sender: &SenderState) -> io::Result<()> {
        let stall_timeout = sender.config.stall_timeout;
        let mut chunks = ChunkWriter::new(self.sends_regions, stall_timeout);
        let (mut frames, mut pages) = (Vec::new(), Vec::new());
        loop {
            self.queue.frames.take(&mut frames);
            chunks.write_bytes(&self.socket, &frames).await?;
            let Some((load_id, key)) = self.queue.next_ready() else {
                if self.queue.is_closed() {
                    return Ok(());
                }
                self.queue.frames.wake.notified().await;
                continue;
            };
            let Some(outgoing) = sender.exported(&key) else {
                continue;
            };
            let (id, form, max_bytes) = (self.queue.id, self.form, sender.chunk_bytes);
            match outgoing.next(id, load_id, form, max_bytes, &mut pages) {
                Next::Data(run) => {
                    let num_bytes = pages.len() * outgoing.pages.geometry().layer_bytes();
                    let wait = sender.take_bandwidth(num_bytes);
                    if !wait.is_zero() {
                        tokio::time::sleep(wait).await;
                    }
                    chunks.write(&self.socket, &outgoing, run, &pages).await?;
                    outgoing.note_sent(num_bytes, pages.len());
                    self.queue.requeue(load_id);
                    // Sockets inside a host may never block, so other tasks get a turn here.
                    tokio::task::yield_now().await;
                }
                Next::State(run, snapshot) => {
                    let num_bytes = run.num_bytes as usize;
                    let wait = sender.take_bandwidth(num_bytes);
                    if !wait.is_zero() {
                        tokio::time::sleep(wait).await;
                    }
                    let socket = &self.socket;
                    chunks.write_state(socket, &outgoing, run, snapshot).await?;
                    outgoing.note_sent(num_bytes, 0);
                    self.queue.requeue(load_id);
                    tokio::task::yield_now().await;
                }
                Next::Frame(frame) => {
                    self.queue.send(&frame);
                    self.queue.requeue(load_id);
                }
                Next::Nothing => {}
            }
        }
    }
}

struct Closing<'a>(&'a SenderConnection, &'a SenderState);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.close(self.1);
    }
}

#[cfg(test)]
mod tests;
