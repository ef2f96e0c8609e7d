//! A connection to a sender, on the receiver's side.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use corella_core::Arithmetic;
use corella_core::session::LoadKey;
use corella_engine::rare_line;
use corella_model::{PageConversion, PageForm};

use super::block_message::BlockMessage;
use super::checksum::Checksum;
use super::chunk::ChunkWriter;
use super::connection_queue::{ConnectionId, ConnectionQueue};
use super::frame::{Frame, MAX_PAYLOAD_BYTES, MAX_STATE_BYTES, PageRun, StateRun, Trailer};
use super::frame_reader::{FrameReader, violation};
use super::incoming::{Incoming, LoadFailure};
use super::io_parts::IoParts;
use super::memory_region::{MemoryRegion, REGION_BYTES};
use super::path::tcp::TcpReader;
use super::path_name::PathName;
use super::receiver_state::ReceiverState;
use super::row_path::{RowReader, Target};
use super::socket::Socket;
use super::{Hello, Incompatibility};

/// A sender is given up if it reads no messages for this long, or if its memory cannot be read for this long.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

pub struct ReceiverConnection {
    socket: Socket,
    /// The sender's greeting.
    pub hello: Hello,
    form: PageForm,
    /// Converts the sender's canonical pages to this node's.
    conversion: PageConversion,
    queue: Arc<ConnectionQueue>,
}

impl ReceiverConnection {
    /// Returns `None` for a sender whose rows have another shape.
    pub fn new(socket: Socket, hello: Hello, form: PageForm, own: &Hello) -> Option<Self> {
        // The receiver limits the loads over all connections together.
        let queue = ConnectionQueue::new(ConnectionId(0), usize::MAX, Arc::default());
        Some(Self {
            conversion: PageConversion::new(&hello.geometry, &own.geometry)?,
            socket,
            hello,
            form,
            queue: Arc::new(queue),
        })
    }

    /// Refuses a sender whose rows have other bits than rows of `arithmetic`.
    pub fn check_arithmetic(&self, arithmetic: Arithmetic) -> Result<(), LoadFailure> {
        match self.hello.arithmetic == arithmetic {
            true => Ok(()),
            false => Err(LoadFailure::Incompatible(Incompatibility::Arithmetic)),
        }
    }

    /// Requests a load over this connection.
    pub fn open(&self, load: &Incoming, window_bytes: u32) {
        if let Err(failure) = self.check_arithmetic(load.request.arithmetic) {
            return load.fail(failure);
        }
        load.open(&self.queue, &self.hello, window_bytes);
    }

    /// Sends a message about a load of cached blocks.
    pub fn send_blocks(&self, message: &[u8]) {
        self.queue.frames.push_bytes(message);
    }

    pub fn shut_down(&self) {
        self.socket.shut_down();
    }

    pub fn is_closed(&self) -> bool {
        self.queue.is_closed()
    }

    /// Runs until the connection ends, or this is dropped. `memory` reads the sender's memory, if the path is agreed.
    pub async fn run(
        self: &Arc<Self>,
        receiver: &ReceiverState,
        memory: Option<SenderMemory>,
    ) -> io::Result<()> {
        let _closing = Closing(self, receiver);
        let mut reader = RunReader::new(self, receiver, memory);
        tokio::select! {
            result = reader.run() => result,
            result = self.write() => result,
            error = self.queue.frames.overflow() => Err(error),
        }
    }

    async fn write(&self) -> io::Result<()> {
        let mut writer = ChunkWriter::new(false, STALL_TIMEOUT);
        let mut frames = Vec::new();
        loop {
            self.queue.frames.take(&mut frames);
            writer.write_bytes(&self.socket, &frames).await?;
            self.queue.frames.wake.notified().await;
        }
    }
}

struct Closing<'a>(&'a ReceiverConnection, &'a ReceiverState);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.socket.shut_down();
        for (load_id, _) in self.0.queue.close() {
            let load = self.1.loads().get(&load_id).cloned();
            if let Some(load) = load {
                load.handle_lost();
            }
        }
    }
}

/// Reads pages from a sender's memory, for frames without a payload.
pub struct SenderMemory {
    pub path: PathName,
    pub reader: Box<dyn RowReader>,
}

/// Reads frames, and the rows of each run by the agreed path.
struct RunReader<'a> {
    connection: &'a ReceiverConnection,
    receiver: &'a ReceiverState,
    frames: FrameReader,
    rows: TcpReader,
    memory: Option<SenderMemory>,
    parts: IoParts,
    regions: Vec<u8>,
    /// A buffer for a layer's recurrent state on its way to a snapshot.
    state: Vec<u8>,
    hasher: Checksum,
}

