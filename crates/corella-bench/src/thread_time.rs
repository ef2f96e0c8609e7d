//! The processor time of a thread.

use std::time::Duration;

/// The time for which this thread has run. Time in which others had the processor does not count,
/// so that a rare long call is the caller's own even on a busy machine.
pub(crate) fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for writing, and nothing else is written.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "the clock of this thread cannot be read");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Busy waiting takes processor time of this thread; sleeping takes next to none.
    #[test]
    fn only_time_on_the_processor_counts() {
        let start = thread_time();
        std::thread::sleep(Duration::from_millis(50));
        assert!(thread_time() - start < Duration::from_millis(25));
        let (wall, start) = (Instant::now(), thread_time());
        while thread_time() - start < Duration::from_millis(5) {}
        assert!(wall.elapsed() >= Duration::from_millis(5));
    }
}
