//! Compiles modules concurrently: a model has some twenty, and each takes seconds of one core.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Runs jobs on threads of their own, a limited number at a time.
#[derive(Debug)]
pub struct Compiler {
    /// The number of jobs that may still begin.
    idle: Mutex<usize>,
    freed: Condvar,
}

/// A running or waiting job.
#[derive(Debug)]
pub struct Compilation<T>(JoinHandle<T>);

impl Compiler {
    pub fn new(num_at_once: usize) -> Arc<Self> {
        Arc::new(Self {
            idle: Mutex::new(num_at_once),
            freed: Condvar::new(),
        })
    }

    pub fn start<T: Send + 'static>(
        self: &Arc<Self>,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Compilation<T>> {
        let compiler = Arc::clone(self);
        let thread = std::thread::Builder::new().name("corella-compile".into());
        thread
            .spawn(move || {
                let _turn = Turn::wait_for(&compiler);
                job()
            })
            .map(Compilation)
    }
}

impl<T> Compilation<T> {
    /// Blocks until the job is done. `None` if it panicked.
    pub fn wait(self) -> Option<T> {
        self.0.join().ok()
    }
}

/// A place among the running jobs. Dropping this value frees it.
struct Turn<'a>(&'a Compiler);

impl<'a> Turn<'a> {
    fn wait_for(compiler: &'a Compiler) -> Self {
        let idle = compiler.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = compiler.freed.wait_while(idle, |idle| *idle == 0);
        *idle.unwrap_or_else(PoisonError::into_inner) -= 1;
        Self(compiler)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let idle = self.0.idle.lock();
        *idle.unwrap_or_else(PoisonError::into_inner) += 1;
        self.0.freed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn jobs_run_beside_each_other_but_not_more_than_may() {
        let compiler = Compiler::new(2);
        let running = Arc::new(AtomicUsize::new(0));
        // Two jobs that wait for each other end only if both run.
        let pair = Arc::new(Barrier::new(2));
        let jobs: Vec<_> = (0..10)
            .map(|index| {
                let (running, pair) = (Arc::clone(&running), Arc::clone(&pair));
                let job = move || {
                    assert!(running.fetch_add(1, Ordering::SeqCst) < 2);
                    pair.wait();
                    running.fetch_sub(1, Ordering::SeqCst);
                    index
                };
                compiler.start(job).unwrap()
            })
            .collect();
        let results: Vec<_> = jobs.into_iter().map(Compilation::wait).collect();
        assert_eq!(results, (0..10).map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn a_job_that_panics_gives_its_place_back() {
        let compiler = Compiler::new(1);
        let lost = compiler.start(|| panic!("on purpose")).unwrap();
        assert_eq!(Compilation::<()>::wait(lost), None);
        assert_eq!(compiler.start(|| 7).unwrap().wait(), Some(7));
    }
}
