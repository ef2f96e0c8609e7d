//! This node as an agent of NIXL.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use corella_model::KvPages;

use super::library::{
    Agent, AgentConfig, DRAM, Functions, NixlError, NixlLibrary, RegisterList, SYNC_STRICT, check,
};
use super::staging::Staging;
use crate::transport::memory_region::Canary;

/// UCX chooses among the machine's networks. The operator may set `UCX_TLS` and UCX's other variables.
const BACKEND: &CStr = c"UCX";
/// NIXL's thread sleeps until an event, but no longer than this, because some networks wake no thread. With 0, the
/// thread would never sleep.
const PROGRESS_DELAY_US: u64 = 10_000;
/// Tells the canary from other memory that happens to hold the incarnation.
const CANARY: u64 = 0x3c6e_f372_fe94_f82b;
/// The limit of unfinished reads of connections that were given up. Each of these reads has its own memory.
const MAX_UNFINISHED: usize = 64;

/// An agent of NIXL. Each incarnation of a node has one with the incarnation in its name, because NIXL never forgets
/// the state of a name. The node's sender and receiver share the agent.
pub struct NixlAgent {
    functions: Arc<Functions>,
    agent: NonNull<Agent>,
    incarnation: u64,
    peers: Mutex<HashMap<u64, KnownPeer>>,
    num_unfinished: AtomicUsize,
    /// Pages that other nodes may read. The agent keeps the pages as long as it lives, because a read may come late.
    offered: Mutex<Vec<Arc<dyn KvPages>>>,
    canary: Canary,
}

/// An incarnation of a peer that NIXL knows.
struct KnownPeer {
    /// The number of `NixlPeer`s of this peer. With the last one, NIXL forgets the peer.
    num_users: usize,
    state: Arc<PeerState>,
}

#[derive(Default)]
struct PeerState {
    /// A read from the peer has failed. New connections use their sockets.
    is_broken: AtomicBool,
    /// Memory of failed reads, unused once NIXL has closed its connection to the peer.
    quarantine: Mutex<Vec<Staging>>,
}

// SAFETY: NIXL locks the agent itself (`SYNC_STRICT`).
unsafe impl Send for NixlAgent {}
// SAFETY: as above.
unsafe impl Sync for NixlAgent {}

impl NixlAgent {
    pub fn start(library: &NixlLibrary, incarnation: u64) -> Result<Arc<Self>, NixlError> {
        let functions = library.functions.clone();
        let config = AgentConfig {
            // Without this thread, networks whose reads need the other process's help would stand still.
            has_progress_thread: true,
            has_listen_thread: false,
            listen_port: 0,
            thread_sync: SYNC_STRICT,
            num_workers: 1,
            progress_delay_us: PROGRESS_DELAY_US,
            listen_delay_us: 100_000,
            has_telemetry: false,
        };
        let mut agent = null_mut();
        let name = agent_name(incarnation);
        // SAFETY: a name, a configuration and room for the agent.
        let created =
            unsafe { (functions.create_configured_agent)(name.as_ptr(), &config, &mut agent) };
        check("start", created)?;
        let agent = NonNull::new(agent).ok_or(NixlError::Failed("start", created))?;
        let this = Self {
            functions,
            agent,
            incarnation,
            peers: Mutex::default(),
            num_unfinished: AtomicUsize::new(0),
            offered: Mutex::default(),
            canary: Canary::new(incarnation ^ CANARY),
        };
        this.start_backend()?;
        Ok(Arc::new(this))
    }

