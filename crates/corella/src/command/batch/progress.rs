//! A batch's progress, its speed and its remaining time.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use corella_engine::Engine;
use corella_server::batch::{ResultError, ResultResponse};

use crate::terminal::progress_line::{ProgressLine, bar, display_time};

pub struct Progress {
    line: ProgressLine,
    engine: Engine,
    num_requests: usize,
    /// Number of requests answered by earlier runs.
    num_before: usize,
    num_answered: usize,
    num_failed: usize,
    start: Instant,
    /// Times of the last seconds, each with the number of tokens generated until then.
    samples: VecDeque<(Instant, u64)>,
}

/// The time over which the speed is measured.
const WINDOW: Duration = Duration::from_secs(10);

impl Progress {
    pub fn new(engine: Engine, num_before: usize, num_requests: usize) -> Self {
        Self {
            line: ProgressLine::new(),
            engine,
            num_requests,
            num_before,
            num_answered: 0,
            num_failed: 0,
            start: Instant::now(),
            samples: VecDeque::new(),
        }
    }

    pub fn count(&mut self, result: &Result<ResultResponse, ResultError>) {
        match result {
            Ok(response) if response.status_code < 400 => self.num_answered += 1,
            _ => self.num_failed += 1,
        }
    }

    /// Returns the number of requests that this run has finished.
    pub fn num_done(&self) -> usize {
        self.num_answered + self.num_failed
    }

    pub fn show(&mut self, num_running: usize) {
        let now = Instant::now();
        let num_tokens = self.engine.stats().scheduler.num_generated_tokens;
        self.samples.push_back((now, num_tokens));
        while self.samples.len() > 2 && now - self.samples[0].0 > WINDOW {
            self.samples.pop_front();
        }
        let (since, before) = self.samples[0];
        let seconds = (now - since).as_secs_f64();
        let speed = match seconds > 0.0 {
            true => (num_tokens - before) as f64 / seconds,
            false => 0.0,
        };
        let num_done = self.num_before + self.num_done();
        let num_left = self.num_requests - num_done;
        let left = time_left(now - self.start, self.num_done(), num_running, num_left);
        let left = left.map_or_else(String::new, |left| format!(", {} left", display_time(left)));
        let failed = match self.num_failed {
            0 => String::new(),
            num_failed => format!(", {num_failed} failed"),
        };
        self.line.show(&format!(
            "{} {num_done}/{}{failed}, {num_running} running, {speed:.0} tokens/s{left}",
            bar(num_done as f64 / self.num_requests as f64, 20),
            self.num_requests,
        ));
    }

    /// Clears the line, and returns a summary of this run.
    pub fn finish(self) -> String {
        let Self { line, engine, .. } = self;
        drop(line);
        let elapsed = self.start.elapsed();
        let stats = engine.stats().scheduler;
        let failed = match self.num_failed {
            0 => String::new(),
            num_failed => format!(", {num_failed} failed"),
        };
        format!(
            "{} answered{failed} in {}: {} prompt tokens, {} output tokens, {:.1} tokens/s",
            self.num_answered,
            display_time(elapsed),
            stats.num_prompt_tokens,
            stats.num_generated_tokens,
            stats.num_generated_tokens as f64 / elapsed.as_secs_f64(),
        )
    }
}

/// Estimates the remaining time from the finished work. Running requests, which are among the remaining ones, count as
/// half done. Returns `None` if nothing is done yet.
fn time_left(
    elapsed: Duration,
    num_done: usize,
    num_running: usize,
    num_left: usize,
) -> Option<Duration> {
    let half_done = num_running as f64 / 2.0;
    let left = (num_left as f64 - half_done).max(0.0);
    (num_done > 0).then(|| elapsed.mul_f64(left / (num_done as f64 + half_done)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_takes_as_long_as_what_was_done() {
        let seconds = Duration::from_secs;
        assert_eq!(time_left(seconds(10), 0, 4, 5), None);
        assert_eq!(time_left(seconds(10), 20, 0, 5), Some(seconds(10) / 4));
        assert_eq!(time_left(seconds(10), 5, 0, 0), Some(Duration::ZERO));
        // 20 requests in 10 s, of which 10 are done and 20 half done, are followed by the same amount of work.
        assert_eq!(time_left(seconds(10), 10, 20, 30), Some(seconds(10)));
        assert_eq!(time_left(seconds(10), 30, 2, 2), Some(seconds(10) / 31));
    }
}
