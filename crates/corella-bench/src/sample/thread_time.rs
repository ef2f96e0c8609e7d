//! The processor time of a thread.

use std::time::Duration;

/// Returns the processor time of this thread. Other threads do not count, so a rare long call is caused by the caller
/// itself, even on a busy machine.
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
    use super::*;

    const SPAN: Duration = Duration::from_millis(50);

    /// Burns CPU until this thread has used `SPAN`, and returns the used time.
    fn compute() -> Duration {
        let start = thread_time();
        // The loop also ends if the clock stands still. One reading takes less than a microsecond.
        let mut looks = (0..10_000_000).map(|_| thread_time() - start);
        looks.find(|time| *time >= SPAN).unwrap_or_default()
    }

    /// While this thread waits for another thread, only the other thread's time grows.
    #[test]
    fn only_time_on_the_processor_counts() {
        let start = thread_time();
        let computed = std::thread::spawn(compute).join().unwrap();
        let waited = thread_time() - start;
        assert!(computed >= SPAN);
        assert!(waited < SPAN, "{waited:?} for waiting");
        assert!(compute() >= SPAN);
        assert!(thread_time() - start >= waited + SPAN);
    }
}
