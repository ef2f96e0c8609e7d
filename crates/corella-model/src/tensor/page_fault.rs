//! The handler of `SIGBUS`, which replaces lost pages of watched files by zeros.

use std::io;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::mapped_file::Watched;

/// The most files that are watched at a time. Large models have some hundred.
const MAX_PLACES: usize = 4096;

/// The memory of a watched file, as the handler finds it.
struct Entry {
    /// The address of the first byte. Without a file, `FREE` or `TAKEN`.
    start: AtomicUsize,
    len: AtomicUsize,
    watched: AtomicPtr<Watched>,
}

const FREE: usize = 0;
/// An owner fills the entry.
const TAKEN: usize = 1;

static TABLE: [Entry; MAX_PLACES] = [const {
    Entry {
        start: AtomicUsize::new(FREE),
        len: AtomicUsize::new(0),
        watched: AtomicPtr::new(std::ptr::null_mut()),
    }
}; MAX_PLACES];

impl Entry {
    fn try_take(&self) -> bool {
        let start = &self.start;
        let taken = start.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        taken.is_ok()
    }
}

/// The former handler, for faults outside of watched files.
static FORMER: OnceLock<libc::sigaction> = OnceLock::new();
static PAGE_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Keeps the memory of a mapped file in the table.
pub struct Place {
    entry: &'static Entry,
    /// The handler uses it by its address.
    _watched: Arc<Watched>,
}

impl Place {
    /// The map must outlive the place.
    pub fn new(map: &[u8], watched: Arc<Watched>) -> io::Result<Self> {
        install()?;
        let entry = TABLE.iter().find(|entry| entry.try_take());
        let entry = entry.ok_or_else(|| {
            io::Error::other(format!("more than {MAX_PLACES} files of models are open"))
        })?;
        entry.len.store(map.len(), Ordering::Relaxed);
        let address = Arc::as_ptr(&watched).cast_mut();
        entry.watched.store(address, Ordering::Relaxed);
        entry.start.store(map.as_ptr().addr(), Ordering::Release);
        Ok(Self {
            entry,
            _watched: watched,
        })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.entry.start.store(FREE, Ordering::Release);
    }
}

/// Installs the handler once in the life of the process.
fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let installed = INSTALLED.get_or_init(|| {
        // SAFETY: reads a constant of the system.
        let page_bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE_BYTES.store(page_bytes.max(1) as usize, Ordering::Release);
        // SAFETY: zeros are valid for these structs. The handler only does what is allowed in one.
        unsafe {
            let mut former: libc::sigaction = std::mem::zeroed();
            let mut ours: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                handle_bus_error;
            ours.sa_sigaction = handler as usize;
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(libc::SIGBUS, &raw const ours, &raw mut former) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
            }
            let _ = FORMER.set(former);
        }
        Ok(())
    });
    installed.map_err(io::Error::from_raw_os_error)
}

/// Only calls functions that a handler may call, and keeps the interrupted thread's `errno`.
extern "C" fn handle_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _: *mut libc::c_void,
) {
    // SAFETY: the system passes a valid `info`, which has an address for this signal. `errno` belongs to this thread.
    unsafe {
        let errno = *libc::__errno_location();
        let is_lost_page = (*info).si_code == libc::BUS_ADRERR;
        if !(is_lost_page && replace((*info).si_addr().addr())) {
            // After this handler, the access faults again, and the former handler gets it. A signal that a process or
            // the kernel has sent without an access comes only once, so it is sent again.
            let has_no_access = (*info).si_code <= 0 || (*info).si_code == libc::BUS_MCEERR_AO;
            match FORMER.get() {
                Some(former) => libc::sigaction(signal, former, std::ptr::null_mut()),
                None => libc::signal(signal, libc::SIG_DFL) as libc::c_int,
            };
            if has_no_access {
                libc::raise(signal);
            }
        }
        *libc::__errno_location() = errno;
    }
}

/// Replaces the page at an address of a watched file by zeros. Returns false for any other address.
fn replace(address: usize) -> bool {
    for entry in &TABLE {
        let start = entry.start.load(Ordering::Acquire);
        if start <= TAKEN || address < start || address - start >= entry.len.load(Ordering::Acquire)
        {
            continue;
        }
        let watched = entry.watched.load(Ordering::Acquire);
        // An entry whose address has changed belongs to another map now. The faulting thread borrows its own map, whose
        // entry stays.
        if entry.start.load(Ordering::Acquire) != start {
            continue;
        }
        let page_bytes = PAGE_BYTES.load(Ordering::Acquire);
        let page = address / page_bytes * page_bytes;
        // The loss is recorded before the page is replaced, because another thread may read the new page at once.
        // SAFETY: the entry's owner keeps `watched` until it gives the entry back.
        unsafe { (*watched).set_torn(start) };
        // SAFETY: the page is a part of the watched map, which only readers borrow, and which unmaps it later. The file
        // has no such page, or cannot give it, so no byte of it is lost.
        let mapped = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(page),
                page_bytes,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        return mapped != libc::MAP_FAILED;
    }
    false
}
