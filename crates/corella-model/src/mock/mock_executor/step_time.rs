//! The begin and the end of the mock's steps by the wall clock, from its cost model.

use std::time::{Duration, Instant};

use corella_core::{Batch, InputToken};

use crate::{Fault, MockConfig};

/// The schedule of the pipeline's stages.
pub(super) struct StepClock {
    /// The time at which the last step leaves the last stage.
    busy_until: Instant,
    /// The mock's own work since the last step was planned. It counts as a part of the next step's time, because a
    /// device would not do it.
    own_work: Duration,
}

/// The time of one step.
pub(super) struct StepTime {
    duration: Duration,
    num_layers: u32,
    pub done_at: Instant,
}

impl StepClock {
    pub fn new(now: Instant) -> Self {
        Self {
            busy_until: now,
            own_work: Duration::ZERO,
        }
    }

    pub fn note_own_work(&mut self, duration: Duration) {
        self.own_work += duration;
    }

    /// The time of a step that is submitted at `now`.
    pub fn plan(&mut self, config: &MockConfig, batch: &Batch, now: Instant) -> StepTime {
        let cost = config.cost.as_ref();
        let duration = cost.map_or(Duration::ZERO, |cost| cost.step_duration(batch));
        let duration = duration.saturating_sub(std::mem::take(&mut self.own_work));
        let stage_duration = duration / config.num_stages;
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
    /// The time at which a step has the keys and values of a layer. Layers are spread evenly over the step's duration.
    pub fn ready_at(&self, layer: usize) -> Instant {
        let num_left = self.num_layers - 1 - layer as u32;
        self.done_at - self.duration * num_left / self.num_layers
    }
}

pub(super) fn sleep_until(time: Instant) {
    std::thread::sleep(time.saturating_duration_since(Instant::now()));
}

#[cfg(test)]
mod tests {
    use corella_core::{SamplingParams, StepId};

    use super::*;
    use crate::{BatchBuilder, CostModel};

    const MS: Duration = Duration::from_millis(1);

    fn config() -> MockConfig {
        MockConfig {
            cost: Some(CostModel::per_step(10_000.0)),
            ..MockConfig::new(50, 8, 4)
        }
    }

    /// The end times of one request's steps that are submitted 0, 1, 2 and 50 ms after the start: the second waits for
    /// the token of the first, and the third does not wait for the second's.
    fn ends(config: &MockConfig) -> Vec<Duration> {
        let start = Instant::now();
        let mut clock = StepClock::new(start);
        let mut batches = BatchBuilder::new(0);
        let mut plan = |batch: &Batch, at| clock.plan(config, batch, start + at).done_at - start;
        batches
            .start(0, 2, &SamplingParams::GREEDY)
            .pages(0, 0, &[0])
            .span(0, 0, &[1, 2], true);
        let mut ends = vec![plan(&batches.build(), Duration::ZERO)];
        batches.span_from_step(0, 2, 0);
        ends.push(plan(&batches.build(), MS));
        for (position, at) in [(3, 2), (4, 50)] {
            batches.span(0, position, &[1], true);
            ends.push(plan(&batches.build(), at * MS));
        }
        ends
    }

    #[test]
    fn steps_come_one_after_the_other() {
        assert_eq!(ends(&config()), [10 * MS, 20 * MS, 30 * MS, 60 * MS]);
    }

    /// A stage is free for the next step when it has passed its present step to the next stage.
    #[test]
    fn stages_work_on_steps_that_wait_for_no_token() {
        let mut config = config();
        config.num_stages = 2;
        assert_eq!(ends(&config), [10 * MS, 20 * MS, 25 * MS, 60 * MS]);
    }

    #[test]
    fn the_mocks_own_work_is_a_part_of_the_next_step() {
        let config = config();
        let start = Instant::now();
        let mut clock = StepClock::new(start);
        let mut batches = BatchBuilder::new(0);
        let mut end = |clock: &mut StepClock, position, at_ms: u32| {
            batches.span(0, position, &[1], true);
            let time = clock.plan(&config, &batches.build(), start + at_ms * MS);
            time.done_at - start
        };
        assert_eq!(end(&mut clock, 0, 0), 10 * MS);
        clock.note_own_work(2 * MS);
        clock.note_own_work(MS);
        assert_eq!(end(&mut clock, 1, 13), 20 * MS);
        assert_eq!(end(&mut clock, 2, 20), 30 * MS);
        clock.note_own_work(60 * MS);
        assert_eq!(end(&mut clock, 3, 90), 90 * MS);
    }

    #[test]
    fn a_step_that_hangs_is_late_and_delays_no_other() {
        let mut config = config();
        config.faults = vec![(StepId(1), Fault::Hang(7 * MS))];
        assert_eq!(ends(&config), [10 * MS, 27 * MS, 30 * MS, 60 * MS]);
    }

    #[test]
    fn layers_come_evenly() {
        let mut config = config();
        config.num_layers = 4;
        let start = Instant::now();
        let mut clock = StepClock::new(start);
        let mut batches = BatchBuilder::new(0);
        batches.span(0, 0, &[1, 2], true);
        let time = clock.plan(&config, &batches.build(), start);
        let ready = [0, 1, 2, 3].map(|layer| time.ready_at(layer) - start);
        assert_eq!(ready, [2500, 5000, 7500, 10_000].map(Duration::from_micros));
    }
}