impl<'a> RunReader<'a> {
    fn new(
        connection: &'a ReceiverConnection,
        receiver: &'a ReceiverState,
        memory: Option<SenderMemory>,
    ) -> Self {
        Self {
            connection,
            receiver,
            frames: FrameReader::new(),
            rows: TcpReader::new(connection.conversion.clone()),
            memory,
            parts: IoParts::default(),
            regions: Vec::new(),
            state: Vec::new(),
            hasher: Checksum::new(),
        }
    }

    async fn run(&mut self) -> io::Result<()> {
        loop {
            let frame = self.frames.next(&self.connection.socket).await?;
            let (load_id, result) = match frame {
                Frame::Data(run) => (run.load_id, self.read_run(run).await?),
                Frame::State(run) => (run.load_id, self.read_state(run).await?),
                Frame::Complete { load_id, num_rows } => {
                    let load = self.load(load_id);
                    (
                        load_id,
                        load.map_or(Ok(()), |load| load.handle_complete(num_rows)),
                    )
                }
                Frame::Failed { load_id, reason } => {
                    if let Some(load) = self.load(load_id) {
                        load.fail(LoadFailure::Refused(reason));
                    }
                    (load_id, Ok(()))
                }
                Frame::Blocks(frame) => {
                    let socket = &self.connection.socket;
                    let message = self.frames.block_message(socket, &frame).await?;
                    self.handle_blocks(frame.key, message)?;
                    continue;
                }
                _ => return Err(violation("a frame that a sender must not send here")),
            };
            // A fast sender on this host never lets the socket run dry, so other tasks get a turn here.
            tokio::task::yield_now().await;
            if let Err(what) = result {
                if let Some(load) = self.load(load_id) {
                    load.fail(LoadFailure::Violation(what));
                }
                return Err(violation(what));
            }
        }
    }

    fn handle_blocks(&self, key: LoadKey, message: BlockMessage) -> io::Result<()> {
        let BlockMessage::ToFetcher(message) = message else {
            return Err(violation("a request to a source of blocks"));
        };
        let ends = (key.fetcher.0, key.source.0);
        if ends
            != (
                self.receiver.hello.incarnation,
                self.connection.hello.incarnation,
            )
        {
            return Err(violation("the key of another node's load"));
        }
        if let Some(client) = self.receiver.block_client.get() {
            client.handle_answer(key, message);
        }
        Ok(())
    }

    /// Returns a load of this connection, unless it is over.
    fn load(&self, load_id: u64) -> Option<Arc<Incoming>> {
        let is_here = self.connection.queue.key_of(load_id).is_some();
        is_here.then(|| self.receiver.loads().get(&load_id).cloned())?
    }

