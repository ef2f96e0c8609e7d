//! How long steps take, by their returns: whole microseconds, smoothed.

use crate::step_plan::InflightStep;

/// Steps are timed where the scheduler hears of time: when it plans. The loop plans right after
/// a return, so that is where the step ended.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    /// What has returned since the last plan.
    returned: Option<Returned>,
    last_return_us: u64,
    /// Of steps that mostly prefill: microseconds for 1,024 tokens; 0 before the first.
    prefill_us: u64,
    /// Of a step in which anyone decodes; 0 before the first.
    decode_step_us: u64,
}

#[derive(Clone, Copy, Debug)]
struct Returned {
    planned_us: u64,
    num_steps: u64,
    num_tokens: u64,
    num_prefill_tokens: u64,
}

impl Pace {
    pub fn note_returned(&mut self, step: &InflightStep) {
        let returned = self.returned.get_or_insert(Returned {
            planned_us: step.planned_us,
            num_steps: 0,
            num_tokens: 0,
            num_prefill_tokens: 0,
        });
        returned.num_steps += 1;
        returned.num_tokens += u64::from(step.num_tokens);
        returned.num_prefill_tokens += u64::from(step.num_prefill_tokens);
    }

    pub fn note_time(&mut self, now_us: u64) {
        let Some(returned) = self.returned.take() else {
            return;
        };
        // A step planned ahead begins when the one before it has returned.
        let began_us = returned.planned_us.max(self.last_return_us);
        let elapsed_us = now_us.saturating_sub(began_us);
        self.last_return_us = now_us;
        if 2 * returned.num_prefill_tokens >= returned.num_tokens {
            smooth(
                &mut self.prefill_us,
                elapsed_us * 1024 / returned.num_tokens.max(1),
            );
        }
        if returned.num_prefill_tokens < returned.num_tokens {
            smooth(&mut self.decode_step_us, elapsed_us / returned.num_steps);
        }
    }

    /// How long so many prompt tokens take; no time before the first were timed.
    pub fn prefill_us(&self, num_tokens: u64) -> u64 {
        num_tokens.saturating_mul(self.prefill_us) / 1024
    }

    pub fn decode_step_us(&self) -> u64 {
        self.decode_step_us
    }
}

/// A mean in which each value weighs an eighth of what came before it.
fn smooth(mean: &mut u64, value: u64) {
    *mean = match *mean {
        0 => value,
        mean => (7 * mean + value) / 8,
    };
}
