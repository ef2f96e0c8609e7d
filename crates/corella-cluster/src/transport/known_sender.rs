//! A receiver's connections to one sender.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use corella_engine::rare_line;
use corella_model::PageForm;
use tokio::sync::Mutex as AsyncMutex;
use tracing::{debug, info, warn};

use super::frame::{FRAME_BYTES, Frame};
use super::frame_reader::violation;
use super::incoming::{Incoming, LoadFailure};
use super::meeting::answer;
use super::path::{PathSet, agreed};
use super::path_name::PathName;
use super::receiver_connection::{ReceiverConnection, SenderMemory};
use super::receiver_state::ReceiverState;
use super::row_path::Link;
use super::socket::Socket;
use super::{Hello, Incompatibility, PeerAddress};

/// The pause between attempts when a peer refuses at once.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

/// The slot whose connection has the messages about cached blocks.
const MESSAGE_SLOT: usize = 0;

/// A sender with its connections. The connections are made when the sender becomes known or is needed, and kept between
/// loads.
pub struct KnownSender {
    address: PeerAddress,
    first_index: usize,
    slots: Box<[Slot]>,
    next_slot: AtomicUsize,
    /// The last logged message about the row path, which is logged once for all connections.
    told: Mutex<String>,
}

#[derive(Default)]
struct Slot {
    connection: AsyncMutex<Attempt>,
    /// The number of loads of this slot, with or without a connection.
    num_loads: AtomicUsize,
}

#[derive(Default)]
struct Attempt {
    connection: Option<Arc<ReceiverConnection>>,
    /// When and why the last attempt failed. Loads that waited for that attempt make no attempt of their own.
    failure: Option<(Instant, LoadFailure)>,
}

impl Drop for KnownSender {
    /// The peer has no loads left, so open connections are of no more use.
    fn drop(&mut self) {
        for slot in &mut self.slots {
            if let Some(connection) = &slot.connection.get_mut().connection {
                connection.shut_down();
            }
        }
    }
}

/// A load's place in a slot. Dropping it frees the place.
pub struct SlotGuard {
    peer: Arc<KnownSender>,
    index: usize,
}

impl Drop for SlotGuard {
    fn drop(&mut self) {
        let num_loads = &self.peer.slots[self.index].num_loads;
        num_loads.fetch_sub(1, Ordering::Relaxed);
    }
}

impl KnownSender {
    pub fn new(address: PeerAddress, first_index: usize, num_connections: usize) -> Self {
        Self {
            address,
            first_index,
            slots: (0..num_connections.max(1))
                .map(|_| Slot::default())
                .collect(),
            next_slot: AtomicUsize::new(0),
            told: Mutex::default(),
        }
    }

    fn tell(&self, path: PathName, met: Result<(), &str>) {
        let address = &self.address;
        let line = match met {
            Ok(()) => format!("KV rows from {address} come by {path}"),
            Err(reason) => {
                format!("KV rows from {address} come over TCP, not by {path}: {reason}")
            }
        };
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if *told == line {
            return;
        }
        match met {
            Ok(()) => info!("{line}"),
            Err(_) => warn!("{line}"),
        }
        *told = line;
    }

    pub fn is_idle(&self) -> bool {
        let mut slots = self.slots.iter();
        slots.all(|slot| slot.num_loads.load(Ordering::Relaxed) == 0)
    }

    pub fn slots(self: &Arc<Self>) -> impl Iterator<Item = SlotGuard> {
        (0..self.slots.len()).map(|index| self.take_slot(index))
    }

    /// Returns the one slot for messages about cached blocks, so that the messages keep their order.
    pub fn message_slot(self: &Arc<Self>) -> SlotGuard {
        self.take_slot(MESSAGE_SLOT)
    }

    /// Chooses the slot with the fewest loads, and takes turns among equals.
    pub fn choose_slot(self: &Arc<Self>) -> SlotGuard {
        let num_slots = self.slots.len();
        let first = self.next_slot.fetch_add(1, Ordering::Relaxed) % num_slots;
        let indices = (0..num_slots).map(|i| (first + i) % num_slots);
        let num_loads = |index: &usize| self.slots[*index].num_loads.load(Ordering::Relaxed);
        self.take_slot(indices.min_by_key(num_loads).unwrap_or(first))
    }

