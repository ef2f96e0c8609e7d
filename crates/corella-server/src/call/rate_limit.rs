//! A token bucket with whole-number counts and times.

/// A minute in microseconds, and the number of units in one request or token: a limit of N per minute is then exactly N
/// units per microsecond, without rounding.
const MINUTE_US: i128 = 60_000_000;

/// Allows an amount per minute. The limit holds at most one minute's amount, and fills evenly.
///
/// Times are microseconds of any clock that never decreases.
#[derive(Clone, Debug)]
pub struct RateLimit {
    per_minute: u32,
    /// The available amount, in units. It is below zero after more was used than was available.
    level: i128,
    updated_us: u64,
}

/// Why an amount was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The amount is available after this time, unless other calls take a part of it.
    After { wait_us: u64 },
    /// The limit is smaller than the amount.
    Never,
}

impl RateLimit {
    pub fn new(per_minute: u32, now_us: u64) -> Self {
        Self {
            per_minute,
            level: i128::from(per_minute) * MINUTE_US,
            updated_us: now_us,
        }
    }

    pub fn per_minute(&self) -> u32 {
        self.per_minute
    }

    /// Takes all of `amount` or nothing.
    pub fn try_take(&mut self, now_us: u64, amount: u64) -> Result<(), Refusal> {
        self.fill(now_us);
        let wanted = i128::from(amount) * MINUTE_US;
        if wanted > self.capacity() {
            return Err(Refusal::Never);
        }
        if wanted > self.level {
            let wait_us = self.time_to_fill(wanted - self.level);
            return Err(Refusal::After { wait_us });
        }
        self.level -= wanted;
        Ok(())
    }

    /// Takes an amount that was used already, even if less is available.
    pub fn take(&mut self, now_us: u64, amount: u64) {
        self.fill(now_us);
        self.level -= i128::from(amount) * MINUTE_US;
    }

    /// Gives back an unused amount.
    pub fn give_back(&mut self, now_us: u64, amount: u64) {
        self.fill(now_us);
        self.level = (self.level + i128::from(amount) * MINUTE_US).min(self.capacity());
    }

    /// Returns the amount available now.
    pub fn remaining(&mut self, now_us: u64) -> u64 {
        self.fill(now_us);
        u64::try_from(self.level.max(0) / MINUTE_US).unwrap_or(u64::MAX)
    }

    /// Returns the time until the whole minute's amount is available.
    pub fn time_to_full_us(&mut self, now_us: u64) -> u64 {
        self.fill(now_us);
        self.time_to_fill(self.capacity() - self.level)
    }

    fn capacity(&self) -> i128 {
        i128::from(self.per_minute) * MINUTE_US
    }

    fn fill(&mut self, now_us: u64) {
        let passed_us = now_us.saturating_sub(self.updated_us);
        let filled = self.level + i128::from(passed_us) * i128::from(self.per_minute);
        self.level = filled.min(self.capacity());
        self.updated_us = self.updated_us.max(now_us);
    }

    fn time_to_fill(&self, units: i128) -> u64 {
        let rate = i128::from(self.per_minute.max(1));
        let time_us = (units + rate - 1) / rate;
        u64::try_from(time_us).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    #[test]
    fn a_minutes_worth_is_there_at_once_and_then_one_by_one() {
        let mut limit = RateLimit::new(3, 0);
        for _ in 0..3 {
            assert_eq!(limit.try_take(0, 1), Ok(()));
        }
        // Three per minute are one per 20 seconds.
        let wait_us = 20 * SECOND_US;
        assert_eq!(limit.try_take(0, 1), Err(Refusal::After { wait_us }));
        assert_eq!(
            limit.try_take(wait_us - 1, 1),
            Err(Refusal::After { wait_us: 1 })
        );
        assert_eq!(limit.try_take(wait_us, 1), Ok(()));
        assert_eq!(limit.time_to_full_us(wait_us), 60 * SECOND_US);
    }

    #[test]
    fn a_refusal_takes_nothing_and_idle_time_saves_no_more_than_a_minute() {
        let mut limit = RateLimit::new(100, 0);
        assert_eq!(limit.try_take(0, 70), Ok(()));
        // 60 tokens need 30 more, which take 18 seconds.
        let wait_us = 18 * SECOND_US;
        assert_eq!(limit.try_take(0, 60), Err(Refusal::After { wait_us }));
        assert_eq!(limit.remaining(0), 30);
        assert_eq!(limit.remaining(3600 * SECOND_US), 100);
        assert_eq!(limit.try_take(3600 * SECOND_US, 101), Err(Refusal::Never));
    }

    #[test]
    fn what_was_used_beyond_the_limit_is_waited_for() {
        let mut limit = RateLimit::new(60, 0);
        limit.take(0, 90);
        assert_eq!(limit.remaining(0), 0);
        // The limit is 30 below zero, fills by one per second, and then needs one more.
        assert_eq!(
            limit.try_take(0, 1),
            Err(Refusal::After {
                wait_us: 31 * SECOND_US
            })
        );
        limit.give_back(0, 500);
        assert_eq!(limit.remaining(0), 60);
    }

    #[test]
    fn no_rounding_adds_up() {
        // Seven per minute are no whole number per microsecond. A million small steps still equal one long step.
        let mut small = RateLimit::new(7, 0);
        let mut large = RateLimit::new(7, 0);
        small.take(0, 7);
        large.take(0, 7);
        for step in 1..=1_000_000 {
            small.remaining(step * 17);
        }
        let now_us = 17 * SECOND_US;
        assert_eq!(small.remaining(now_us), large.remaining(now_us));
        assert_eq!(small.time_to_full_us(now_us), large.time_to_full_us(now_us));
        // 17 of 60 seconds have passed.
        assert_eq!(large.time_to_full_us(now_us), 43 * SECOND_US);
    }

    #[test]
    fn a_clock_that_goes_back_gives_nothing_away() {
        let mut limit = RateLimit::new(60, 10 * SECOND_US);
        limit.take(10 * SECOND_US, 60);
        assert_eq!(limit.remaining(0), 0);
        assert_eq!(limit.remaining(11 * SECOND_US), 1);
    }
}
