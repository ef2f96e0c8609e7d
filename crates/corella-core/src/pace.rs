//! The duration of steps: smoothed averages, in whole microseconds.

/// A step shows the speed of prompts only with at least this many prompt tokens. In a smaller step, the fixed cost
/// dominates.
const MIN_BULK_TOKENS: u64 = 256;

/// Times steps. The scheduler learns the time only when it plans a step. The engine plans right after a step has
/// returned, so the time of the plan counts as the end of that step.
#[derive(Debug, Default)]
pub(crate) struct Pace {
    now_us: u64,
    /// The steps that have returned since the last plan.
    returned: Option<Returned>,
    last_return_us: u64,
    /// Microseconds for 1,024 tokens, over steps that mostly prefill; 0 before the first.
    prefill_us: u64,
    /// Microseconds for 1,024 tokens, over steps of at least `MIN_BULK_TOKENS` prompt tokens.
    bulk_prefill_us: u64,
    /// Microseconds of a step in which any request decodes; 0 before the first.
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
    /// The latest time passed to the scheduler.
    pub fn now_us(&self) -> u64 {
        self.now_us
    }

    pub fn set_now(&mut self, now_us: u64) {
        self.now_us = now_us;
    }

    pub fn note_returned(&mut self, planned_us: u64, num_tokens: u32, num_prefill_tokens: u32) {
        let returned = self.returned.get_or_insert(Returned {
            planned_us,
            num_steps: 0,
            num_tokens: 0,
            num_prefill_tokens: 0,
        });
        returned.num_steps += 1;
        returned.num_tokens += u64::from(num_tokens);
        returned.num_prefill_tokens += u64::from(num_prefill_tokens);
    }

    /// Times the steps that have returned since the last plan. The current time counts as their end.
    pub fn time_returned(&mut self) {
        let now_us = self.now_us;
        let Some(returned) = self.returned.take() else {
            return;
        };
        // A step that was planned ahead begins when the one before it has returned.
        let began_us = returned.planned_us.max(self.last_return_us);
        let elapsed_us = now_us.saturating_sub(began_us);
        self.last_return_us = now_us;
        if 2 * returned.num_prefill_tokens >= returned.num_tokens {
            let prefill_us = elapsed_us * 1024 / returned.num_tokens.max(1);
            smooth(&mut self.prefill_us, prefill_us);
            if returned.num_prefill_tokens >= MIN_BULK_TOKENS * returned.num_steps {
                smooth(&mut self.bulk_prefill_us, prefill_us);
            }
        }
        if returned.num_prefill_tokens < returned.num_tokens {
            smooth(&mut self.decode_step_us, elapsed_us / returned.num_steps);
        }
    }

    /// The time that `num_tokens` prompt tokens take, or 0 before any step was timed.
    pub fn prefill_us(&self, num_tokens: u64) -> u64 {
        num_tokens.saturating_mul(self.prefill_us) / 1024
    }

    /// The time of 1,024 prompt tokens in large steps; 0 before one was timed.
    pub fn bulk_prefill_us(&self) -> u64 {
        self.bulk_prefill_us
    }

    pub fn decode_step_us(&self) -> u64 {
        self.decode_step_us
    }
}

/// An exponential moving average that gives a new value the weight 1/8.
pub(crate) fn smooth(mean: &mut u64, value: u64) {
    *mean = match *mean {
        0 => value,
        mean => (7 * mean + value) / 8,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(pace: &mut Pace, elapsed_us: u64, num_tokens: u32, num_prefill_tokens: u32) {
        let planned_us = pace.now_us();
        pace.note_returned(planned_us, num_tokens, num_prefill_tokens);
        pace.set_now(planned_us + elapsed_us);
        pace.time_returned();
    }

    #[test]
    fn short_steps_say_nothing_of_bulk_speed() {
        let mut pace = Pace::default();
        // 16 tokens in 1 ms: 64 ms for 1,024.
        time(&mut pace, 1_000, 16, 16);
        assert_eq!((pace.prefill_us(1024), pace.bulk_prefill_us()), (64_000, 0));
        // 512 tokens in 4 ms, beside requests that decode.
        time(&mut pace, 4_000, 512, 500);
        assert_eq!(pace.bulk_prefill_us(), 8_000);
        assert_eq!(pace.prefill_us(1024), (7 * 64_000 + 8_000) / 8);
        time(&mut pace, 9_000, 255, 255);
        assert_eq!(pace.bulk_prefill_us(), 8_000);
    }
}
