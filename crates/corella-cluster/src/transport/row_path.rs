//! Paths by which rows move from a sender's pages to a receiver's.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use corella_model::{KvPages, PageForm};

use super::checksum::Checksum;
use super::gate::Gate;
use super::io_parts::IoParts;
use super::memory_region::MemoryRegion;
use super::path_name::{PathData, PathName};
use super::socket::Socket;

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A kind of row path. The file of each path has one, and `path.rs` lists them.
#[derive(Clone, Copy, Debug)]
pub struct PathKind {
    /// The path's name in the greeting.
    pub name: PathName,
    /// The value of `--transport` that chooses the path.
    pub option: &'static str,
    /// Whether nodes that choose the path meet only inside their host. Otherwise, they meet only over the network.
    pub is_local: bool,
    /// Whether rows on the path are hidden from other hosts, between nodes with certificates.
    pub is_private: bool,
    /// Loads the library that the path needs. `None` for a path that needs no library: every node has such paths.
    pub load: Option<fn() -> Result<(), PathError>>,
    /// Makes the path for an incarnation of a node.
    pub start: fn(u64) -> Result<Arc<dyn RowPath>, PathError>,
}

/// A path between memories. A node's sender and receiver share it.
pub trait RowPath: fmt::Debug + Send + Sync {
    /// The path's name in the greeting.
    fn name(&self) -> PathName;

    /// True if two nodes that have the path try it on a connection of this kind.
    fn suits(&self, link: Link) -> bool;

    /// True if the greetings agree on the path, so that the sender makes no offer.
    fn is_agreed_by_greeting(&self) -> bool {
        false
    }

    /// Lets receivers read these pages as long as the path lives. Returns `None` if the path cannot read them.
    fn offer(&self, pages: &Arc<dyn KvPages>) -> Result<Option<Offer>, PathError>;

    /// Plays the sender's part, before a receiver gets the offer.
    fn meet_receiver(&self, _socket: &Socket) {}

    /// Plays the receiver's part. The inner error says why rows must follow their frames on the socket. The outer error
    /// ends the connection.
    fn meet_sender<'a>(
        self: Arc<Self>,
        socket: &'a Socket,
        incarnation: u64,
        offer: Offer,
    ) -> BoxFuture<'a, io::Result<Result<Box<dyn RowReader>, PathError>>>;
}

/// Reads a sender's pages on behalf of one connection.
pub trait RowReader: Send {
    /// Sets the regions of the next read. Returns false unless they have `num_bytes` in all.
    fn set_regions(
        &mut self,
        regions: &mut dyn Iterator<Item = MemoryRegion>,
        num_bytes: usize,
    ) -> bool;

    /// Copies from the regions. Returns whether the bytes were read and match the checksum, or `None` if the gate was
    /// closed. An error ends the connection. Each chunk allocates one future.
    ///
    /// # Safety
    /// While the gate is open, the memory of `to` has no other user. It is as large as the regions.
    unsafe fn read<'a>(&'a mut self, to: Target<'a>) -> BoxFuture<'a, io::Result<Option<bool>>>;
}

/// The properties of a connection that decide whether a path suits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Whether both ends are on one host.
    pub is_local: bool,
    /// The form in which pages travel.
    pub form: PageForm,
}

/// A sender's description of its pages for one receiver.
#[derive(Debug, Default)]
pub struct Offer {
    pub data: PathData,
    pub bytes: Vec<u8>,
}

/// The destination of a read.
pub struct Target<'a> {
    pub to: &'a mut IoParts,
    pub gate: &'a Gate,
    pub hasher: &'a mut Checksum,
    pub checksum: u64,
    /// The connection, which may end during the read.
    pub socket: &'a Socket,
    pub stall_timeout: Duration,
}

/// Why a path cannot be used, for the operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PathError(pub String);
