//! What reads the pages in a sender's memory, where they are not sent.

use std::io;
use std::ptr::NonNull;
use std::time::Duration;

use super::checksum::Checksum;
use super::gate::Gate;
use super::host_memory::{HostMemory, Place};
use super::io_parts::IoParts;
use super::nixl::{NixlError, NixlReader};
use super::socket::Socket;

pub enum SenderMemory {
    OnThisHost(HostMemory),
    ByNixl(NixlReader),
}

impl SenderMemory {
    /// Sets where the next copy comes from. Returns false unless the places have `num_bytes` in all.
    pub fn set_places(&mut self, places: impl Iterator<Item = Place>, num_bytes: usize) -> bool {
        match self {
            Self::OnThisHost(memory) => memory.set_places(places, num_bytes),
            Self::ByNixl(reader) => reader.set_places(places, num_bytes),
        }
    }

    pub fn is_nixl(&self) -> bool {
        matches!(self, Self::ByNixl(_))
    }

    /// Copies from the places to the pieces of memory that the gate is for, and returns whether the
    /// bytes were read and have the checksum; `None` if the gate was closed. An error ends the
    /// connection, which is `socket`'s.
    ///
    /// # Safety
    /// While the gate is open nobody else uses the pieces' memory, which is as large as the places.
    pub async unsafe fn copy(
        &mut self,
        to: &mut IoParts,
        gate: &Gate,
        hasher: &mut Checksum,
        checksum: u64,
        socket: &Socket,
        stall_timeout: Duration,
    ) -> Result<Option<bool>, NixlError> {
        hasher.reset();
        match self {
            Self::OnThisHost(memory) => Ok(gate.enter(|| {
                // SAFETY: the caller's promise.
                let hash = |part: NonNull<[u8]>| hasher.update(unsafe { part.as_ref() });
                // SAFETY: as above.
                let copied: io::Result<()> = unsafe { memory.copy(to, hash) };
                copied.is_ok() && hasher.value() == checksum
            })),
            // A read that is under way cannot be called back, so it never goes to the pieces themselves.
            Self::ByNixl(reader) => {
                let bytes = reader.read(socket, stall_timeout).await?;
                hasher.update(bytes);
                let is_whole = hasher.value() == checksum;
                Ok(gate.enter(|| {
                    if is_whole {
                        // SAFETY: the caller's promise.
                        unsafe { to.fill(bytes) };
                    }
                    is_whole
                }))
            }
        }
    }
}
