//! Copies rows from the memory of another process on this host.

mod host_memory;

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use corella_model::KvPages;

use crate::transport::io_parts::IoParts;
use crate::transport::memory_region::Canary;
use crate::transport::path_name::PathName;
use crate::transport::row_path::{BoxFuture, Link, Offer, PathError, PathKind, RowPath, RowReader};
use crate::transport::socket::Socket;

use host_memory::{HostMemory, allow_reader};

pub const KIND: PathKind = PathKind {
    name: PathName::new("shm"),
    option: "shm",
    is_local: true,
    is_private: true,
    load: None,
    start: |incarnation| Ok(Arc::new(Shm::new(incarnation))),
};

/// Tells the canary from other memory that happens to hold the incarnation.
const CANARY: u64 = 0x5bd1_e995_c0de_11a5;

#[derive(Debug)]
pub struct Shm {
    canary: Canary,
}

impl Shm {
    pub fn new(incarnation: u64) -> Self {
        Self {
            canary: Canary::new(incarnation ^ CANARY),
        }
    }
}

impl RowPath for Shm {
    fn name(&self) -> PathName {
        KIND.name
    }

    fn suits(&self, link: Link) -> bool {
        link.is_local
    }

    /// All of a process's memory can be read, or none.
    fn offer(&self, _pages: &Arc<dyn KvPages>) -> Result<Option<Offer>, PathError> {
        Ok(Some(Offer {
            data: self.canary.encode(),
            bytes: Vec::new(),
        }))
    }

    fn meet_receiver(&self, socket: &Socket) {
        if let Some(pid) = socket.peer_pid() {
            allow_reader(pid);
        }
    }

    /// If the sender's memory cannot be read, the sender is given up: the same node may be reached over TCP.
    fn meet_sender<'a>(
        self: Arc<Self>,
        socket: &'a Socket,
        _incarnation: u64,
        offer: Offer,
    ) -> BoxFuture<'a, io::Result<Result<Box<dyn RowReader>, PathError>>> {
        let memory = read_word(socket, &offer).ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "its memory cannot be read; run both as the same user and in the same PID \
                 namespace, or use TCP",
            )
        });
        let memory = memory.map(|memory| Ok(Box::new(memory) as Box<dyn RowReader>));
        Box::pin(std::future::ready(memory))
    }
}

/// Returns the other process's memory, if its canary can be read.
fn read_word(socket: &Socket, offer: &Offer) -> Option<HostMemory> {
    let (region, content) = Canary::decode(&offer.data);
    let mut memory = HostMemory::new(socket.peer_pid()?);
    let mut bytes = [0; size_of::<u64>()];
    let mut parts = IoParts::default();
    parts.push(NonNull::from(bytes.as_mut_slice()));
    memory.set_regions(&mut [region].into_iter(), bytes.len());
    // SAFETY: bytes of this function.
    unsafe { memory.copy(&mut parts, |_| {}) }.ok()?;
    (bytes == content).then_some(memory)
}