    fn take_slot(self: &Arc<Self>, index: usize) -> SlotGuard {
        self.slots[index].num_loads.fetch_add(1, Ordering::Relaxed);
        SlotGuard {
            peer: self.clone(),
            index,
        }
    }
}

impl SlotGuard {
    /// Returns the slot's index among the slots of all peers. A peer's slots have adjacent indices.
    pub fn index(&self) -> usize {
        self.peer.first_index + self.index
    }

    /// Runs a load. An idle connection may have ended unnoticed, so a load that received nothing is retried once.
    pub async fn run(&self, load: &Arc<Incoming>, receiver: &Arc<ReceiverState>) {
        for _ in 0..2 {
            match self.connection(receiver).await {
                Ok(connection) => connection.open(load, receiver.config.window_bytes),
                Err(failure) => return load.fail(failure),
            }
            load.lost.notified().await;
        }
        load.fail(LoadFailure::ConnectionLost);
    }

    /// Returns the connection, if it is open and no other task is making one now.
    pub fn ready_connection(&self) -> Option<Arc<ReceiverConnection>> {
        let attempt = self.peer.slots[self.index].connection.try_lock().ok()?;
        let connection = attempt.connection.as_ref();
        connection.filter(|open| !open.is_closed()).cloned()
    }

    /// Connects ahead of loads, unless a connection exists or is being made.
    pub async fn connect_ahead(&self, receiver: &Arc<ReceiverState>) {
        let is_under_way = self.peer.slots[self.index].connection.try_lock().is_err();
        if !is_under_way && let Err(failure) = self.connection(receiver).await {
            debug!("no KV connection yet: {failure:?}");
        }
    }

    /// Connects with few attempts, unless another load has connected.
    pub async fn connection(
        &self,
        receiver: &Arc<ReceiverState>,
    ) -> Result<Arc<ReceiverConnection>, LoadFailure> {
        let asked_at = Instant::now();
        let mut attempt = self.peer.slots[self.index].connection.lock().await;
        if let Some(connection) = attempt.connection.as_ref().filter(|open| !open.is_closed()) {
            return Ok(connection.clone());
        }
        if attempt.connection.take().is_some() {
            self.tell_lost(receiver);
        }
        if let Some((at, failure)) = &attempt.failure
            && *at > asked_at
        {
            return Err(failure.clone());
        }
        match self.connect(receiver).await {
            Ok(connection) => {
                attempt.connection = Some(connection.clone());
                Ok(connection)
            }
            Err(failure) => {
                attempt.failure = Some((Instant::now(), failure.clone()));
                Err(failure)
            }
        }
    }

    /// Reports a lost connection while the slot is locked, so that the next connection has carried no message yet.
    fn tell_lost(&self, receiver: &ReceiverState) {
        if self.index == MESSAGE_SLOT
            && let Some(client) = receiver.block_client.get()
        {
            client.handle_lost(&self.peer.address);
        }
    }

    async fn connect(
        &self,
        receiver: &Arc<ReceiverState>,
    ) -> Result<Arc<ReceiverConnection>, LoadFailure> {
        let config = &receiver.config;
        let mut reason = String::new();
        for _ in 0..config.num_connect_attempts.max(1) {
            let started_at = Instant::now();
            let greeting = greet(&self.peer.address, receiver);
            match tokio::time::timeout(config.connect_timeout, greeting).await {
                Ok(Ok((socket, hello))) => {
                    let form = receiver.hello.page_form(&hello);
                    let form = form.map_err(LoadFailure::Incompatible)?;
                    match self.meet(&socket, &hello, form, receiver).await {
                        Ok(memory) => {
                            let own = &receiver.hello;
                            let connection = ReceiverConnection::new(socket, hello, form, own)
                                .ok_or(LoadFailure::Incompatible(Incompatibility::Shape))?;
                            let connection = Arc::new(connection);
                            self.spawn(&connection, memory, receiver);
                            return Ok(connection);
                        }
                        Err(error) => reason = error.to_string(),
                    }
                }
                Ok(Err(error)) => {
                    if let Some(tls) = &config.tls {
                        tls.note_refusal(&self.peer.address.host(), &error);
                    }
                    reason = error.to_string();
                }
                Err(_) => reason = "it does not answer".to_owned(),
            }
            // A refusal comes at once, and the peer may be about to listen.
            let pause = RETRY_PAUSE.min(config.connect_timeout);
            let rest = pause.saturating_sub(started_at.elapsed());
            tokio::time::sleep(rest).await;
        }
        let address = &self.peer.address;
        Err(LoadFailure::Unreachable(format!("{address}: {reason}")))
    }

