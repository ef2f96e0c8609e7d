//! The operations on a file of blocks, so that tests can lose writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

pub(super) trait FileLayer: Send + Sync {
    /// Fills `bytes`. A file that is too short is an error of kind `UnexpectedEof`.
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()>;
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    /// When this returns, all earlier writes survive a crash. Without it, any part of them may be lost.
    fn sync(&self) -> io::Result<()>;
    /// Makes the file `len` bytes long and reserves the disk space, so that later writes have room. Existing bytes up
    /// to `len` stay.
    fn resize(&self, len: u64) -> io::Result<()>;
}

impl FileLayer for File {
    fn read_at(&self, bytes: &mut [u8], at: u64) -> io::Result<()> {
        self.read_exact_at(bytes, at)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.write_all_at(bytes, at)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn resize(&self, len: u64) -> io::Result<()> {
        self.set_len(len)?;
        allocate(self, len)
    }
}

#[cfg(target_os = "linux")]
fn allocate(file: &File, len: u64) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let len = len.try_into().map_err(io::Error::other)?;
    // SAFETY: the descriptor is open as long as the file is borrowed, and the call reads no memory.
    if len == 0 || unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, len) } == 0 {
        return Ok(());
    }
    match io::Error::last_os_error() {
        // The file system cannot reserve room. A write may then find the disk full.
        error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(()),
        error => Err(error),
    }
}

#[cfg(not(target_os = "linux"))]
fn allocate(_file: &File, _len: u64) -> io::Result<()> {
    Ok(())
}
