//! A connection to a sender, on the receiver's side.

use std::collections::HashMap;
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use corella_engine::rare_line;
use corella_model::{PageConversion, PageForm};

use super::Hello;
use super::checksum::Checksum;
use super::chunk::ChunkWriter;
use super::frame::{FRAME_BYTES, Frame, MAX_PAYLOAD_BYTES, PageRun, TRAILER_BYTES, Trailer};
use super::frame_queue::FrameQueue;
use super::frame_reader::violation;
use super::host_memory::{HostMemory, PLACE_BYTES, Place};
use super::incoming::{Incoming, LoadFailure};
use super::io_parts::IoParts;
use super::nixl::NixlReader;
use super::receiver_state::ReceiverState;
use super::sender_memory::SenderMemory;
use super::socket::Socket;

/// A sender that does not read what it is told for so long, or whose memory cannot be read for so long, is
/// given up.
const STALL_TIMEOUT: Duration = Duration::from_secs(10);

pub struct ReceiverConnection {
    socket: Socket,
    /// The sender's.
    pub hello: Hello,
    form: PageForm,
    /// From the sender's canonical pages to this node's.
    conversion: PageConversion,
    /// The sender's process, if pages are copied from its memory.
    pid: Option<libc::pid_t>,
    frames: FrameQueue,
    loads: Mutex<Loads>,
}

#[derive(Default)]
struct Loads {
    by_id: HashMap<u64, Arc<Incoming>>,
    is_closed: bool,
}

impl ReceiverConnection {
    /// `None` for a sender whose rows have another shape.
    pub fn new(socket: Socket, hello: Hello, form: PageForm, own: &Hello) -> Option<Self> {
        Some(Self {
            conversion: PageConversion::new(&hello.geometry, &own.geometry)?,
            pid: socket.peer_pid(),
            socket,
            hello,
            form,
            frames: FrameQueue::default(),
            loads: Mutex::default(),
        })
    }

    fn loads(&self) -> MutexGuard<'_, Loads> {
        self.loads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn send(&self, frame: &Frame) {
        if !self.frames.push(frame) {
            self.socket.shut_down();
        }
    }

    /// False when the connection is lost.
    pub fn add_load(&self, load: &Arc<Incoming>) -> bool {
        let mut loads = self.loads();
        if !loads.is_closed {
            loads.by_id.insert(load.load_id, load.clone());
        }
        !loads.is_closed
    }

    pub fn remove_load(&self, load_id: u64) {
        self.loads().by_id.remove(&load_id);
    }

    fn load(&self, load_id: u64) -> Option<Arc<Incoming>> {
        self.loads().by_id.get(&load_id).cloned()
    }

    pub fn shut_down(&self) {
        self.socket.shut_down();
    }

    pub fn is_closed(&self) -> bool {
        self.loads().is_closed
    }

    /// Until the connection ends, or this is dropped.
    /// `nixl` reads the sender's memory, if that is agreed.
    pub async fn run(
        self: &Arc<Self>,
        receiver: &ReceiverState,
        nixl: Option<NixlReader>,
    ) -> io::Result<()> {
        let _closing = Closing(self);
        let mut reader = PayloadReader::new(self, nixl);
        tokio::select! {
            result = reader.run(receiver) => result,
            result = self.write() => result,
        }
    }

    async fn write(&self) -> io::Result<()> {
        let mut writer = ChunkWriter::new(false, STALL_TIMEOUT);
        let mut frames = Vec::new();
        loop {
            self.frames.take(&mut frames);
            writer.write_bytes(&self.socket, &frames).await?;
            self.frames.wake.notified().await;
        }
    }
}

struct Closing<'a>(&'a ReceiverConnection);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.socket.shut_down();
        let loads = {
            let mut loads = self.0.loads();
            loads.is_closed = true;
            std::mem::take(&mut loads.by_id)
        };
        for load in loads.into_values() {
            load.handle_lost();
        }
    }
}

/// Reads frames, and what follows them straight into pages.
struct PayloadReader<'a> {
    connection: &'a ReceiverConnection,
    parts: IoParts,
    /// A trailer and the frame behind it, which one call takes in together with the end of a payload.
    ahead: Box<[u8; TRAILER_BYTES + FRAME_BYTES]>,
    num_ahead: usize,
    /// For pages in their canonical form, and for places.
    copy: Vec<u8>,
    /// For such pages as this node keeps them.
    own: Vec<u8>,
    conversion: PageConversion,
    memory: Option<SenderMemory>,
    /// For what nobody wants.
    rubbish: Vec<u8>,
    hasher: Checksum,
}

/// Where a payload goes.
enum Sink {
    Pages(Arc<Incoming>),
    Copy(Arc<Incoming>),
    Nowhere,
}

impl<'a> PayloadReader<'a> {
    fn new(connection: &'a ReceiverConnection, nixl: Option<NixlReader>) -> Self {
        let on_this_host = || connection.pid.map(HostMemory::new);
        Self {
            connection,
            parts: IoParts::default(),
            ahead: Box::new([0; TRAILER_BYTES + FRAME_BYTES]),
            num_ahead: 0,
            copy: Vec::new(),
            own: Vec::new(),
            conversion: connection.conversion.clone(),
            memory: match nixl {
                Some(reader) => Some(SenderMemory::ByNixl(reader)),
                None => on_this_host().map(SenderMemory::OnThisHost),
            },
            rubbish: Vec::new(),
            hasher: Checksum::new(),
        }
    }