    /// Reads a run. The inner error is the sender's violation.
    async fn read_run(&mut self, run: PageRun) -> io::Result<Result<(), &'static str>> {
        let receiver = self.receiver;
        let geometry = &self.connection.hello.geometry;
        let num_pages = run.num_rows.div_ceil(geometry.page_size) as usize;
        let num_bytes = match num_pages.checked_mul(geometry.layer_bytes()) {
            Some(num_bytes) if num_pages == 1 || num_bytes <= MAX_PAYLOAD_BYTES => num_bytes,
            _ => return Ok(Err("more rows than a frame may have")),
        };
        if !run.first_row.is_multiple_of(geometry.page_size) || run.form != self.connection.form {
            return Ok(Err("rows that do not begin a page, or in another form"));
        }
        // A page has at most two parts.
        let reads_memory = self.memory.is_some() && run.form == PageForm::Native;
        if run.num_regions > 0 && (!reads_memory || run.num_regions as usize > 2 * num_pages) {
            return Ok(Err("regions in a memory that cannot be read"));
        }
        let load = self.load(run.load_id);
        let load = load.as_deref();
        match load.map(|load| load.check(&run, num_bytes)) {
            Some(Err(what)) => return Ok(Err(what)),
            Some(Ok(())) => {}
            None => {
                receiver.num_unknown_frames.fetch_add(1, Ordering::Relaxed);
            }
        }
        let socket = &self.connection.socket;
        let read = match run.num_regions {
            0 => {
                let frames = &mut self.frames;
                let read = self.rows.read(socket, frames, &run, num_bytes, load);
                read.await?
            }
            _ => match self.read_places(&run, num_bytes, load).await? {
                Ok(read) => read,
                Err(what) => return Ok(Err(what)),
            },
        };
        let (Some(load), Some(is_whole)) = (load, read) else {
            return Ok(Ok(()));
        };
        if !is_whole {
            receiver.num_corrupt_frames.fetch_add(1, Ordering::Relaxed);
            load.fail(LoadFailure::Corrupt);
            return match run.num_regions {
                0 => Err(violation("pages that do not have their checksum")),
                // The sender has taken its pages back, or its memory could not be read. The connection's other loads
                // are unaffected.
                _ => Ok(Ok(())),
            };
        }
        if run.form == PageForm::Native {
            load.note_written(&run);
        }
        if let Some(memory) = self.memory.as_ref().filter(|_| run.num_regions > 0) {
            receiver.count_read(memory.path, num_bytes as u64);
        }
        load.handle_run(&run, num_bytes, num_pages);
        Ok(Ok(()))
    }

    /// Reads a recurrent state. The inner error is the sender's violation.
    async fn read_state(&mut self, run: StateRun) -> io::Result<Result<(), &'static str>> {
        let num_bytes = run.num_bytes as usize;
        if num_bytes > MAX_STATE_BYTES {
            return Ok(Err("a larger recurrent state than any model has"));
        }
        let load = self.load(run.load_id);
        self.parts.clear();
        match load.as_deref().map(|load| load.check_state(&run)) {
            Some(Err(what)) => return Ok(Err(what)),
            Some(Ok(())) => {
                self.state.resize(num_bytes, 0);
                self.parts.push(NonNull::from(self.state.as_mut_slice()));
            }
            None => {
                let num_unknown = &self.receiver.num_unknown_frames;
                num_unknown.fetch_add(1, Ordering::Relaxed);
                self.frames.push_rubbish(&mut self.parts, num_bytes);
            }
        }
        let socket = &self.connection.socket;
        let (parts, hasher) = (&mut self.parts, &mut self.hasher);
        // SAFETY: own memory.
        let trailer = unsafe {
            self.frames
                .read_payload(socket, parts, None, hasher)
                .await?
        };
        let (Some(load), Trailer::Whole { checksum }) = (load, trailer) else {
            return Ok(Ok(()));
        };
        if checksum != self.hasher.value() {
            let num_corrupt = &self.receiver.num_corrupt_frames;
            num_corrupt.fetch_add(1, Ordering::Relaxed);
            load.fail(LoadFailure::Corrupt);
            return Err(violation(
                "a recurrent state that does not have its checksum",
            ));
        }
        load.handle_state(&run, &self.state);
        Ok(Ok(()))
    }

    /// Reads a run from the sender's memory. Returns whether it was read with its checksum, or `None` if its load has
    /// ended.
    async fn read_places(
        &mut self,
        run: &PageRun,
        num_bytes: usize,
        load: Option<&Incoming>,
    ) -> io::Result<Result<Option<bool>, &'static str>> {
        let socket = &self.connection.socket;
        self.regions
            .resize(run.num_regions as usize * REGION_BYTES, 0);
        self.parts.clear();
        self.parts.push(NonNull::from(self.regions.as_mut_slice()));
        let (parts, hasher) = (&mut self.parts, &mut self.hasher);
        // SAFETY: own memory.
        let trailer = unsafe {
            self.frames
                .read_payload(socket, parts, None, hasher)
                .await?
        };
        let (Some(load), Some(memory)) = (load, &mut self.memory) else {
            return Ok(Ok(None));
        };
        let Trailer::Whole { checksum } = trailer else {
            return Ok(Ok(None));
        };
        let (regions, _) = self.regions.as_chunks();
        let mut regions = regions.iter().map(MemoryRegion::decode);
        if !memory.reader.set_regions(&mut regions, num_bytes) {
            return Ok(Err("regions of another size than the pages"));
        }
        parts.clear();
        load.native_parts_of(run).for_each(|part| parts.push(part));
        let target = Target {
            to: parts,
            gate: &load.gate,
            hasher,
            checksum,
            socket,
            stall_timeout: STALL_TIMEOUT,
        };
        // SAFETY: pages that are reserved for a load as long as its gate is open.
        let read = unsafe { memory.reader.read(target) }.await;
        let read = read.inspect_err(|error| {
            rare_line!(info, "a KV connection is given up: {error}");
        })?;
        Ok(Ok(read))
    }
}
