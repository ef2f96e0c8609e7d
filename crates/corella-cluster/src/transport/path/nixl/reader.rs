//! Reads of a peer's memory, one after the other.

use std::ffi::c_int;
use std::io;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, null_mut};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;

use super::agent::NixlPeer;
use super::library::{DRAM, IN_PROGRESS, NixlError, READ, Request, SUCCESS, TransferList, check};
use super::staging::Staging;
use crate::transport::memory_region::MemoryRegion;
use crate::transport::row_path::{BoxFuture, RowReader, Target};
use crate::transport::socket::Socket;

/// NIXL does not report the end of a read, so the read is polled after growing pauses. Short pauses block the thread,
/// because the runtime's timers are too coarse for them.
const FIRST_PAUSE: Duration = Duration::from_micros(10);
const MAX_BLOCKING_PAUSE: Duration = Duration::from_micros(200);
const MAX_PAUSE: Duration = Duration::from_millis(4);
/// The longest pause for a read that was given up.
const MAX_IDLE_PAUSE: Duration = Duration::from_secs(1);

/// The least memory to register.
const MIN_STAGING_BYTES: usize = 256 << 10;

/// The reads of a connection, one at a time.
pub struct NixlReader {
    peer: NixlPeer,
    regions: Vec<MemoryRegion>,
    num_bytes: usize,
    /// The staging memory is as large as the largest read so far.
    staging: Option<Staging>,
}

impl NixlReader {
    pub fn new(peer: NixlPeer) -> Self {
        Self {
            peer,
            regions: Vec::new(),
            num_bytes: 0,
            staging: None,
        }
    }

    /// Returns the bytes at the regions. If the socket or this future ends first, the read continues in the background.
    /// After an error no further reads are made.
    pub async fn bytes(&mut self, socket: &Socket, limit: Duration) -> Result<&[u8], NixlError> {
        let kept = self
            .staging
            .take()
            .filter(|kept| kept.num_bytes() >= self.num_bytes);
        let staging = match kept {
            Some(kept) => kept,
            None => {
                let num_bytes = self.num_bytes.next_power_of_two();
                Staging::new(&self.peer.agent, num_bytes.max(MIN_STAGING_BYTES))?
            }
        };
        let mut flight = Flight::start(&self.peer, staging, &self.regions)?;
        let started_at = Instant::now();
        let mut pause = FIRST_PAUSE;
        while !flight.is_over()? {
            if started_at.elapsed() >= limit {
                return Err(NixlError::TimedOut);
            }
            if socket.has_ended().await {
                return Err(NixlError::Peer("the connection to it has ended"));
            }
            if pause <= MAX_BLOCKING_PAUSE {
                std::thread::sleep(pause);
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(pause).await;
            }
            pause = (2 * pause).min(MAX_PAUSE);
        }
        let staging = self.staging.insert(flight.land());
        Ok(&staging.bytes()[..self.num_bytes])
    }
}

impl RowReader for NixlReader {
    fn set_regions(
        &mut self,
        regions: &mut dyn Iterator<Item = MemoryRegion>,
        num_bytes: usize,
    ) -> bool {
        self.regions.clear();
        self.regions
            .extend(regions.filter(|region| region.num_bytes > 0));
        self.num_bytes = num_bytes;
        let mut sizes = self.regions.iter().map(|region| region.num_bytes);
        let sum = sizes.try_fold(0u64, |sum, size| sum.checked_add(size));
        num_bytes > 0 && sum == Some(num_bytes as u64)
    }

    /// A read in progress cannot be cancelled, so it never writes to the pieces themselves.
    unsafe fn read<'a>(
        &'a mut self,
        target: Target<'a>,
    ) -> BoxFuture<'a, io::Result<Option<bool>>> {
        Box::pin(async move {
            let bytes = self.bytes(target.socket, target.stall_timeout).await;
            let bytes = bytes.map_err(io::Error::other)?;
            target.hasher.reset();
            target.hasher.update(bytes);
            let is_whole = target.hasher.value() == target.checksum;
            Ok(target.gate.enter(|| {
                if is_whole {
                    // SAFETY: promised by the caller.
                    unsafe { target.to.fill(bytes) };
                }
                is_whole
            }))
        })
    }
}

/// A request, and the memory that it may write to until it is over.
struct Reading {
    request: NonNull<Request>,
    staging: Staging,
}

// SAFETY: NIXL takes requests from any thread.
unsafe impl Send for Reading {}

impl Reading {
    fn status(&self, peer: &NixlPeer) -> c_int {
        let agent = &peer.agent;
        // SAFETY: a request of this agent that was not released.
        unsafe { (agent.functions().get_xfer_status)(agent.as_ptr(), self.request.as_ptr()) }
    }

