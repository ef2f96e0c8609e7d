//! The watchdog: reports steps that do not return.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use corella_core::{Batch, RequestId};

use crate::engine::Shared;

/// Logs a step when it has run for the timeout, and again each time that this has doubled. Gives
/// the engine up when a step has run for the deadline.
pub(crate) struct Watchdog {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
}

/// A step that is running, and its requests.
#[derive(Clone)]
pub(crate) struct WatchedStep {
    pub(crate) batch: Arc<Batch>,
    pub(crate) requests: Arc<[RequestId]>,
    pub(crate) since: Instant,
}

impl Watchdog {
    /// `subject` names the watched steps in reports.
    pub(crate) fn start(
        subject: &'static str,
        timeout: Duration,
        deadline: Duration,
        shared: Arc<Shared>,
    ) -> io::Result<Self> {
        // Doubling zero would not make progress.
        let timeout = timeout.max(Duration::from_millis(1));
        let watch = Arc::new(Watch::default());
        let seen = watch.clone();
        let thread = thread::Builder::new()
            .name("corella-watchdog".to_owned())
            .spawn(move || seen.run(subject, timeout, deadline, &shared))?;
        Ok(Self {
            watch,
            thread: Some(thread),
        })
    }

    /// Watches this step from now on: it has become the oldest in flight.
    pub(crate) fn watch(&self, step: Option<WatchedStep>) {
        self.watch.lock().step = step;
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.watch.lock().stopped = true;
        self.watch.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[derive(Default)]
struct Watch {
    state: Mutex<WatchState>,
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    step: Option<WatchedStep>,
    stopped: bool,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, WatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, subject: &str, timeout: Duration, deadline: Duration, shared: &Shared) {
        let mut reported = None;
        let mut given_up = None;
        let mut due = timeout;
        let mut state = self.lock();
        while !state.stopped {
            // The loop does not wake this thread for every step, so a step is noticed only here.
            let wait = match &state.step {
                None => timeout,
                Some(step) if step.since.elapsed() < timeout => {
                    timeout.saturating_sub(step.since.elapsed())
                }
                Some(step) => {
                    let elapsed = step.since.elapsed();
                    if reported != Some(step.batch.step) {
                        reported = Some(step.batch.step);
                        due = timeout;
                        shared.lock().stats.num_slow_steps += 1;
                    }
                    if elapsed >= due {
                        while due <= elapsed {
                            due *= 2;
                        }
                        let step = step.clone();
                        drop(state);
                        tracing::error!(
                            step = %step.batch.step,
                            rows = step.batch.spans.len(),
                            tokens = step.batch.num_tokens(),
                            requests = %RequestList(&step.requests),
                            seconds = elapsed.as_secs_f64(),
                            "a {subject} has not returned"
                        );
                        state = self.lock();
                        continue;
                    }
                    if elapsed >= deadline && given_up != reported {
                        given_up = reported;
                        let (id, seconds) = (step.batch.step, elapsed.as_secs_f64());
                        shared.give_up(format!(
                            "{subject} {id} has not returned for {seconds:.0} s"
                        ));
                    }
                    match given_up == reported {
                        true => due - elapsed,
                        false => due.min(deadline) - elapsed,
                    }
                }
            };
            (state, _) = self
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Formats the first few ids, so that the report stays one line.
struct RequestList<'a>(&'a [RequestId]);

impl fmt::Display for RequestList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 16;
        for (i, id) in self.0.iter().take(SHOWN).enumerate() {
            if i > 0 {
                f.write_str(" ")?;
            }
            id.fmt(f)?;
        }
        match self.0.len().checked_sub(SHOWN) {
            None | Some(0) => Ok(()),
            Some(more) => write!(f, " and {more} more"),
        }
    }
}
