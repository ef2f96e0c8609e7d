//! The watchdog: reports steps that do not return.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, io};

use corella_core::{Batch, RequestId, StepId};

use crate::state::shared::Shared;

/// Logs a step when it has run for the timeout, and again each time its running time has doubled. Gives up the engine
/// when a step has run for the deadline.
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

    /// Watches the step that is now the oldest in flight. `None` if no step is in flight.
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
        let mut patience = Patience::new(timeout, deadline);
        let mut state = self.lock();
        while !state.stopped {
            // The loop does not wake this thread for every step, so a step is noticed only here.
            let wait = match &state.step {
                None => timeout,
                Some(step) => {
                    let (id, elapsed) = (step.batch.step, step.since.elapsed());
                    match patience.look(id, elapsed) {
                        Verdict::Wait(wait) => wait,
                        Verdict::Report { is_first } => {
                            shared.lock().stats.num_slow_steps += u64::from(is_first);
                            let step = step.clone();
                            drop(state);
                            tracing::error!(
                                step = %id,
                                rows = step.batch.spans.len(),
                                tokens = step.batch.num_tokens(),
                                requests = %RequestList(&step.requests),
                                seconds = elapsed.as_secs_f64(),
                                "a {subject} has not returned"
                            );
                            state = self.lock();
                            continue;
                        }
                        Verdict::GiveUp => {
                            let seconds = elapsed.as_secs_f64();
                            shared.give_up(format!(
                                "{subject} {id} has not returned for {seconds:.0} s"
                            ));
                            continue;
                        }
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

/// Decides by a step's running time whether to report it or to give up.
struct Patience {
    timeout: Duration,
    deadline: Duration,
    /// The last step that was reported.
    reported: Option<StepId>,
    /// The running time at which that step is reported next.
    due: Duration,
    has_given_up: bool,
}

#[derive(Debug, PartialEq)]
enum Verdict {
    /// The time until the next action.
    Wait(Duration),
    Report {
        is_first: bool,
    },
    GiveUp,
}

impl Patience {
    fn new(timeout: Duration, deadline: Duration) -> Self {
        Self {
            timeout,
            deadline,
            reported: None,
            due: timeout,
            has_given_up: false,
        }
    }

    fn look(&mut self, step: StepId, elapsed: Duration) -> Verdict {
        if elapsed < self.timeout {
            return Verdict::Wait(self.timeout - elapsed);
        }
        let is_first = self.reported != Some(step);
        if is_first {
            self.reported = Some(step);
            self.due = self.timeout;
            self.has_given_up = false;
        }
        if elapsed >= self.due {
            while self.due <= elapsed {
                self.due *= 2;
            }
            return Verdict::Report { is_first };
        }
        if self.has_given_up {
            return Verdict::Wait(self.due - elapsed);
        }
        if elapsed >= self.deadline {
            self.has_given_up = true;
            return Verdict::GiveUp;
        }
        Verdict::Wait(self.due.min(self.deadline) - elapsed)
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

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: Verdict = Verdict::Report { is_first: true };
    const AGAIN: Verdict = Verdict::Report { is_first: false };

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn wait(for_ms: u64) -> Verdict {
        Verdict::Wait(ms(for_ms))
    }

    #[test]
    fn a_step_is_reported_once_per_doubling_and_given_up_once() {
        let mut patience = Patience::new(ms(100), ms(500));
        let looks = [
            (0, wait(100)),
            (99, wait(1)),
            (100, FIRST),
            (100, wait(100)),
            (199, wait(1)),
            (200, AGAIN),
            (200, wait(200)),
            (450, AGAIN),
            (450, wait(50)),
            (500, Verdict::GiveUp),
            (500, wait(300)),
            (799, wait(1)),
            // A delayed check reports once.
            (7000, AGAIN),
            (7000, wait(5800)),
        ];
        for (elapsed_ms, verdict) in looks {
            let seen = patience.look(StepId(3), ms(elapsed_ms));
            assert_eq!(seen, verdict, "after {elapsed_ms} ms");
        }
        // Another step has a running time of its own.
        for (elapsed_ms, verdict) in [(30, wait(70)), (120, FIRST), (120, wait(80))] {
            assert_eq!(patience.look(StepId(4), ms(elapsed_ms)), verdict);
        }
        assert_eq!(patience.look(StepId(4), ms(600)), AGAIN);
        assert_eq!(patience.look(StepId(4), ms(600)), Verdict::GiveUp);
    }
}
