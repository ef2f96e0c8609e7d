//! Addresses of bytes in a process's memory.

use std::ptr::NonNull;

use super::path_name::PathData;

/// Bytes of a [`MemoryRegion`] on the wire.
pub const REGION_BYTES: usize = 16;

/// A piece of a process's memory, by its address in that process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryRegion {
    pub address: u64,
    pub num_bytes: u64,
}

impl MemoryRegion {
    pub fn of(part: NonNull<[u8]>) -> Self {
        Self {
            address: part.cast::<u8>().as_ptr().addr() as u64,
            num_bytes: part.len() as u64,
        }
    }

    pub fn encode(self) -> [u8; REGION_BYTES] {
        let mut bytes = [0; REGION_BYTES];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..].copy_from_slice(&self.num_bytes.to_le_bytes());
        bytes
    }

    pub fn decode(bytes: &[u8; REGION_BYTES]) -> Self {
        let (address, num_bytes) = bytes.split_at(8);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        Self {
            address: number(address),
            num_bytes: number(num_bytes),
        }
    }
}

/// A number in a sender's memory. A receiver that reads another value there reads the wrong memory.
#[derive(Debug)]
pub struct Canary(Box<u64>);

impl Canary {
    pub fn new(content: u64) -> Self {
        Self(Box::new(content))
    }

    pub fn memory(&self) -> NonNull<[u8]> {
        NonNull::slice_from_raw_parts(NonNull::from(&*self.0).cast(), size_of::<u64>())
    }

    /// Encodes the canary's address and value, which the receiver compares.
    pub fn encode(&self) -> PathData {
        let mut data = PathData::default();
        data[..8].copy_from_slice(&MemoryRegion::of(self.memory()).address.to_le_bytes());
        data[8..16].copy_from_slice(&self.0.to_le_bytes());
        data
    }

    /// Decodes the region and the value of a sender's canary.
    pub fn decode(data: &PathData) -> (MemoryRegion, [u8; size_of::<u64>()]) {
        let [address, content] =
            [0, 8].map(|at| u64::from_le_bytes(data[at..at + 8].try_into().expect("8 bytes")));
        let num_bytes = size_of::<u64>() as u64;
        (MemoryRegion { address, num_bytes }, content.to_ne_bytes())
    }
}
