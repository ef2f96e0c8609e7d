//! Runs parsing, chat templates and tokenising on blocking threads, away from the async threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use crate::wire::api_error::ApiError;
use crate::wire::body_memory::{LARGE_BODY_BYTES, MIDDLING_BODY_BYTES};

/// Bounds concurrent work: one usual body per core, one middling and one large body, so that no kind waits for a larger
/// one.
pub struct TextThreads {
    usual: Arc<Semaphore>,
    middling: Arc<Semaphore>,
    large: Arc<Semaphore>,
    num_waiting: AtomicUsize,
    started: Arc<Mutex<StartTimes>>,
}

/// The start time of each running piece of work, by its number.
#[derive(Default)]
struct StartTimes {
    num_started: u64,
    times: BTreeMap<u64, Instant>,
}

/// The state of the work, for watchers of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextWork {
    /// Bodies whose work has not been started.
    pub num_waiting: usize,
    /// The running time of the oldest unfinished work; zero if there is none. It keeps growing if that work hangs.
    pub oldest: Duration,
}

/// The caller of work: whether its client still waits for the result, and how its draws are seeded.
pub struct Caller {
    has_left: Arc<AtomicBool>,
    /// The seed of a request without one.
    pub default_seed: u64,
}

impl Caller {
    #[cfg(test)]
    pub fn who_has_left(has_left: bool) -> Self {
        Self {
            has_left: Arc::new(AtomicBool::new(has_left)),
            default_seed: 0,
        }
    }

    pub fn with_default_seed(&self, default_seed: u64) -> Self {
        Self {
            has_left: self.has_left.clone(),
            default_seed,
        }
    }

    pub fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Relaxed)
    }
}

/// Held by the waiting request. It is dropped with the request when the client leaves.
struct Presence {
    has_left: Arc<AtomicBool>,
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.has_left.store(true, Ordering::Relaxed);
    }
}

/// Counts a waiting body until this value is dropped.
struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn new(num_waiting: &'a AtomicUsize) -> Self {
        num_waiting.fetch_add(1, Ordering::Relaxed);
        Self(num_waiting)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Work that runs until this value is dropped.
struct Running {
    number: u64,
    started: Arc<Mutex<StartTimes>>,
}

impl Running {
    fn new(started: Arc<Mutex<StartTimes>>) -> Self {
        let mut times = started.lock().unwrap_or_else(PoisonError::into_inner);
        let number = times.num_started;
        times.num_started += 1;
        times.times.insert(number, Instant::now());
        drop(times);
        Self { number, started }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let mut started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        started.times.remove(&self.number);
    }
}

impl TextThreads {
    pub fn new() -> Self {
        let num_usual = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            usual: Arc::new(Semaphore::new(num_usual)),
            middling: Arc::new(Semaphore::new(1)),
            large: Arc::new(Semaphore::new(1)),
            num_waiting: AtomicUsize::new(0),
            started: Arc::default(),
        }
    }

    pub fn stats(&self) -> TextWork {
        let started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        TextWork {
            num_waiting: self.num_waiting.load(Ordering::Relaxed),
            oldest: { started.times.values().next() }.map_or(Duration::ZERO, Instant::elapsed),
        }
    }

    pub async fn run<T: Send + 'static>(
        &self,
        num_bytes: usize,
        work: impl FnOnce(&Caller) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let is_large = num_bytes >= LARGE_BODY_BYTES;
        let places = match num_bytes {
            0..MIDDLING_BODY_BYTES => &self.usual,
            MIDDLING_BODY_BYTES..LARGE_BODY_BYTES => &self.middling,
            LARGE_BODY_BYTES.. => &self.large,
        };
        // The work holds the permit, not its caller, because abandoned work still runs for a
        // moment.
        let waiting = Waiting::new(&self.num_waiting);
        let permit = places.clone().acquire_owned().await;
        drop(waiting);
        let has_left = Arc::new(AtomicBool::new(false));
        let caller = Caller {
            has_left: has_left.clone(),
            default_seed: 0,
        };
        let _presence = Presence { has_left };
        let span = tracing::Span::current();
        let started = self.started.clone();
        let work = move || {
            let _entered = span.entered();
            let _running = Running::new(started);
            let result = work(&caller);
            if is_large {
                give_memory_back();
            }
            drop(permit);
            result
        };
        match tokio::task::spawn_blocking(work).await {
            Ok(result) => result,
            Err(error) => {
                tracing::error!(%error, "preparing a request failed");
                Err(ApiError::engine("Preparing the request failed."))
            }
        }
    }
}

