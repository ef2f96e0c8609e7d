//! The bandwidth at which a peer takes rows.

use std::time::{Duration, Instant};

/// After this much newer sending time, older samples count half.
const HALF_LIFE: Duration = Duration::from_secs(2);
/// The age at which samples no longer describe the link. Placement tries a slow link again after this time, and must
/// then learn the link's new speed.
const LIFETIME: Duration = Duration::from_mins(1);
/// The interval between samples while the peer always has work.
const SAMPLE_TIME: Duration = Duration::from_millis(50);

/// Measures the bandwidth: acknowledged bytes, divided by the time in which bytes were unacknowledged or a load had
/// something to send. The time in which the peer waits for the executor does not count. Receivers acknowledge each run
/// of rows at once, so the time ends with the last of the bytes.
///
/// If the sender ran out of rows, for example because a layer is sent while the next one is computed, the sample is a
/// lower bound of the link's speed: it contains round trips and waits for a core. Such a sample counts if it is the
/// first or the fastest. Only a sample in which there was something to send throughout can show that a link has become
/// slower.
#[derive(Default)]
pub struct BandwidthMeter {
    num_unacknowledged: u64,
    /// The number of loads that have something to send.
    num_working: usize,
    /// When the next sample begins.
    busy_since: Option<Instant>,
    /// The bytes acknowledged since `busy_since`, and the last acknowledgement.
    num_acknowledged: u64,
    acknowledged_at: Option<Instant>,
    /// Whether there was a time since `busy_since` when no load had anything to send.
    ran_out: bool,
    /// Decayed sums over the samples.
    num_bytes: f64,
    num_seconds: f64,
    sampled_at: Option<Instant>,
}

impl BandwidthMeter {
    pub fn handle_sent(&mut self, num_bytes: u64, now: Instant) {
        self.num_unacknowledged += num_bytes;
        self.busy_since.get_or_insert(now);
    }

    /// Counts a load that has something to send, until `handle_pause`.
    pub fn handle_work(&mut self) {
        self.num_working += 1;
    }

    pub fn handle_pause(&mut self) {
        self.num_working -= 1;
        self.ran_out |= self.num_working == 0 && self.num_unacknowledged > 0;
        self.end_if_idle();
    }

    pub fn handle_acknowledged(&mut self, num_bytes: u64, now: Instant) {
        let num_bytes = num_bytes.min(self.num_unacknowledged);
        self.num_unacknowledged -= num_bytes;
        let Some(since) = self.busy_since.filter(|_| num_bytes > 0) else {
            return;
        };
        self.num_acknowledged += num_bytes;
        self.acknowledged_at = Some(now);
        if now.saturating_duration_since(since) >= SAMPLE_TIME {
            self.sample();
            self.busy_since = Some(now);
            self.ran_out = self.num_working == 0;
        }
        self.end_if_idle();
    }

    /// Removes bytes that will never be acknowledged, because the connection or the load has ended.
    pub fn handle_lost(&mut self, num_bytes: u64) {
        self.num_unacknowledged = self.num_unacknowledged.saturating_sub(num_bytes);
        self.end_if_idle();
    }

    fn end_if_idle(&mut self) {
        if self.num_unacknowledged == 0 && self.num_working == 0 {
            self.sample();
            self.busy_since = None;
            self.ran_out = false;
        }
    }

    fn sample(&mut self) {
        if let Some((time, at)) = self.unsampled() {
            (self.num_bytes, self.num_seconds) = self.sums_with(time, at);
            self.sampled_at = Some(at);
        }
        self.num_acknowledged = 0;
        self.acknowledged_at = None;
    }

    /// The duration of the next sample so far, and the last acknowledgement.
    fn unsampled(&self) -> Option<(Duration, Instant)> {
        let (since, at) = (self.busy_since?, self.acknowledged_at?);
        // The clock may have stood still since the bytes were sent.
        let time = at.saturating_duration_since(since);
        Some((time.max(Duration::from_nanos(1)), at))
    }