    fn start_backend(&self) -> Result<(), NixlError> {
        const WHAT: &str = "start UCX; NIXL_PLUGIN_DIR names the folder of libplugin_UCX.so, and \
                            UCX_TLS must allow some network";
        let (mut params, mut backend) = (null_mut(), null_mut());
        // SAFETY: room for the results, and handles made before.
        unsafe {
            check(WHAT, (self.functions.create_params)(&mut params))?;
            let created = (self.functions.create_backend)(
                self.as_ptr(),
                BACKEND.as_ptr(),
                params,
                &mut backend,
            );
            (self.functions.destroy_params)(params);
            check(WHAT, created)?;
            // This call frees only the handle.
            (self.functions.destroy_backend)(backend);
        }
        Ok(())
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    pub(super) fn as_ptr(&self) -> *mut Agent {
        self.agent.as_ptr()
    }

    pub(super) fn canary(&self) -> &Canary {
        &self.canary
    }

    /// Registers a node's KV memory, so that other nodes may read it as long as the agent lives.
    pub(super) fn register_pages(&self, pages: &Arc<dyn KvPages>) -> Result<(), NixlError> {
        let mut regions = pages.regions();
        regions.push(self.canary.memory());
        // The pages are kept even after an error, because NIXL may have registered some.
        lock(&self.offered).push(pages.clone());
        for region in joined(regions) {
            self.register(region)?;
        }
        Ok(())
    }

    /// Registers memory, which must stay allocated until it is deregistered, or as long as the agent lives.
    pub(super) fn register(&self, memory: NonNull<[u8]>) -> Result<(), NixlError> {
        let list = self.list_of(memory)?;
        // SAFETY: a list of memory that lives long enough.
        unsafe {
            let registered = (self.functions.register_mem)(self.as_ptr(), list, null_mut());
            (self.functions.destroy_reg_dlist)(list);
            check("register memory", registered)
        }
    }

    /// # Safety
    /// No request uses the memory.
    pub(super) unsafe fn deregister(&self, memory: NonNull<[u8]>) -> Result<(), NixlError> {
        let list = self.list_of(memory)?;
        // SAFETY: promised by the caller.
        unsafe {
            let deregistered = (self.functions.deregister_mem)(self.as_ptr(), list, null_mut());
            (self.functions.destroy_reg_dlist)(list);
            check("deregister memory", deregistered)
        }
    }

    fn list_of(&self, memory: NonNull<[u8]>) -> Result<*mut RegisterList, NixlError> {
        const WHAT: &str = "make a list";
        let mut list = null_mut();
        let address = memory.cast::<u8>().as_ptr().addr();
        // SAFETY: room for the list, and the list with numbers.
        unsafe {
            check(WHAT, (self.functions.create_reg_dlist)(DRAM, &mut list))?;
            let added = (self.functions.reg_dlist_add_desc)(
                list,
                address,
                memory.len(),
                0,
                std::ptr::null(),
                0,
            );
            check(WHAT, added).inspect_err(|_| {
                (self.functions.destroy_reg_dlist)(list);
            })?;
        }
        Ok(list)
    }

    /// Returns the metadata by which peers reach the registered memory.
    pub(super) fn metadata(&self) -> Result<Vec<u8>, NixlError> {
        let (mut data, mut num_bytes): (*mut c_void, usize) = (null_mut(), 0);
        // SAFETY: room for an address and a number of bytes, which the caller frees.
        unsafe {
            let status = (self.functions.get_local_md)(self.as_ptr(), &mut data, &mut num_bytes);
            check("describe the agent", status)?;
            let metadata = std::slice::from_raw_parts(data.cast::<u8>(), num_bytes).to_vec();
            libc::free(data);
            Ok(metadata)
        }
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<u64, KnownPeer>> {
        lock(&self.peers)
    }

    /// Loads a peer's metadata, unless another connection has loaded it.
    pub(super) fn meet(
        self: &Arc<Self>,
        incarnation: u64,
        metadata: &[u8],
    ) -> Result<NixlPeer, NixlError> {
        if self.num_unfinished.load(Ordering::Relaxed) >= MAX_UNFINISHED {
            return Err(NixlError::TooManyUnfinished);
        }
        let name = agent_name(incarnation);
        let mut peers = self.peers();
        if !peers.contains_key(&incarnation) {
            self.load(&name, metadata)?;
        }
        let peer = peers.entry(incarnation).or_insert_with(|| KnownPeer {
            num_users: 0,
            state: Arc::default(),
        });
        if peer.state.is_broken.load(Ordering::Relaxed) {
            return Err(NixlError::Peer("an earlier read from it has failed"));
        }
        peer.num_users += 1;
        Ok(NixlPeer {
            agent: self.clone(),
            incarnation,
            name,
            state: peer.state.clone(),
        })
    }

    fn load(&self, expected: &CStr, metadata: &[u8]) -> Result<(), NixlError> {
        let mut name: *mut c_char = null_mut();
        // SAFETY: bytes that are only read, and room for a name, which the caller frees.
        unsafe {
            let loaded = (self.functions.load_remote_md)(
                self.as_ptr(),
                metadata.as_ptr().cast(),
                metadata.len(),
                &mut name,
            );
            if let Err(error) = check("use the peer's description", loaded) {
                // NIXL may have loaded a part of the metadata.
                (self.functions.invalidate_remote_md)(self.as_ptr(), expected.as_ptr());
                return Err(error);
            }
            let is_expected = CStr::from_ptr(name) == expected;
            if !is_expected {
                (self.functions.invalidate_remote_md)(self.as_ptr(), name);
            }
            libc::free(name.cast());
            match is_expected {
                true => Ok(()),
                false => Err(NixlError::Peer("its description is of another node")),
            }
        }
    }
}

impl Drop for NixlAgent {
    fn drop(&mut self) {
        // SAFETY: the agent has no other owner. Its thread ends, so that nothing reads from the
        // memory that is freed next.
        unsafe { (self.functions.destroy_agent)(self.as_ptr()) };
    }
}

impl fmt::Debug for NixlAgent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NixlAgent({:x})", self.incarnation)
    }
}