/// Returns the process's free memory to the system. glibc would keep the memory of a large body's values, because
/// blocks in use lie between them.
fn give_memory_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `malloc_trim` takes no pointers, and only touches memory that the allocator knows to be free.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use corella_test::wait_for_async;

    use super::*;

    /// Ends a test that would hang.
    const PATIENCE: Duration = Duration::from_secs(300);

    #[tokio::test]
    async fn work_is_told_when_no_caller_waits_for_it() {
        let threads = TextThreads::new();
        let (begun, has_begun) = mpsc::channel();
        let (go_on, goes_on) = mpsc::channel();
        let (ended, has_ended) = mpsc::channel();
        let call = tokio::spawn(async move {
            let work = move |caller: &Caller| {
                begun.send(caller.has_left()).expect("the test waits");
                goes_on.recv_timeout(PATIENCE).expect("the test goes on");
                begun.send(caller.has_left()).expect("the test waits");
                while !caller.has_left() {
                    std::thread::yield_now();
                }
                ended.send(()).expect("the test waits");
                Ok(())
            };
            threads.run(0, work).await
        });
        let next = || wait_for_async("the work looks", || has_begun.try_recv().ok());
        assert!(!next().await, "its caller waits");
        go_on.send(()).expect("the work waits");
        assert!(!next().await, "its caller still waits");
        call.abort();
        wait_for_async("the work ends", || has_ended.try_recv().ok()).await;
    }

    /// Hanging work is the oldest even while other work ends, and the work waiting for it is counted.
    #[tokio::test]
    async fn work_that_stands_still_is_seen() {
        let threads = Arc::new(TextThreads::new());
        let nothing = TextWork {
            num_waiting: 0,
            oldest: Duration::ZERO,
        };
        assert_eq!(threads.stats(), nothing);
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(std::sync::Mutex::new(ends));
        let still: Vec<_> = (0..3)
            .map(|_| {
                let (threads, ends) = (threads.clone(), ends.clone());
                tokio::spawn(async move {
                    let work = move |_: &Caller| {
                        let ends = ends.lock().expect("no holder panics");
                        Ok(ends.recv_timeout(PATIENCE).is_ok())
                    };
                    threads.run(LARGE_BODY_BYTES, work).await
                })
            })
            .collect();
        wait_for_async("one runs and two wait", || {
            let stats = threads.stats();
            (stats.num_waiting == 2 && stats.oldest > Duration::ZERO).then_some(())
        })
        .await;
        let before = threads.stats().oldest;
        assert_eq!(threads.run(0, |_| Ok(1)).await, Ok(1));
        assert!(threads.stats().oldest > before);
        for _ in 0..3 {
            end.send(()).expect("they wait");
        }
        for one in still {
            assert_eq!(one.await.expect("it does not panic"), Ok(true));
        }
        assert_eq!(threads.stats(), nothing);
    }

    /// Any number of large bodies must not delay a usual or a middling one.
    #[tokio::test]
    async fn large_bodies_hold_up_no_others() {
        let threads = Arc::new(TextThreads::new());
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(std::sync::Mutex::new(ends));
        let mut large = Vec::new();
        for _ in 0..64 {
            let (threads, ends) = (threads.clone(), ends.clone());
            large.push(tokio::spawn(async move {
                let work = move |_: &Caller| {
                    let ends = ends.lock().expect("no holder panics");
                    Ok(ends.recv_timeout(PATIENCE).is_ok())
                };
                threads.run(LARGE_BODY_BYTES, work).await
            }));
        }
        tokio::task::yield_now().await;
        for i in 0..100 {
            let num_bytes = [0, MIDDLING_BODY_BYTES, LARGE_BODY_BYTES - 1][i % 3];
            let other = threads.run(num_bytes, |_| Ok(1));
            let other = tokio::time::timeout(PATIENCE, other).await;
            assert_eq!(other.expect("it waits for no large body"), Ok(1));
        }
        for large in large {
            end.send(()).expect("they wait");
            assert_eq!(large.await.expect("it does not panic"), Ok(true));
        }
    }
}
