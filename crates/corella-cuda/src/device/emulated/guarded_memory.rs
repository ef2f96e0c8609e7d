//! Memory with an inaccessible page on either side. When the memory is freed, the bytes between the memory and these
//! pages are checked.

use corella_model::DeviceError;

const PAGE_BYTES: usize = 4096;
const ALIGNMENT: usize = 256;
const GUARD: u8 = 0xa5;

#[derive(Debug)]
pub struct GuardedMemory {
    mapping: *mut u8,
    mapped_bytes: usize,
    /// The offset of the memory within the mapping.
    offset: usize,
    num_bytes: usize,
}

// SAFETY: the mapping belongs to this value.
unsafe impl Send for GuardedMemory {}

impl GuardedMemory {
    /// Zeroed memory. It ends as close to the inaccessible page after it as its alignment allows.
    pub fn new(num_bytes: usize) -> Result<Self, DeviceError> {
        let aligned = num_bytes.next_multiple_of(ALIGNMENT);
        let inner = (aligned + ALIGNMENT).next_multiple_of(PAGE_BYTES);
        let mapped_bytes = inner + 2 * PAGE_BYTES;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping. Only its inside may be accessed.
        let mapping = unsafe {
            let mapping = libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_NONE,
                flags,
                -1,
                0,
            );
            if mapping == libc::MAP_FAILED
                || libc::mprotect(mapping.byte_add(PAGE_BYTES), inner, protection) != 0
            {
                return Err(DeviceError(format!(
                    "the emulated device cannot map {mapped_bytes} bytes: {}",
                    std::io::Error::last_os_error()
                )));
            }
            mapping.cast::<u8>()
        };
        let memory = Self {
            mapping,
            mapped_bytes,
            offset: PAGE_BYTES + inner - aligned,
            num_bytes,
        };
        for (start, end) in memory.guards() {
            // SAFETY: the range lies inside the mapping.
            unsafe { mapping.add(start).write_bytes(GUARD, end - start) };
        }
        Ok(memory)
    }

    /// The ranges of bytes around the memory, as offsets.
    fn guards(&self) -> [(usize, usize); 2] {
        let end = self.mapped_bytes - PAGE_BYTES;
        [
            (PAGE_BYTES, self.offset),
            (self.offset + self.num_bytes, end),
        ]
    }

    pub fn address(&self) -> u64 {
        self.mapping as u64 + self.offset as u64
    }

    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// # Panics
    /// Panics if bytes around the memory were written.
    pub fn check(&self) {
        for (start, end) in self.guards() {
            // SAFETY: the range lies inside the mapping, and must not be written.
            let guard = unsafe { std::slice::from_raw_parts(self.mapping.add(start), end - start) };
            let Some(index) = guard.iter().position(|&byte| byte != GUARD) else {
                continue;
            };
            let distance = (start + index) as isize - self.offset as isize;
            let message = format!(
                "something wrote at byte {distance} of an allocation of {} bytes",
                self.num_bytes
            );
            match std::thread::panicking() {
                true => eprintln!("{message}"),
                false => panic!("{message}"),
            }
        }
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this value.
        unsafe { libc::munmap(self.mapping.cast(), self.mapped_bytes) };
    }
}
