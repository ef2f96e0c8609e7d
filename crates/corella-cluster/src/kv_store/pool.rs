//! The server's shared memory.
//!
//! It is read and written as a file. Its bytes may change at any time, so they are copied before they are checked. A
//! mapping would save the kernel's copy, and end this process when the server cuts the file off.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::slot_list::Slot;

/// The place of named shared memory on Linux.
const SHARED_MEMORY: &str = "/dev/shm";

pub struct SharedPool {
    file: File,
    num_bytes: u64,
    /// Device and inode. A server that restarts has other memory by the same name.
    identity: (u64, u64),
}

impl SharedPool {
    /// Opens memory by its name.
    pub fn open(name: &str, num_bytes: i64) -> io::Result<Self> {
        let name = name.strip_prefix('/').unwrap_or(name);
        if name.is_empty() || name.contains('/') {
            return Err(io::Error::other("it has no valid name"));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(Path::new(SHARED_MEMORY).join(name))?;
        let metadata = file.metadata()?;
        let num_bytes = u64::try_from(num_bytes).unwrap_or(0);
        if !metadata.is_file() || metadata.len() < num_bytes {
            return Err(io::Error::other("it is smaller than the server says"));
        }
        Ok(Self {
            file,
            num_bytes,
            identity: (metadata.dev(), metadata.ino()),
        })
    }

    pub fn is_same(&self, other: &Self) -> bool {
        (self.identity, self.num_bytes) == (other.identity, other.num_bytes)
    }

    pub fn read(&self, slot: Slot, out: &mut [u8]) -> io::Result<()> {
        self.check(slot, out.len())?;
        self.file.read_exact_at(out, slot.offset)
    }

    pub fn write(&self, slot: Slot, bytes: &[u8]) -> io::Result<()> {
        self.check(slot, bytes.len())?;
        self.file.write_all_at(bytes, slot.offset)
    }

    fn check(&self, slot: Slot, num_bytes: usize) -> io::Result<()> {
        let end = slot.offset.checked_add(slot.num_bytes);
        let is_inside = end.is_some_and(|end| end <= self.num_bytes);
        match is_inside && slot.num_bytes == num_bytes as u64 {
            true => Ok(()),
            false => Err(io::Error::other("a slot has another size than a chunk")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_slots_inside_the_memory_are_used() {
        let name = format!("corella-pool-test-{}", std::process::id());
        let path = Path::new(SHARED_MEMORY).join(&name);
        fs::write(&path, [0; 100]).unwrap();
        let pool = SharedPool::open(&format!("/{name}"), 100).unwrap();
        let slot = |offset, num_bytes| Slot { offset, num_bytes };
        pool.write(slot(90, 10), &[7; 10]).unwrap();
        let mut bytes = [0; 10];
        pool.read(slot(90, 10), &mut bytes).unwrap();
        assert_eq!(bytes, [7; 10]);
        for wrong in [slot(91, 10), slot(0, 9), slot(u64::MAX, 10)] {
            assert!(pool.read(wrong, &mut bytes).is_err(), "{wrong:?}");
            assert!(pool.write(wrong, &bytes).is_err(), "{wrong:?}");
        }
        assert!(SharedPool::open(&name, 101).is_err());
        for name in ["", "/", "../etc/passwd", "//etc/passwd"] {
            assert!(SharedPool::open(name, 1).is_err(), "{name}");
        }
        // Other memory by the same name, as after a restart. The first memory exists while it is open, so that the inode
        // differs.
        fs::remove_file(&path).unwrap();
        fs::write(&path, [0; 100]).unwrap();
        let other = SharedPool::open(&name, 100).unwrap();
        assert!(pool.is_same(&pool) && !pool.is_same(&other));
        fs::remove_file(&path).unwrap();
    }
}
