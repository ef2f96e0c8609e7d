//! Processor time of this thread.

use std::time::Duration;

/// Time in which this thread has run. What others had the processor for does not count, and so
/// the rare long call is the caller's own also on a machine with neighbours.
pub(crate) fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid place for the answer, and nothing else is written.
    let status = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    assert_eq!(status, 0, "every thread has a clock");
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Counting takes time of this thread; sleeping takes none to speak of.
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
