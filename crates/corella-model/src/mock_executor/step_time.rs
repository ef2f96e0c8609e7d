//! When the mock's steps begin and end by the wall clock, as its cost model says.

use std::time::{Duration, Instant};

use corella_core::{Batch, InputToken};

use crate::{Fault, MockConfig};

/// The time of the pipeline's stages.
pub(super) struct StepClock {
    /// When the last step leaves the last stage.
    busy_until: Instant,
}

/// The time of one step.
pub(super) struct StepTime {
    duration: Duration,
    num_layers: u32,
    pub done_at: Instant,
}

impl StepClock {
    pub fn start() -> Self {
        Self {
            busy_until: Instant::now(),
        }
    }

    /// The time of a step that is submitted now.
    pub fn plan(&mut self, config: &MockConfig, batch: &Batch) -> StepTime {
        let cost = config.cost.as_ref();
        let duration = cost.map_or(Duration::ZERO, |cost| cost.step_duration(batch));
        let stage_duration = duration / config.num_stages;
        let now = Instant::now();
        let waits = |token: &InputToken| matches!(token, InputToken::FromStep { .. });
        self.busy_until = if batch.tokens.iter().any(waits) {
            self.busy_until.max(now) + duration
        } else {
            (now + duration).max(self.busy_until + stage_duration)
        };
        let hangs = config
            .faults
            .iter()
            .filter_map(|(step, fault)| match fault {
                Fault::Hang(duration) if *step == batch.step => Some(*duration),
                _ => None,
            });
        StepTime {
            duration,
            num_layers: config.num_layers,
            done_at: self.busy_until + hangs.sum::<Duration>(),
        }
    }
}

impl StepTime {
    /// When a step has the keys and values of a layer: they come evenly over its time.
    pub fn ready_at(&self, layer: usize) -> Instant {
        let num_left = self.num_layers - 1 - layer as u32;
        self.done_at - self.duration * num_left / self.num_layers
    }
}

pub(super) fn sleep_until(time: Instant) {
    std::thread::sleep(time.saturating_duration_since(Instant::now()));
}
