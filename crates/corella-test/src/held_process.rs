//! A process that is held still.

use crate::wait_until;

/// Keeps a process stopped (`SIGSTOP`) until it is dropped (`SIGCONT`). Meanwhile the process does nothing, so a test
/// can look at everything else in peace.
pub struct HeldProcess {
    process_id: u32,
}

impl HeldProcess {
    /// Stops a process and waits until all of its threads have stopped.
    ///
    /// # Panics
    ///
    /// Panics if there is no such process.
    pub fn new(process_id: u32) -> Self {
        send_signal(process_id, libc::SIGSTOP);
        let what = format!("process {process_id} stops");
        wait_until(&what, || is_stopped(process_id));
        Self { process_id }
    }
}

impl Drop for HeldProcess {
    fn drop(&mut self) {
        send_signal(self.process_id, libc::SIGCONT);
    }
}

fn send_signal(process_id: u32, signal: i32) {
    let id = i32::try_from(process_id).expect("the id of a process is positive");
    // SAFETY: kill takes no memory.
    let result = unsafe { libc::kill(id, signal) };
    let error = std::io::Error::last_os_error();
    assert_eq!(result, 0, "process {process_id}: {error}");
}

fn is_stopped(process_id: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{process_id}/task"));
    let threads = threads.unwrap_or_else(|error| panic!("process {process_id}: {error}"));
    threads.flatten().all(|thread| {
        // A thread without a `stat` file has ended, and counts as stopped.
        let Ok(status) = std::fs::read_to_string(thread.path().join("stat")) else {
            return true;
        };
        // The state follows the thread's name in parentheses, which may contain any characters.
        let state = status
            .rsplit(") ")
            .next()
            .and_then(|rest| rest.chars().next());
        matches!(state, Some('T' | 't' | 'Z' | 'X'))
    })
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_held_process_writes_nothing_and_goes_on() {
        let mut process = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let held = HeldProcess::new(process.id());
        assert!(is_stopped(process.id()));
        drop(process.stdin.take());
        drop(held);
        let mut text = String::new();
        process
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert!(process.wait().unwrap().success());
    }
}
