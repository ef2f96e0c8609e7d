//! The operations on a file of blocks, so that tests can lose writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub(super) trait FileLayer: Send + Sync {
    /// Fills `bytes`. A file that is too short is an error of kind `UnexpectedEof`.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()>;
    /// Begins to bring bytes to memory, so that the next read of them waits less. Files in memory have nothing to do.
    fn read_ahead(&self, _at: u64, _num_bytes: u64) {}
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// When this returns, all earlier writes survive a crash. Without it, any part of them may be lost.
    fn sync(&self) -> io::Result<()>;
    /// Makes the file at least `len` bytes long and reserves the disk space, so that later writes have room. Existing
    /// bytes stay. Returns the length of the file, which is below `len` if there is not enough room.
    fn reserve(&self, len: u64) -> io::Result<u64>;
    /// Empties the file, and gives its disk space back.
    fn clear(&self) -> io::Result<()>;
}

impl FileLayer for File {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(bytes, at)
    }

    #[cfg(target_os = "linux")]
    fn read_ahead(&self, at: u64, num_bytes: u64) {
        use std::os::fd::AsRawFd;
        let (at, num_bytes) = (at as libc::off_t, num_bytes as libc::off_t);
        // A failure costs time alone: the read itself reports errors.
        // SAFETY: the descriptor is open as long as the file is borrowed, and the call reads no memory.
        unsafe { libc::posix_fadvise(self.as_raw_fd(), at, num_bytes, libc::POSIX_FADV_WILLNEED) };
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        let there = self.metadata()?.len();
        if len <= there {
            return Ok(there);
        }
        if let Err(error) = allocate(self, there, len) {
            // ext4 keeps the space that it reserved before it found the disk full.
            let _ = self.set_len(there);
            return Err(error);
        }
        Ok(len)
    }

    fn clear(&self) -> io::Result<()> {
        self.set_len(0)
    }
}

impl FileLayer for Box<dyn FileLayer> {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        (**self).read_at(bytes, at)
    }

    fn read_ahead(&self, at: u64, num_bytes: u64) {
        (**self).read_ahead(at, num_bytes);
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        (**self).write_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        (**self).sync()
    }

    fn reserve(&self, len: u64) -> io::Result<u64> {
        (**self).reserve(len)
    }

    fn clear(&self) -> io::Result<()> {
        (**self).clear()
    }
}

/// Makes a file longer, with disk space for all of it.
#[cfg(target_os = "linux")]
fn allocate(file: &File, there: u64, len: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let end = len.try_into().map_err(io::Error::other)?;
    // `fallocate` of ext4 takes all space that is left before it fails. Other programs would find the disk full.
    // SAFETY: all-zero bytes are a valid `statvfs`, which has only numbers.
    let mut disk: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open as long as the file is borrowed, and `disk` outlives the call.
    if unsafe { libc::fstatvfs(file.as_raw_fd(), &mut disk) } == 0
        && disk.f_blocks > 0
        && disk.f_bavail.saturating_mul(disk.f_frsize) < len - there
    {
        return Err(io::Error::from_raw_os_error(libc::ENOSPC));
    }
    // SAFETY: the descriptor is open as long as the file is borrowed, and the call reads no memory.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, end) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // The file system cannot reserve room. A write may then find the disk full.
        error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => file.set_len(len),
        error => Err(error),
    }
}

#[cfg(not(target_os = "linux"))]
fn allocate(file: &File, _there: u64, len: u64) -> io::Result<()> {
    file.set_len(len)
}
