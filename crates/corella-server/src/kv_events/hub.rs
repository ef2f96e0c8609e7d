//! Reads the engine's KV events, of memory and of the disk, and keeps the latest batches for all readers.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use corella_core::KvEvent;
use corella_engine::{DiskEvents, FeedReader};
use tokio::sync::watch;

use super::batch::{self, Medium};
use super::config::KvEventsConfig;

/// Limits the events of one batch, so that no batch is much larger than others.
const MAX_BATCH_EVENTS: usize = 256;

/// Limits the bytes of the history. `max_batches` limits its batches.
const MAX_HISTORY_BYTES: usize = 64 << 20;

/// Numbers batches and keeps the latest. Each reader has its own place in the history, so no reader waits for another,
/// and a slow reader skips discarded batches.
#[derive(Debug)]
pub struct Hub {
    history: Mutex<History>,
    /// The sequence number of the next batch.
    next: watch::Sender<u64>,
    /// The number of batches that a reader may be behind before it skips some.
    max_behind: u64,
    /// Limits the batches of a replay.
    max_replayed: u64,
    num_subscribers: AtomicUsize,
    num_missed: AtomicU64,
    num_replays: AtomicU64,
}

#[derive(Debug)]
struct History {
    batches: VecDeque<Bytes>,
    /// The sequence number of the oldest kept batch.
    first: u64,
    num_bytes: usize,
    max_batches: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HubStats {
    pub num_subscribers: usize,
    pub num_batches: u64,
    pub num_missed: u64,
    pub num_replays: u64,
}

/// A reader of all batches from its subscription on. It counts as a subscriber until dropped.
pub struct Subscriber {
    hub: Arc<Hub>,
    /// The sequence number of the next batch to read.
    number: u64,
}

impl Hub {
    /// Reads events until the engine has stopped, on a thread for each source.
    pub fn start(
        config: &KvEventsConfig,
        events: FeedReader<KvEvent>,
        disk: Option<DiskEvents>,
        block_size: u32,
    ) -> io::Result<Arc<Self>> {
        let hub = Arc::new(Self::new(config));
        let writer = hub.clone();
        // The first event of memory clears what a subscriber knows, so events of the disk come after it.
        let (begun, has_begun) = mpsc::sync_channel::<()>(0);
        let thread = thread::Builder::new().name("corella-kv-events".to_owned());
        thread.spawn(move || {
            let mut begun = Some(begun);
            while let Some(first) = events.next_blocking() {
                let mut batch = vec![first];
                while batch.len() < MAX_BATCH_EVENTS
                    && let Some(event) = events.try_next()
                {
                    batch.push(event);
                }
                writer.push_events(&batch, Medium::Pool, block_size);
                begun = None;
            }
            drop(begun);
        })?;
        if let Some(mut disk) = disk {
            let writer = hub.clone();
            let thread = thread::Builder::new().name("corella-kv-disk-events".to_owned());
            thread.spawn(move || {
                // It fails when the other thread drops its end.
                let _ = has_begun.recv();
                let medium = match disk.is_in_memory() {
                    true => Medium::Host,
                    false => Medium::Disk,
                };
                while let Some(batch) = disk.next_blocking(MAX_BATCH_EVENTS) {
                    writer.push_events(&batch, medium, block_size);
                }
            })?;
        }
        Ok(hub)
    }

    fn push_events(&self, events: &[KvEvent], medium: Medium, block_size: u32) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let unix_s = since_1970.unwrap_or_default().as_secs_f64();
        self.push(batch::encode(unix_s, events, medium, block_size).into());
    }

    fn new(config: &KvEventsConfig) -> Self {
        Self {
            history: Mutex::new(History {
                batches: VecDeque::new(),
                first: 0,
                num_bytes: 0,
                max_batches: config.buffer_steps.max(config.hwm),
            }),
            next: watch::Sender::new(0),
            max_behind: config.hwm as u64,
            max_replayed: config.buffer_steps as u64,
            num_subscribers: AtomicUsize::new(0),
            num_missed: AtomicU64::new(0),
            num_replays: AtomicU64::new(0),
        }
    }

    fn push(&self, batch: Bytes) {
        let next = self.lock().push(batch);
        // Another thread may have pushed meanwhile.
        self.next.send_if_modified(|number| {
            let is_later = next > *number;
            *number = next.max(*number);
            is_later
        });
    }

    pub fn subscribe(self: &Arc<Self>) -> Subscriber {
        self.num_subscribers.fetch_add(1, Ordering::Relaxed);
        Subscriber {
            hub: self.clone(),
            number: self.next_number(),
        }
    }

    /// Returns the sequence number of the next batch.
    pub fn next_number(&self) -> u64 {
        *self.next.borrow()
    }

    /// Returns the kept batches from `start` on, for a replay.
    pub fn replay(&self, start: u64) -> impl Iterator<Item = (u64, Bytes)> {
        self.num_replays.fetch_add(1, Ordering::Relaxed);
        let end = self.next_number();
        let mut number = start.max(end.saturating_sub(self.max_replayed));
        std::iter::from_fn(move || {
            let (found, batch) = self.lock().get(number)?;
            number = found + 1;
            (found < end).then_some((found, batch))
        })
    }