    /// Returns the reader of the sender's memory, if both nodes have a path for it and the path's test succeeds.
    async fn meet(
        &self,
        socket: &Socket,
        hello: &Hello,
        form: PageForm,
        receiver: &ReceiverState,
    ) -> io::Result<Option<SenderMemory>> {
        let config = &receiver.config;
        let is_local = socket.is_local();
        let Some(path) = agreed(&config.paths, hello.paths, Link { is_local, form }) else {
            return Ok(None);
        };
        let met = answer(socket, path, hello.incarnation, config.connect_timeout).await?;
        // The path that this node would use if the sender had every path and native pages.
        let form = PageForm::Native;
        let wanted = agreed(&config.paths, PathSet::ALL, Link { is_local, form });
        // Inside a host the address determines the path.
        if let Some(wanted) = wanted.filter(|wanted| !is_local && !wanted.is_agreed_by_greeting()) {
            let without = format!("it runs without {}", wanted.name());
            let met = match &met {
                _ if !hello.paths.has(wanted.name()) => Err(&*without),
                _ if path.name() != wanted.name() => Err("its pages have another layout"),
                Err(error) => Err(&*error.0),
                Ok(_) => Ok(()),
            };
            self.peer.tell(wanted.name(), met);
        }
        let reader = met.ok().flatten();
        let path = path.name();
        Ok(reader.map(|reader| SenderMemory { path, reader }))
    }

    fn spawn(
        &self,
        connection: &Arc<ReceiverConnection>,
        memory: Option<SenderMemory>,
        receiver: &Arc<ReceiverState>,
    ) {
        let (connection, receiver) = (connection.clone(), receiver.clone());
        let (peer, index) = (Arc::downgrade(&self.peer), self.index);
        let address = self.peer.address.clone();
        tokio::spawn(async move {
            let mut stopped = receiver.stopped.subscribe();
            tokio::select! {
                result = connection.run(&receiver, memory) => match result {
                    Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                        rare_line!(warn, "closed the KV connection to {address}: {error}");
                    }
                    Err(error) => debug!("KV connection to {address} has ended: {error}"),
                    Ok(()) => {}
                },
                // The wait also ends when the receiver is dropped.
                _ = stopped.wait_for(|&is_stopped| is_stopped) => {}
            }
            // There may never be another load from this peer. If the connection were kept, a socket would stay open for
            // each peer that has gone.
            if let Some(peer) = peer.upgrade() {
                let slot = peer.take_slot(index);
                let mut attempt = peer.slots[index].connection.lock().await;
                let is_own = |kept: &mut Arc<_>| Arc::ptr_eq(kept, &connection);
                if attempt.connection.take_if(is_own).is_some() {
                    slot.tell_lost(&receiver);
                }
            }
        });
    }
}

async fn greet(address: &PeerAddress, receiver: &ReceiverState) -> io::Result<(Socket, Hello)> {
    let socket = Socket::connect(address, receiver.config.tls.as_ref()).await?;
    let hello = Frame::Hello(receiver.hello.clone());
    socket.write_all(&hello.encode()).await?;
    let mut bytes = [0; FRAME_BYTES];
    socket.read_exact(&mut bytes).await?;
    match Frame::decode(&bytes) {
        Ok(Frame::Hello(hello)) => Ok((socket, hello)),
        _ => Err(violation(
            "the program that listens there is not a Corella KV sender",
        )),
    }
}

#[cfg(test)]
mod tests;
