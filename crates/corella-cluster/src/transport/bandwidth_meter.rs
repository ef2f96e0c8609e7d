//! The bandwidth at which a peer takes rows.

use std::time::{Duration, Instant};

/// Older seconds of sending count half after this many newer ones.
const HALF_LIFE: Duration = Duration::from_secs(2);
/// Fewer bytes measure latency rather than speed: a thread that waits 5 ms for a core would make a quick link look like
/// one of 13 MB/s over 64 KiB.
const MIN_BYTES: u64 = 1 << 20;
/// Older samples do not describe the link any more. Placement tries a slow link again after this time, and must then
/// learn how fast it has become.
const LIFETIME: Duration = Duration::from_mins(1);
/// The interval between samples while the peer always has work.
const SAMPLE_TIME: Duration = Duration::from_millis(50);

/// Counts the time in which the peer has unacknowledged bytes, and the bytes that it acknowledged
/// in that time. The time in which the peer waits for the executor does not count.
#[derive(Default)]
pub struct BandwidthMeter {
    num_unacknowledged: u64,
    /// The bytes sent before a pause: the time of their acknowledgement is not used.
    num_stale: u64,
    busy_since: Option<Instant>,
    /// Loads that have something to send.
    num_working: usize,
    has_paused: bool,
    num_acknowledged: u64,
    /// Decayed sums.
    num_bytes: f64,
    num_seconds: f64,
    sampled_at: Option<Instant>,
}

impl BandwidthMeter {
    pub fn handle_sent(&mut self, num_bytes: u64, now: Instant) {
        if std::mem::take(&mut self.has_paused) {
            // A peer acknowledges little by little, so the acknowledgement of the last bytes before
            // a pause may come after it.
            self.num_stale = self.num_unacknowledged;
            self.num_acknowledged = 0;
            self.busy_since = None;
        }
        self.num_unacknowledged += num_bytes;
        self.busy_since.get_or_insert(now);
    }

    /// A load has something to send, until it pauses.
    pub fn handle_work(&mut self) {
        self.num_working += 1;
    }

    pub fn handle_pause(&mut self) {
        self.num_working -= 1;
        self.has_paused |= self.num_working == 0;
    }

    pub fn handle_acknowledged(&mut self, num_bytes: u64, now: Instant) {
        let num_bytes = num_bytes.min(self.num_unacknowledged);
        self.num_unacknowledged -= num_bytes;
        let num_stale = num_bytes.min(self.num_stale);
        self.num_stale -= num_stale;
        self.num_acknowledged += num_bytes - num_stale;
        let Some(since) = self.busy_since else {
            return;
        };
        let time = now.saturating_duration_since(since);
        // The next chunk may be about to go out, or wait for its share of a limited bandwidth.
        let is_idle = self.num_unacknowledged == 0 && self.num_working == 0;
        if !is_idle && time < SAMPLE_TIME {
            return;
        }
        if self.num_acknowledged >= MIN_BYTES && !time.is_zero() {
            let is_forgotten = |at| now.saturating_duration_since(at) > LIFETIME;
            if self.sampled_at.replace(now).is_some_and(is_forgotten) {
                (self.num_bytes, self.num_seconds) = (0.0, 0.0);
            }
            let age = time.as_secs_f64() / HALF_LIFE.as_secs_f64();
            let kept = (-age).exp2();
            self.num_bytes = self.num_bytes * kept + self.num_acknowledged as f64;
            self.num_seconds = self.num_seconds * kept + time.as_secs_f64();
        } else if !is_idle {
            return;
        }
        self.num_acknowledged = 0;
        self.busy_since = (!is_idle).then_some(now);
    }

    /// Removes bytes that will never be acknowledged, because the connection or the load has ended.
    pub fn handle_lost(&mut self, num_bytes: u64) {
        self.num_unacknowledged = self.num_unacknowledged.saturating_sub(num_bytes);
        if self.num_unacknowledged == 0 {
            self.busy_since = None;
            self.num_acknowledged = 0;
            self.num_stale = 0;
        }
    }

    /// `None` before the first measurement.
    pub fn bytes_per_s(&self) -> Option<f64> {
        (self.num_seconds > 0.0).then(|| self.num_bytes / self.num_seconds)
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
        // Two half-lives at a fiftieth of the speed: a quarter of two older seconds, which brought
        // 200 MB, and a decayed sum of four newer ones remain.
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

    /// The last tenth of a layer's bytes is acknowledged only with the next layer.
    #[test]
    fn what_is_left_over_at_a_pause_counts_neither_as_time_nor_as_bytes() {
        let mut meter = BandwidthMeter::default();
        let mut now = Instant::now();
        for _ in 0..20 {
            meter.handle_work();
            meter.handle_sent(10 * MB, now);
            now += Duration::from_millis(90);
            meter.handle_acknowledged(9 * MB, now);
            meter.handle_pause();
            now += Duration::from_secs(1);
            meter.handle_work();
            meter.handle_sent(MB, now);
            now += Duration::from_millis(10);
            meter.handle_acknowledged(2 * MB, now);
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
    fn a_few_bytes_say_nothing_and_a_lost_load_leaves_no_time_behind() {
        let mut meter = BandwidthMeter::default();
        let now = send(&mut meter, MB, 1000, Instant::now());
        assert_eq!(meter.bytes_per_s(), None);
        meter.handle_sent(2 * MB, now);
        meter.handle_lost(2 * MB);
        send(&mut meter, 2 * MB, 20, now + Duration::from_secs(100));
        assert!((meter.bytes_per_s().unwrap() - 1e8).abs() < 1.0);
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
