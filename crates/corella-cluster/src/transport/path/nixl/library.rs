//! NIXL's functions, loaded at run time.

use std::ffi::{CStr, CString, OsString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Names the library file instead of the loader's path.
const LIBRARY_VARIABLE: &str = "CORELLA_NIXL_LIBRARY";
const LIBRARY: &str = "libnixl_capi.so";

/// Set once the process has loaded the library.
static IS_LOADED: AtomicBool = AtomicBool::new(false);

/// Ends the process like [`std::process::exit`], but skips the exit handlers of libraries where NIXL is loaded: UCX's
/// handlers free memory in use by threads that still close their connections.
pub fn exit(code: i32) -> ! {
    if IS_LOADED.load(Ordering::Relaxed) {
        // No reader is left for an error.
        let _ = std::io::stdout().flush();
        // SAFETY: it ends the process at once.
        unsafe { libc::_exit(code) };
    }
    std::process::exit(code)
}

/// NIXL 1.5 or later. It is never unloaded, because it has threads and handlers of its own.
#[derive(Clone)]
pub struct NixlLibrary {
    pub(super) functions: Arc<Functions>,
}

impl NixlLibrary {
    /// Opens the library that `CORELLA_NIXL_LIBRARY` names, or the one in the loader's path.
    pub fn find() -> Result<Self, NixlError> {
        match std::env::var_os(LIBRARY_VARIABLE) {
            Some(path) => Self::open(path.as_ref()),
            None => Self::open(LIBRARY.as_ref()),
        }
    }

    /// A name without a folder is found in the loader's path.
    pub fn open(path: &Path) -> Result<Self, NixlError> {
        let missing = |reason| NixlError::Missing {
            path: path.as_os_str().to_owned(),
            reason,
        };
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| missing("a path with a zero byte".to_owned()))?;
        // SAFETY: a name that ends with a zero byte. The library's initialisers run, as intended.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(missing(loader_error()));
        }
        IS_LOADED.store(true, Ordering::Relaxed);
        let find = |name: &'static CStr| {
            // SAFETY: an open library, and a name that ends with a zero byte.
            let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
            match symbol.is_null() {
                false => Ok(symbol),
                true => Err(missing(format!("it has no {}", name.to_string_lossy()))),
            }
        };
        // SAFETY: the library is never closed, and its functions are as declared.
        let functions = unsafe { Functions::find(find) }?;
        Ok(Self {
            functions: Arc::new(functions),
        })
    }
}

impl fmt::Debug for NixlLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NixlLibrary")
    }
}

fn loader_error() -> String {
    // SAFETY: the text, if not null, stays until this thread's next call of the loader.
    unsafe {
        let text = libc::dlerror();
        match text.is_null() {
            true => "unknown reason".to_owned(),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    }
}

/// Why rows cannot travel by NIXL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NixlError {
    #[error(
        "NIXL 1.5 or later cannot be loaded from {} ({reason}); install it, for example with `pip install --no-deps \
         --target DIR nixl-cu12`, and give the path of its {LIBRARY} in {LIBRARY_VARIABLE}, or put its folder into the \
         loader's path",
        .path.display()
    )]
    Missing { path: OsString, reason: String },
    /// A call that failed, and NIXL's status.
    #[error("NIXL could not {0} (status {1})")]
    Failed(&'static str, c_int),
    /// A fault of the peer.
    #[error("{0}")]
    Peer(&'static str),
    #[error("a read by NIXL did not end in time")]
    TimedOut,
    #[error("too many reads by NIXL from peers that were lost have not ended")]
    TooManyUnfinished,
}

/// Opaque objects of NIXL.
macro_rules! opaque {
    ($($name:ident),*) => {
        $(#[repr(C)] pub struct $name { _private: [u8; 0] })*
    };
}

opaque!(
    Agent,
    Backend,
    Options,
    Params,
    RegisterList,
    Request,
    TransferList
);

pub const SUCCESS: c_int = 0;
pub const IN_PROGRESS: c_int = 1;
/// Memory of the host.
pub const DRAM: c_int = 0;
pub const READ: c_int = 0;
/// Any thread may call any function.
pub const SYNC_STRICT: c_int = 1;

#[repr(C)]
pub struct AgentConfig {
    pub has_progress_thread: bool,
    pub has_listen_thread: bool,
    pub listen_port: c_int,
    pub thread_sync: c_int,
    pub num_workers: c_uint,
    pub progress_delay_us: u64,
    pub listen_delay_us: u64,
    pub has_telemetry: bool,
}

/// Functions of NIXL's C interface, without their prefix `nixl_capi_`. Each returns a status: 0 for success, 1 for a
/// call in progress, and a negative number for an error.
macro_rules! functions {
    ($($name:ident($($argument:ty),*);)*) => {
        pub struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl Functions {
            /// # Safety
            /// `find` returns a function with these arguments, which stays.
            unsafe fn find(
                find: impl Fn(&'static CStr) -> Result<*mut c_void, NixlError>,
            ) -> Result<Self, NixlError> {
                Ok(Self {
                    $($name: {
                        const NAME: &str = concat!("nixl_capi_", stringify!($name), "\0");
                        let name = CStr::from_bytes_with_nul(NAME.as_bytes());
                        let symbol = find(name.expect("one zero byte, at the end"))?;
                        // SAFETY: promised by the caller.
                        unsafe {
                            std::mem::transmute::<
                                *mut c_void,
                                unsafe extern "C" fn($($argument),*) -> c_int,
                            >(symbol)
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    create_configured_agent(*const c_char, *const AgentConfig, *mut *mut Agent);
    destroy_agent(*mut Agent);
    create_params(*mut *mut Params);
    destroy_params(*mut Params);
    create_backend(*mut Agent, *const c_char, *mut Params, *mut *mut Backend);
    destroy_backend(*mut Backend);
    create_reg_dlist(c_int, *mut *mut RegisterList);
    reg_dlist_add_desc(*mut RegisterList, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist(*mut RegisterList);
    register_mem(*mut Agent, *mut RegisterList, *mut Options);
    deregister_mem(*mut Agent, *mut RegisterList, *mut Options);
    get_local_md(*mut Agent, *mut *mut c_void, *mut usize);
    load_remote_md(*mut Agent, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md(*mut Agent, *const c_char);
    create_xfer_dlist(c_int, *mut *mut TransferList);
    xfer_dlist_add_desc(*mut TransferList, usize, usize, u64);
    destroy_xfer_dlist(*mut TransferList);
    create_xfer_req(
        *mut Agent,
        c_int,
        *mut TransferList,
        *mut TransferList,
        *const c_char,
        *mut *mut Request,
        *mut Options
    );
    post_xfer_req(*mut Agent, *mut Request, *mut Options);
    get_xfer_status(*mut Agent, *mut Request);
    release_xfer_req(*mut Agent, *mut Request);
    destroy_xfer_req(*mut Request);
}

/// Returns an error unless a call has succeeded.
pub fn check(what: &'static str, status: c_int) -> Result<(), NixlError> {
    match status {
        SUCCESS => Ok(()),
        status => Err(NixlError::Failed(what, status)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_said_in_one_line_with_what_to_do() {
        let error = NixlLibrary::open("/nowhere/libnixl_capi.so".as_ref()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/nowhere/libnixl_capi.so"), "{text}");
        assert!(text.contains("pip install"), "{text}");
        assert!(text.contains("CORELLA_NIXL_LIBRARY"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }

    #[test]
    fn another_library_is_none() {
        let error = NixlLibrary::open("libc.so.6".as_ref()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("it has no nixl_capi_create_configured_agent"),
            "{text}"
        );
    }
}