    pub fn stats(&self) -> HubStats {
        HubStats {
            num_subscribers: self.num_subscribers.load(Ordering::Relaxed),
            num_batches: self.next_number(),
            num_missed: self.num_missed.load(Ordering::Relaxed),
            num_replays: self.num_replays.load(Ordering::Relaxed),
        }
    }

    fn lock(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subscriber {
    /// Returns the next kept batch with its number, and waits if there is none yet. Cancelling the call loses no batch.
    pub async fn next(&mut self) -> (u64, Bytes) {
        let hub = &self.hub;
        let mut news = hub.next.subscribe();
        loop {
            let end = *news.borrow_and_update();
            let first = self.number.max(end.saturating_sub(hub.max_behind));
            let found = hub.lock().get(first);
            if let Some((number, batch)) = found {
                let num_missed = number - self.number;
                hub.num_missed.fetch_add(num_missed, Ordering::Relaxed);
                self.number = number + 1;
                return (number, batch);
            }
            // `changed` cannot fail: the hub owns the sender, and the subscriber the hub.
            let _ = news.changed().await;
        }
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.hub.num_subscribers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl History {
    /// Adds a batch. Returns the sequence number of the next one.
    fn push(&mut self, batch: Bytes) -> u64 {
        self.num_bytes += batch.len();
        self.batches.push_back(batch);
        while self.batches.len() > self.max_batches || self.num_bytes > MAX_HISTORY_BYTES {
            let Some(oldest) = self.batches.pop_front() else {
                break;
            };
            self.num_bytes -= oldest.len();
            self.first += 1;
        }
        self.first + self.batches.len() as u64
    }

    /// Returns the batch with this sequence number, or the oldest one if that batch is discarded. Returns `None` if the
    /// batch does not exist yet.
    fn get(&self, number: u64) -> Option<(u64, Bytes)> {
        let number = number.max(self.first);
        let batch = self.batches.get((number - self.first) as usize)?;
        Some((number, batch.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(buffer_steps: usize, hwm: usize) -> Arc<Hub> {
        let json = format!(
            r#"{{"enable_kv_cache_events": true, "buffer_steps": {buffer_steps}, "hwm": {hwm}}}"#
        );
        let config = KvEventsConfig::parse(&json).expect("it is right");
        Arc::new(Hub::new(&config.expect("it is on")))
    }

    fn push(hub: &Hub, numbers: std::ops::Range<u8>) {
        for number in numbers {
            hub.push(Bytes::from(vec![number]));
        }
    }

    fn replayed(hub: &Hub, start: u64) -> Vec<(u64, Vec<u8>)> {
        hub.replay(start)
            .map(|(number, batch)| (number, batch.to_vec()))
            .collect()
    }

    #[tokio::test]
    async fn a_slow_reader_skips_batches_and_others_do_not() {
        let hub = hub(0, 3);
        let (mut slow, mut quick) = (hub.subscribe(), hub.subscribe());
        push(&hub, 0..2);
        assert_eq!(slow.next().await, (0, Bytes::from_static(&[0])));
        for number in 0..2 {
            assert_eq!(quick.next().await.0, number);
        }
        push(&hub, 2..5);
        for number in 2..5 {
            assert_eq!(quick.next().await.0, number);
        }
        push(&hub, 5..7);
        assert_eq!(quick.next().await, (5, Bytes::from_static(&[5])));
        assert_eq!(hub.stats().num_missed, 0);
        assert_eq!(slow.next().await, (4, Bytes::from_static(&[4])));
        assert_eq!(hub.stats().num_missed, 3);
        let mut late = hub.subscribe();
        push(&hub, 7..8);
        assert_eq!(late.next().await.0, 7);
        drop(late);
        let stats = hub.stats();
        assert_eq!((stats.num_batches, stats.num_subscribers), (8, 2));
        drop(slow);
        assert_eq!(hub.stats().num_subscribers, 1);
    }

    #[tokio::test]
    async fn a_reader_that_has_all_waits_for_the_next() {
        let hub = hub(1, 1);
        let mut reader = hub.subscribe();
        let (next, ()) = tokio::join!(reader.next(), async { push(&hub, 9..10) });
        assert_eq!(next, (0, Bytes::from_static(&[9])));
    }

    #[test]
    fn a_replay_has_what_is_kept_from_the_number_that_is_asked_for() {
        let hub = hub(3, 5);
        push(&hub, 0..2);
        assert_eq!(replayed(&hub, 1), [(1, vec![1])]);
        assert_eq!(replayed(&hub, 2), []);
        assert_eq!(replayed(&hub, u64::MAX), []);
        push(&hub, 2..9);
        assert_eq!(replayed(&hub, 7), [(7, vec![7]), (8, vec![8])]);
        assert_eq!(
            replayed(&hub, 0),
            [(6, vec![6]), (7, vec![7]), (8, vec![8])]
        );
    }

    #[test]
    fn the_history_has_a_limit_in_bytes() {
        let hub = hub(1000, 1000);
        for _ in 0..100 {
            hub.push(Bytes::from(vec![0; 1 << 20]));
        }
        let first = replayed(&hub, 0)[0].0;
        assert_eq!(first, 100 - 64);
        assert_eq!(hub.lock().num_bytes, MAX_HISTORY_BYTES);
    }
}
