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

/// A kind of row path. Each path's file has one, which `path.rs` lists.
#[derive(Clone, Copy, Debug)]
pub struct PathKind {
    /// Its name in the greeting.
    pub name: PathName,
    /// The value of `--transport` that chooses it.
    pub option: &'static str,
    /// Whether nodes that choose it meet inside their host only, or over the network only.
    pub is_local: bool,
    /// Whether other hosts cannot read its rows between nodes with certificates.
    pub is_private: bool,
    /// Loads the parts of the machine that it needs. Every node has a path that needs none.
    pub load: Option<fn() -> Result<(), PathError>>,
    /// Makes the path for an incarnation of a node.
    pub start: fn(u64) -> Result<Arc<dyn RowPath>, PathError>,
}

/// A node has the same path for its sender and its receiver.
pub trait RowPath: fmt::Debug + Send + Sync {
    /// The path's name in the greeting.
    fn name(&self) -> PathName;

    /// True if nodes that both have the path try it on a connection of this kind.
    fn suits(&self, link: Link) -> bool;

    /// True if the greetings settle the path, so that no offer is made.
    fn is_agreed_by_greeting(&self) -> bool {
        false
    }

    /// Lets receivers read these pages as long as the path lives. Returns `None` if the path cannot read them.
    fn offer(&self, pages: &Arc<dyn KvPages>) -> Result<Option<Offer>, PathError>;

    /// Plays the sender's part, before a receiver gets the offer.
    fn meet_receiver(&self, _socket: &Socket) {}

    /// Plays the receiver's part. The inner error says why rows must follow their frames on the socket. The outer one
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

    /// Copies from the regions. Returns whether the bytes were read and have the checksum, or `None` if the gate was
    /// closed. An error ends the connection. The future's allocation is one for each chunk.
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
    /// The connection, which may end meanwhile.
    pub socket: &'a Socket,
    pub stall_timeout: Duration,
}

/// Why a path cannot be used, for the operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct PathError(pub String);
