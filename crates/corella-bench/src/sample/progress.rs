//! The progress of a run, shown on stderr if that is a terminal.

use std::io::{IsTerminal, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const INTERVAL: Duration = Duration::from_millis(200);

pub(crate) struct Progress {
    is_shown: bool,
    /// The name of the run, among several runs.
    label: String,
    num_prompts: usize,
    num_finished: AtomicUsize,
    num_tokens: AtomicU64,
    start: Instant,
    drawn: Mutex<Instant>,
}

impl Progress {
    pub(crate) fn new(label: String, num_prompts: usize) -> Self {
        let now = Instant::now();
        Self {
            is_shown: std::io::stderr().is_terminal(),
            label,
            num_prompts,
            num_finished: AtomicUsize::new(0),
            num_tokens: AtomicU64::new(0),
            start: now,
            drawn: Mutex::new(now),
        }
    }

    pub(crate) fn add_tokens(&self, num_tokens: u64) {
        self.num_tokens.fetch_add(num_tokens, Ordering::Relaxed);
        self.draw();
    }

    pub(crate) fn add_request(&self) {
        self.num_finished.fetch_add(1, Ordering::Relaxed);
        self.draw();
    }

    pub(crate) fn finish(&self) {
        if self.is_shown {
            eprint!("\r\x1b[K");
        }
    }

    fn draw(&self) {
        // Another task is drawing already.
        let Some(mut drawn) = self.drawn.try_lock().ok().filter(|_| self.is_shown) else {
            return;
        };
        if drawn.elapsed() < INTERVAL {
            return;
        }
        *drawn = Instant::now();
        let num_tokens = self.num_tokens.load(Ordering::Relaxed);
        eprint!(
            "\r\x1b[K{}{}/{} requests, {num_tokens} tokens, {:.1} tokens/s",
            self.label,
            self.num_finished.load(Ordering::Relaxed),
            self.num_prompts,
            num_tokens as f64 / self.start.elapsed().as_secs_f64(),
        );
        // A failed write of the progress line must not stop the run.
        let _ = std::io::stderr().flush();
    }
}