    async fn run(&mut self, receiver: &ReceiverState) -> io::Result<()> {
        loop {
            let frame = self.next_frame().await?;
            let (load_id, result) = match frame {
                Frame::Data(run) => match self.read_run(run, receiver).await {
                    Ok(result) => (run.load_id, result),
                    Err(error) => return Err(error),
                },
                Frame::Complete { load_id, num_rows } => {
                    let load = self.connection.load(load_id);
                    (
                        load_id,
                        load.map_or(Ok(()), |load| load.handle_complete(num_rows)),
                    )
                }
                Frame::Failed { load_id, reason } => {
                    if let Some(load) = self.connection.load(load_id) {
                        load.fail(LoadFailure::Refused(reason));
                    }
                    (load_id, Ok(()))
                }
                _ => return Err(violation("a frame that a sender must not send here")),
            };
            // A fast sender on this host never lets the socket run dry: others have their turn.
            tokio::task::yield_now().await;
            if let Err(what) = result {
                if let Some(load) = self.connection.load(load_id) {
                    load.fail(LoadFailure::Violation(what));
                }
                return Err(violation(what));
            }
        }
    }

    async fn next_frame(&mut self) -> io::Result<Frame> {
        let socket = &self.connection.socket;
        while self.num_ahead < FRAME_BYTES {
            // No further: pages may follow.
            match socket.try_read(&mut self.ahead[self.num_ahead..FRAME_BYTES]) {
                Ok(num_bytes) => self.num_ahead += num_bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    socket.readable().await?
                }
                Err(error) => return Err(error),
            }
        }
        let bytes = self.ahead.first_chunk().expect("a frame is there");
        let frame = Frame::decode(bytes);
        self.num_ahead = 0;
        frame.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// The inner error is the sender's mistake.
    async fn read_run(
        &mut self,
        run: PageRun,
        receiver: &ReceiverState,
    ) -> io::Result<Result<(), &'static str>> {
        let geometry = &self.connection.hello.geometry;
        let num_pages = run.num_rows.div_ceil(geometry.page_size) as usize;
        let num_bytes = match num_pages.checked_mul(geometry.layer_bytes()) {
            Some(num_bytes) if num_pages == 1 || num_bytes <= MAX_PAYLOAD_BYTES => num_bytes,
            _ => return Ok(Err("more rows than a frame may have")),
        };
        if !run.first_row.is_multiple_of(geometry.page_size) || run.form != self.connection.form {
            return Ok(Err("rows that do not begin a page, or in another form"));
        }
        if run.num_places > 0 {
            return self.read_places(run, num_bytes, receiver).await;
        }
        let load = self.connection.load(run.load_id);
        if let Some(load) = &load
            && let Err(what) = load.check(&run, num_bytes)
        {
            return Ok(Err(what));
        }
        self.parts.clear();
        let sink = match load {
            Some(load) if run.form == PageForm::Native => {
                let of_page = |&page| load.native_parts(run.layer, page);
                for part in load.pages_of(&run).iter().flat_map(of_page) {
                    self.parts.push(part);
                }
                Sink::Pages(load)
            }
            Some(load) => {
                self.copy.resize(num_bytes, 0);
                self.parts.push(NonNull::from(self.copy.as_mut_slice()));
                Sink::Copy(load)
            }
            None => {
                receiver.num_unknown_frames.fetch_add(1, Ordering::Relaxed);
                self.push_rubbish(num_bytes);
                Sink::Nowhere
            }
        };
        self.push_ahead();
        let trailer = self.read_payload(&sink).await?;
        let checksum = match trailer {
            Trailer::Whole { checksum } => checksum,
            // The sender says why in a frame of its own.
            Trailer::Withdrawn => return Ok(Ok(())),
        };
        let (Sink::Pages(load) | Sink::Copy(load)) = &sink else {
            return Ok(Ok(()));
        };
        // The rest of a payload whose load ended in the middle was discarded, so that its checksum
        // says nothing.
        if checksum != self.hasher.value() && load.gate.is_open() {
            receiver.num_corrupt_frames.fetch_add(1, Ordering::Relaxed);
            load.fail(LoadFailure::Corrupt);
            return Err(violation("pages that do not have their checksum"));
        }
        if run.form == PageForm::Canonical {
            load.write_rows(&run, &self.conversion, &self.copy, &mut self.own);
        } else {
            load.note_written(&run);
        }
        load.handle_run(&run, num_bytes, num_pages);
        Ok(Ok(()))
    }

    /// A run that is still in the sender's memory.
    async fn read_places(
        &mut self,
        run: PageRun,
        num_bytes: usize,
        receiver: &ReceiverState,
    ) -> io::Result<Result<(), &'static str>> {
        let num_places = run.num_places as usize;
        // Pages have two parts at most.
        let num_pages = num_bytes / self.connection.hello.geometry.layer_bytes();
        if self.memory.is_none() || run.form != PageForm::Native || num_places > 2 * num_pages {
            return Ok(Err("places in a memory that cannot be read"));
        }
        self.copy.resize(num_places * PLACE_BYTES, 0);
        self.parts.clear();
        self.parts.push(NonNull::from(self.copy.as_mut_slice()));
        self.push_ahead();
        let trailer = self.read_payload(&Sink::Nowhere).await?;
        let Some(load) = self.connection.load(run.load_id) else {
            receiver.num_unknown_frames.fetch_add(1, Ordering::Relaxed);
            return Ok(Ok(()));
        };
        if let Err(what) = load.check(&run, num_bytes) {
            return Ok(Err(what));
        }
        let Trailer::Whole { checksum } = trailer else {
            return Ok(Ok(()));
        };
        let (places, _) = self.copy.as_chunks();
        let places = places.iter().map(Place::decode);
        let memory = self.memory.as_mut().expect("it was there before");
        if !memory.set_places(places, num_bytes) {
            return Ok(Err("places of another size than the pages"));
        }
        let pages = load.pages_of(&run);
        self.parts.clear();
        let parts = pages
            .iter()
            .flat_map(|&page| load.native_parts(run.layer, page));
        parts.for_each(|part| self.parts.push(part));
        let (socket, hasher) = (&self.connection.socket, &mut self.hasher);
        // SAFETY: pages that are reserved for a load as long as its gate is open.
        let copied = unsafe {
            let gate = &load.gate;
            memory.copy(
                &mut self.parts,
                gate,
                hasher,
                checksum,
                socket,
                STALL_TIMEOUT,
            )
        };
        let copied = copied.await.map_err(|error| {
            rare_line!(info, "a KV connection is given up: {error}");
            io::Error::other(error)
        })?;
        if memory.is_nixl() {
            let num_nixl_bytes = &receiver.num_nixl_bytes;
            num_nixl_bytes.fetch_add(num_bytes as u64, Ordering::Relaxed);
        }
        match copied {
            None => return Ok(Ok(())),
            Some(true) => {}
            // The sender has taken its pages back, or its memory could not be read. Neither affects
            // the other loads of the connection.
            Some(false) => {
                receiver.num_corrupt_frames.fetch_add(1, Ordering::Relaxed);
                load.fail(LoadFailure::Corrupt);
                return Ok(Ok(()));
            }
        }
        load.note_written(&run);
        load.handle_run(&run, num_bytes, pages.len());
        Ok(Ok(()))
    }

    fn push_ahead(&mut self) {
        self.parts.push(NonNull::from(self.ahead.as_mut_slice()));
    }

    fn push_rubbish(&mut self, mut num_bytes: usize) {
        self.rubbish.resize(64 << 10, 0);
        while num_bytes > 0 {
            let len = num_bytes.min(self.rubbish.len());
            self.parts.push(NonNull::from(&mut self.rubbish[..len]));
            num_bytes -= len;
        }
    }

    /// Fills the parts up to the trailer, or further, and hashes them. When the load ends meanwhile,
    /// what is left goes nowhere.
    async fn read_payload(&mut self, sink: &Sink) -> io::Result<Trailer> {
        let socket = &self.connection.socket;
        let num_ahead = self.ahead.len();
        let mut gate = match sink {
            Sink::Pages(load) => Some(&load.gate),
            Sink::Copy(_) | Sink::Nowhere => None,
        };
        self.hasher.reset();
        // `ahead` is the last of the parts, and it ends with the frame that follows the trailer.
        while self.parts.num_bytes() > FRAME_BYTES {
            let mut read = || {
                let num_payload = self.parts.num_bytes().saturating_sub(num_ahead);
                // SAFETY: own memory, or pages that are reserved for a load whose gate is open.
                let num_bytes = unsafe { socket.try_receive(&self.parts)? };
                let num_payload = num_bytes.min(num_payload);
                // SAFETY: as above.
                let hash = |part: NonNull<[u8]>| self.hasher.update(unsafe { part.as_ref() });
                self.parts.advance(num_payload, hash);
                self.parts.advance(num_bytes - num_payload, |_| {});
                Ok(())
            };
            let result: io::Result<()> = match gate {
                None => read(),
                Some(open) => match open.enter(read) {
                    Some(result) => result,
                    None => {
                        gate = None;
                        self.discard();
                        continue;
                    }
                },
            };
            match result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    socket.readable().await?
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => result?,
            }
        }
        let num_filled = num_ahead - self.parts.num_bytes();
        let trailer = Trailer::decode(self.ahead.first_chunk().expect("it is filled so far"));
        self.ahead.copy_within(TRAILER_BYTES..num_filled, 0);
        self.num_ahead = num_filled - TRAILER_BYTES;
        trailer.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// Has what is left of a payload go nowhere.
    fn discard(&mut self) {
        let num_payload = self.parts.num_bytes().saturating_sub(self.ahead.len());
        if num_payload > 0 {
            self.parts.clear();
            self.push_rubbish(num_payload);
            self.push_ahead();
        }
    }
}
