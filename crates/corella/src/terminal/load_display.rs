//! Shows the progress of loading a model on a terminal.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::LoadWatcher;
use crate::terminal::progress_line::{ProgressLine, bar, display_time};

/// A shorter wait needs no line.
const PATIENCE: Duration = Duration::from_millis(300);

/// Shows a line once loading takes a while, until the last layer is in memory.
pub fn load_watcher() -> LoadWatcher {
    let shown: Mutex<Option<(ProgressLine, Instant)>> = Mutex::new(None);
    LoadWatcher(Arc::new(move |num_done, num_layers| {
        let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
        let (line, began) = shown.get_or_insert_with(|| (ProgressLine::new(), Instant::now()));
        let elapsed = began.elapsed();
        if num_done == num_layers {
            *shown = None;
        } else if elapsed >= PATIENCE {
            line.show(&describe(num_done, num_layers, elapsed));
        }
    }))
}

/// Estimates the time of the remaining layers, assumed to be alike, from the time since the first
/// one was in memory. `num_done` is at least 2.
fn describe(num_done: usize, num_layers: usize, elapsed: Duration) -> String {
    let bar = bar(num_done as f64 / num_layers as f64, 30);
    let left = elapsed.mul_f64((num_layers - num_done) as f64 / (num_done - 1) as f64);
    let left = display_time(left);
    format!("loading {bar} {num_done} of {num_layers} layers, {left} left")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_left_is_that_of_the_layers_left() {
        assert_eq!(
            describe(10, 40, Duration::from_secs(3)),
            "loading [=======                       ] 10 of 40 layers, 10 s left"
        );
    }
}
