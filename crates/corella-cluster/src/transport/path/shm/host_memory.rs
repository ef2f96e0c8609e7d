//! Memory of another process on this host.
//!
//! Rows between processes on one host are copied once, from the sender's pages to the receiver's (`process_vm_readv` of
//! Linux). The sender's KV pool stays private memory in huge pages. A pool that both processes map would have no huge
//! pages unless the host's administrator allows them for shared memory.

use std::io;
use std::ptr::NonNull;

use libc::{iovec, pid_t};

use crate::transport::io_parts::{IoParts, MAX_PARTS_PER_CALL};
use crate::transport::memory_region::MemoryRegion;
use crate::transport::row_path::{BoxFuture, RowReader, Target};

/// Lets another process read this process's memory where the kernel otherwise lets only ancestors do so. Only one
/// process at a time has this permission. It is needed only if `kernel.yama.ptrace_scope` is 1.
pub fn allow_reader(pid: pid_t) {
    // SAFETY: a call with numbers. A kernel without this option needs no permission.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, pid as libc::c_ulong, 0, 0, 0) };
}

/// Reads another process's memory.
pub struct HostMemory {
    pid: pid_t,
    regions: Vec<iovec>,
}

// SAFETY: addresses of another process, which this one never dereferences.
unsafe impl Send for HostMemory {}

impl HostMemory {
    pub fn new(pid: pid_t) -> Self {
        Self {
            pid,
            regions: Vec::new(),
        }
    }

    /// Copies from the regions to the pieces, until the pieces are full. `visit` sees each piece.
    ///
    /// # Safety
    /// The pieces' memory has no other user during the call.
    pub unsafe fn copy(
        &mut self,
        to: &mut IoParts,
        mut visit: impl FnMut(NonNull<[u8]>),
    ) -> io::Result<()> {
        let mut from = &mut self.regions[..];
        while to.num_bytes() > 0 {
            let (local, remote) = (to.for_call(), &from[..from.len().min(MAX_PARTS_PER_CALL)]);
            // SAFETY: the caller owns the pieces; no other memory of this process is written.
            let num_bytes = unsafe {
                libc::process_vm_readv(
                    self.pid,
                    local.as_ptr(),
                    local.len() as _,
                    remote.as_ptr(),
                    remote.len() as _,
                    0,
                )
            };
            let mut num_bytes = match usize::try_from(num_bytes) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(num_bytes) => num_bytes,
                Err(_) => return Err(io::Error::last_os_error()),
            };
            to.advance(num_bytes, &mut visit);
            while num_bytes > 0 {
                let len = from[0].iov_len.min(num_bytes);
                from[0].iov_base = from[0].iov_base.wrapping_byte_add(len);
                from[0].iov_len -= len;
                num_bytes -= len;
                if from[0].iov_len == 0 {
                    from = &mut from[1..];
                }
            }
        }
        Ok(())
    }
}

impl RowReader for HostMemory {
    fn set_regions(
        &mut self,
        regions: &mut dyn Iterator<Item = MemoryRegion>,
        num_bytes: usize,
    ) -> bool {
        self.regions.clear();
        let mut num_left = num_bytes;
        for region in regions {
            let Ok(len) = usize::try_from(region.num_bytes) else {
                return false;
            };
            let Some(rest) = num_left.checked_sub(len) else {
                return false;
            };
            num_left = rest;
            self.regions.push(iovec {
                iov_base: std::ptr::without_provenance_mut(region.address as usize),
                iov_len: len,
            });
        }
        num_left == 0
    }

    unsafe fn read<'a>(
        &'a mut self,
        target: Target<'a>,
    ) -> BoxFuture<'a, io::Result<Option<bool>>> {
        let Target {
            to,
            gate,
            hasher,
            checksum,
            ..
        } = target;
        hasher.reset();
        let is_whole = gate.enter(|| {
            // SAFETY: promised by the caller.
            let hash = |part: NonNull<[u8]>| hasher.update(unsafe { part.as_ref() });
            // SAFETY: as above.
            let copied: io::Result<()> = unsafe { self.copy(to, hash) };
            copied.is_ok() && hasher.value() == checksum
        });
        Box::pin(std::future::ready(Ok(is_whole)))
    }
}
