//! Signals to other processes, and signals that end this one.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

// Linux's numbers on all its supported architectures, and macOS's where they differ.
const HANGUP: i32 = 1;
const INTERRUPT: i32 = 2;
const KILL: i32 = 9;
const TERMINATE: i32 = 15;
const CONTINUE: i32 = if cfg!(target_os = "linux") { 18 } else { 19 };
const STOP: i32 = if cfg!(target_os = "linux") { 19 } else { 17 };

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    Interrupt,
    Kill,
    Continue,
    Stop,
}

impl Signal {
    fn number(self) -> i32 {
        match self {
            Self::Interrupt => INTERRUPT,
            Self::Kill => KILL,
            Self::Continue => CONTINUE,
            Self::Stop => STOP,
        }
    }

    /// Sends the signal to a process. It may have ended meanwhile.
    pub fn send(self, process_id: i32) {
        assert!(
            process_id > 0,
            "0 and negative numbers are groups of processes"
        );
        // SAFETY: kill takes no memory.
        unsafe { kill(process_id, self.number()) };
    }

    /// Sends the signal to all processes of a group.
    pub fn send_to_group(self, group: i32) {
        assert!(group > 1, "-1 is every process there is");
        // SAFETY: kill takes no memory.
        unsafe { kill(-group, self.number()) };
    }
}

unsafe extern "C" {
    fn kill(process_id: i32, signal: i32) -> i32;
    fn signal(signal: i32, handler: extern "C" fn(i32)) -> usize;
    fn _exit(status: i32) -> !;
}

static IS_ASKED_TO_END: AtomicBool = AtomicBool::new(false);
/// The running process group, or 0.
static GROUP: AtomicI32 = AtomicI32::new(0);

/// From now on, Ctrl-C and similar signals are noted instead of ending the process. The second one ends it and its
/// children.
pub fn catch_ends() {
    for number in [HANGUP, INTERRUPT, TERMINATE] {
        // SAFETY: the handler uses atomics and two functions that are safe in signal handlers.
        unsafe { signal(number, handle_end) };
    }
}

/// Returns whether the user wants this process to end.
pub fn is_asked_to_end() -> bool {
    IS_ASKED_TO_END.load(Ordering::Relaxed)
}

/// Sets the process group that must not outlive this process, or 0.
pub fn set_group(group: i32) {
    GROUP.store(group, Ordering::Relaxed);
}

extern "C" fn handle_end(_: i32) {
    if !IS_ASKED_TO_END.swap(true, Ordering::Relaxed) {
        return;
    }
    let group = GROUP.load(Ordering::Relaxed);
    // SAFETY: kill and _exit take no memory, and POSIX lets handlers call them.
    unsafe {
        if group > 1 {
            kill(-group, KILL);
        }
        _exit(130);
    }
}