    /// The sums together with the next sample, which takes `time` and ends at `at`.
    fn sums_with(&self, time: Duration, at: Instant) -> (f64, f64) {
        let sample = (self.num_acknowledged as f64, time.as_secs_f64());
        let is_forgotten = |then| at.saturating_duration_since(then) > LIFETIME;
        if self.num_seconds == 0.0 || self.sampled_at.is_some_and(is_forgotten) {
            return sample;
        }
        if self.ran_out {
            let is_faster = sample.0 * self.num_seconds > self.num_bytes * sample.1;
            return match is_faster {
                true => sample,
                false => (self.num_bytes, self.num_seconds),
            };
        }
        let kept = (-sample.1 / HALF_LIFE.as_secs_f64()).exp2();
        (
            self.num_bytes * kept + sample.0,
            self.num_seconds * kept + sample.1,
        )
    }

    /// `None` before the first acknowledgement.
    pub fn bytes_per_s(&self) -> Option<f64> {
        let (num_bytes, num_seconds) = match self.unsampled() {
            Some((time, at)) => self.sums_with(time, at),
            None => (self.num_bytes, self.num_seconds),
        };
        (num_seconds > 0.0).then(|| num_bytes / num_seconds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// Sends bytes and acknowledges them after `ms`. Returns the time of the acknowledgement.
    fn send(meter: &mut BandwidthMeter, num_bytes: u64, ms: u64, at: Instant) -> Instant {
        meter.handle_sent(num_bytes, at);
        let end = at + Duration::from_millis(ms);
        meter.handle_acknowledged(num_bytes, end);
        end
    }

    #[test]
    fn pauses_do_not_count_and_a_slower_time_shows() {
        let mut meter = BandwidthMeter::default();
        let mut now = Instant::now();
        assert_eq!(meter.bytes_per_s(), None);
        for _ in 0..20 {
            now = send(&mut meter, 10 * MB, 100, now) + Duration::from_secs(5);
        }
        assert!((meter.bytes_per_s().unwrap() - 1e8).abs() < 1.0);
        // The bytes now come at a fiftieth of the speed, for two half-lives. A quarter of the older samples (200 MB in
        // two seconds) remains, besides the decayed sum of the four newer ones.
        for _ in 0..4 {
            now = send(&mut meter, 2 * MB, 1000, now);
        }
        let kept = 0.5f64.sqrt();
        let decayed = |each: f64, n: i32| (0..n).map(|i| each * kept.powi(i)).sum::<f64>();
        let older: f64 = (0..20)
            .map(|i| 0.1 * 0.5f64.powf(0.05 * f64::from(i)))
            .sum();
        let bytes = older * 1e8 * 0.25 + decayed(2e6, 4);
        let seconds = older * 0.25 + decayed(1.0, 4);
        let found = meter.bytes_per_s().unwrap();
        assert!((found / (bytes / seconds) - 1.0).abs() < 1e-9, "{found}");
    }

    /// A layer is sent while the next one is computed, which takes a hundred times as long. Each layer waits for a
    /// core, and the quickest one says the most about the link.
    #[test]
    fn the_quickest_layer_counts_where_all_are_followed_by_a_pause() {
        let mut meter = BandwidthMeter::default();
        let mut now = Instant::now();
        for (us, expected) in [(1000, 4e7), (4000, 4e7), (100, 4e8), (5000, 4e8)] {
            meter.handle_work();
            meter.handle_sent(40_000, now);
            meter.handle_pause();
            meter.handle_acknowledged(40_000, now + Duration::from_micros(us));
            assert!((meter.bytes_per_s().unwrap() / expected - 1.0).abs() < 1e-9);
            now += Duration::from_millis(10);
        }
        // A load that always has something to send shows that the link has become slow.
        meter.handle_work();
        meter.handle_sent(400_000, now);
        meter.handle_acknowledged(400_000, now + Duration::from_secs(1));
        let expected = 400_000.0 / 1.0;
        assert!((meter.bytes_per_s().unwrap() / expected - 1.0).abs() < 0.1);
    }

    /// A layer is sent while the next one is computed, which takes a hundred times as long.
    #[test]
    fn layers_count_although_each_is_small_and_followed_by_a_pause() {
        let mut meter = BandwidthMeter::default();
        let mut now = Instant::now();
        for _ in 0..24 {
            meter.handle_work();
            meter.handle_sent(20_000, now);
            meter.handle_sent(20_000, now);
            meter.handle_acknowledged(20_000, now + Duration::from_micros(50));
            meter.handle_pause();
            meter.handle_acknowledged(20_000, now + Duration::from_micros(100));
            assert!((meter.bytes_per_s().unwrap() / 4e8 - 1.0).abs() < 1e-9);
            now += Duration::from_millis(10);
        }
    }

    /// The time between two layers is no time of sending, even if the load pauses after the acknowledgement.
    #[test]
    fn a_pause_ends_with_what_was_acknowledged_before_it() {
        let mut meter = BandwidthMeter::default();
        let mut now = Instant::now();
        for _ in 0..3 {
            meter.handle_work();
            now = send(&mut meter, MB, 10, now);
            meter.handle_pause();
            now += Duration::from_secs(1);
        }
        assert!((meter.bytes_per_s().unwrap() / 1e8 - 1.0).abs() < 1e-9);
    }

    /// With a limited bandwidth, each small chunk is acknowledged before the next goes out.
    #[test]
    fn chunks_that_are_acknowledged_one_by_one_are_one_transfer() {
        let mut meter = BandwidthMeter::default();
        let mut now = Instant::now();
        meter.handle_work();
        for _ in 0..1000 {
            now = send(&mut meter, 4000, 20, now);
        }
        assert!((meter.bytes_per_s().unwrap() / 2e5 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_few_bytes_count_and_a_lost_load_leaves_no_time_behind() {
        let mut meter = BandwidthMeter::default();
        let now = send(&mut meter, 1000, 1, Instant::now());
        assert!((meter.bytes_per_s().unwrap() - 1e6).abs() < 1e-3);
        meter.handle_sent(2 * MB, now);
        meter.handle_lost(2 * MB);
        assert!((meter.bytes_per_s().unwrap() - 1e6).abs() < 1e-3);
        // Bytes that were acknowledged before the loss count.
        meter.handle_work();
        meter.handle_sent(2 * MB, now);
        meter.handle_acknowledged(MB, now + Duration::from_millis(10));
        meter.handle_lost(MB);
        meter.handle_pause();
        let expected = 1_001_000.0 / 0.011;
        let found = meter.bytes_per_s().unwrap();
        assert!((found / expected - 1.0).abs() < 0.01, "{found}");
    }

    /// The unfinished sample counts as well: when the account of a short transfer is made, other loads may keep the
    /// sample open.
    #[test]
    fn what_no_sample_contains_yet_is_known() {
        let mut meter = BandwidthMeter::default();
        meter.handle_work();
        meter.handle_work();
        send(&mut meter, 1000, 1, Instant::now());
        meter.handle_pause();
        assert!((meter.bytes_per_s().unwrap() - 1e6).abs() < 1e-3);
    }

    #[test]
    fn a_slow_minute_is_forgotten_after_another_one() {
        let mut meter = BandwidthMeter::default();
        let slow = send(&mut meter, 10 * MB, 10_000, Instant::now());
        assert!((meter.bytes_per_s().unwrap() - 1e6).abs() < 1.0);
        let later = slow + Duration::from_secs(59);
        let later = send(&mut meter, 10 * MB, 100, later);
        assert!(meter.bytes_per_s().unwrap() < 3e6);
        send(&mut meter, 10 * MB, 100, later + Duration::from_mins(1));
        assert!((meter.bytes_per_s().unwrap() - 1e8).abs() < 1.0);
    }
}