    /// The request is over.
    fn release(self, peer: &NixlPeer) -> Staging {
        let (agent, request) = (&peer.agent, self.request.as_ptr());
        // SAFETY: a request of this agent that was not released, and is not used again.
        unsafe {
            if (agent.functions().release_xfer_req)(agent.as_ptr(), request) == SUCCESS {
                (agent.functions().destroy_xfer_req)(request);
            }
        }
        self.staging
    }
}

/// A read in progress. After a drop, the read continues in the background.
struct Flight<'a> {
    peer: &'a NixlPeer,
    reading: Option<Reading>,
}

impl<'a> Flight<'a> {
    fn start(
        peer: &'a NixlPeer,
        staging: Staging,
        regions: &[MemoryRegion],
    ) -> Result<Self, NixlError> {
        let (agent, functions) = (&peer.agent, peer.agent.functions());
        let mut address = staging.address();
        let local = regions.iter().map(|region| {
            let num_bytes = region.num_bytes as usize;
            address += num_bytes;
            (address - num_bytes, num_bytes)
        });
        let local = List::new(peer, local)?;
        let remote = regions
            .iter()
            .map(|region| (region.address as usize, region.num_bytes as usize));
        let remote = List::new(peer, remote)?;
        let mut request = null_mut();
        // SAFETY: lists of registered memory, which NIXL checks. The staging memory has room for all regions.
        let created = unsafe {
            (functions.create_xfer_req)(
                agent.as_ptr(),
                READ,
                local.list,
                remote.list,
                peer.name.as_ptr(),
                &mut request,
                null_mut(),
            )
        };
        check("prepare a read", created)?;
        let request = NonNull::new(request).ok_or(NixlError::Failed("prepare a read", created))?;
        let mut flight = Self {
            peer,
            reading: Some(Reading { request, staging }),
        };
        // SAFETY: a request that has not begun. Its memory stays until it is over.
        let posted =
            unsafe { (functions.post_xfer_req)(agent.as_ptr(), request.as_ptr(), null_mut()) };
        flight.check(posted)?;
        Ok(flight)
    }

    fn is_over(&mut self) -> Result<bool, NixlError> {
        let reading = self.reading.as_ref().expect("it has not landed");
        let status = reading.status(self.peer);
        self.check(status)
    }

    fn check(&mut self, status: c_int) -> Result<bool, NixlError> {
        if status >= 0 {
            return Ok(status != IN_PROGRESS);
        }
        if let Some(reading) = self.reading.take() {
            self.peer.give_up(reading.release(self.peer));
        }
        Err(NixlError::Failed("read from the peer", status))
    }

    /// The read is over.
    fn land(mut self) -> Staging {
        let reading = self.reading.take().expect("it lands once");
        reading.release(self.peer)
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        let Some(reading) = self.reading.take() else {
            return;
        };
        let peer = self.peer.clone();
        peer.count_unfinished(true);
        // Without a runtime on which to wait, the memory is never freed, because the read may still write to it.
        let left = ManuallyDrop::new((reading, peer));
        if let Ok(runtime) = Handle::try_current() {
            runtime.spawn(end(left));
        }
    }
}

/// Waits until an abandoned read is over.
async fn end(left: ManuallyDrop<(Reading, NixlPeer)>) {
    let mut pause = MAX_PAUSE;
    let mut status = left.0.status(&left.1);
    while status == IN_PROGRESS {
        tokio::time::sleep(pause).await;
        pause = (2 * pause).min(MAX_IDLE_PAUSE);
        status = left.0.status(&left.1);
    }
    let (reading, peer) = ManuallyDrop::into_inner(left);
    let staging = reading.release(&peer);
    if status != SUCCESS {
        peer.give_up(staging);
    }
    peer.count_unfinished(false);
}

/// Pieces of memory.
struct List<'a> {
    peer: &'a NixlPeer,
    list: *mut TransferList,
}

impl<'a> List<'a> {
    fn new(
        peer: &'a NixlPeer,
        pieces: impl Iterator<Item = (usize, usize)>,
    ) -> Result<Self, NixlError> {
        const WHAT: &str = "make a list";
        let functions = peer.agent.functions();
        let mut list = null_mut();
        // SAFETY: room for the list.
        check(WHAT, unsafe {
            (functions.create_xfer_dlist)(DRAM, &mut list)
        })?;
        let list = Self { peer, list };
        for (address, num_bytes) in pieces {
            // SAFETY: the list, and numbers.
            check(WHAT, unsafe {
                (functions.xfer_dlist_add_desc)(list.list, address, num_bytes, 0)
            })?;
        }
        Ok(list)
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and requests have copies.
        unsafe { (self.peer.agent.functions().destroy_xfer_dlist)(self.list) };
    }
}