/// A peer whose memory this node's agent can read. When the last `NixlPeer` of a peer is dropped, NIXL forgets the
/// peer.
pub struct NixlPeer {
    pub(super) agent: Arc<NixlAgent>,
    incarnation: u64,
    pub(super) name: CString,
    state: Arc<PeerState>,
}

impl NixlPeer {
    /// Keeps the memory of a failed read as long as NIXL has a connection to the peer.
    pub(super) fn give_up(&self, staging: Staging) {
        self.state.is_broken.store(true, Ordering::Relaxed);
        lock(&self.state.quarantine).push(staging);
    }

    /// Counts an abandoned read when it begins, and when it has ended.
    pub(super) fn count_unfinished(&self, begins: bool) {
        let num_unfinished = &self.agent.num_unfinished;
        match begins {
            true => num_unfinished.fetch_add(1, Ordering::Relaxed),
            false => num_unfinished.fetch_sub(1, Ordering::Relaxed),
        };
    }
}

impl Clone for NixlPeer {
    fn clone(&self) -> Self {
        let mut peers = self.agent.peers();
        let peer = peers.get_mut(&self.incarnation);
        peer.expect("it is known as long as it is used").num_users += 1;
        Self {
            agent: self.agent.clone(),
            incarnation: self.incarnation,
            name: self.name.clone(),
            state: self.state.clone(),
        }
    }
}

impl Drop for NixlPeer {
    fn drop(&mut self) {
        let mut peers = self.agent.peers();
        let Some(peer) = peers.get_mut(&self.incarnation) else {
            return;
        };
        peer.num_users -= 1;
        if peer.num_users > 0 {
            return;
        }
        let agent = &self.agent;
        // SAFETY: a name. NIXL accepts a name that it has already forgotten.
        unsafe { (agent.functions.invalidate_remote_md)(agent.as_ptr(), self.name.as_ptr()) };
        peers.remove(&self.incarnation);
        drop(peers);
        lock(&self.state.quarantine).clear();
    }
}

fn agent_name(incarnation: u64) -> CString {
    CString::new(format!("corella-{incarnation:x}")).expect("no zero byte")
}

/// Joins adjacent regions, because each piece of memory that is read must lie within one registration.
fn joined(mut regions: Vec<NonNull<[u8]>>) -> Vec<NonNull<[u8]>> {
    regions.sort_by_key(|region| region.cast::<u8>());
    let mut joined: Vec<NonNull<[u8]>> = Vec::new();
    for region in regions {
        let start = region.cast::<u8>().as_ptr();
        match joined.last_mut() {
            Some(last) if last.cast::<u8>().as_ptr().wrapping_add(last.len()) == start => {
                *last = NonNull::slice_from_raw_parts(last.cast(), last.len() + region.len());
            }
            _ => joined.push(region),
        }
    }
    joined
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
