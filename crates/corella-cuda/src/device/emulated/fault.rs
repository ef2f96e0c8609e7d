//! A signal handler for the faults of kernels. If a kernel accesses forbidden memory, or memory in a way that a GPU
//! does not allow, the handler reports the kernel, block and thread before the process ends.

use std::cell::Cell;
use std::sync::Once;

use libc::{c_int, c_void, siginfo_t};

use super::library::EmulatedLaunch;

thread_local! {
    static RUNNING: Cell<*const EmulatedLaunch> = const { Cell::new(std::ptr::null()) };
}

/// Runs a launch and reports its faults.
pub fn watch<R>(launch: &mut EmulatedLaunch, run: impl FnOnce(*mut EmulatedLaunch) -> R) -> R {
    let launch: *mut EmulatedLaunch = launch;
    RUNNING.set(launch);
    let result = run(launch);
    RUNNING.set(std::ptr::null());
    result
}

static mut PREVIOUS: [std::mem::MaybeUninit<libc::sigaction>; SIGNALS.len()] =
    [const { std::mem::MaybeUninit::uninit() }; SIGNALS.len()];
/// Compiled checks end in an invalid instruction on x86, and in a trap elsewhere.
const SIGNALS: [c_int; 4] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGTRAP];

/// Reports faults of kernels from now on. Other faults are handled as before.
pub fn install_handler() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (index, signal) in SIGNALS.into_iter().enumerate() {
            // SAFETY: the handler only reads this thread's launch, and writes to standard error.
            unsafe {
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = handle as *const () as usize;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                let previous = (&raw mut PREVIOUS[index]).cast();
                libc::sigaction(signal, &action, previous);
            }
        }
    });
}

extern "C" fn handle(signal: c_int, info: *mut siginfo_t, _: *mut c_void) {
    let launch = RUNNING.get();
    // SAFETY: the launch runs in this very thread, the previous actions were written before this handler was installed,
    // and a foreign fault happens again when the handler returns.
    unsafe {
        if let Some(launch) = launch.as_ref() {
            let [x, y, z, thread] = launch.now();
            let name = launch.name().to_string_lossy();
            let address = (*info).si_addr() as usize;
            let reason = match signal {
                libc::SIGILL | libc::SIGTRAP => {
                    "an address is not aligned to the size of what is there".into()
                }
                _ => format!("there is no memory at {address:#x}, or its stack is too small"),
            };
            eprintln!("kernel {name}, block ({x}, {y}, {z}), thread {thread}: {reason}");
            libc::signal(signal, libc::SIG_DFL);
            return;
        }
        let index = SIGNALS
            .iter()
            .position(|&known| known == signal)
            .unwrap_or(0);
        let previous = (&raw const PREVIOUS[index]).cast::<libc::sigaction>();
        libc::sigaction(signal, previous, std::ptr::null_mut());
    }
}
