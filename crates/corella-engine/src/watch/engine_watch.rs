//! A watch over the engine: its holder may ask for snapshots.
//!
//! The loop makes a snapshot only on request, and keeps records of steps only while a watch exists.
//! Otherwise it only checks for a watch.

use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use corella_core::Batch;

use crate::wake::doorbell::Doorbell;
use crate::watch::engine_snapshot::{EngineSnapshot, StepRecord, StepRecords};

/// Asks for snapshots. The watch ends when it is dropped.
pub struct EngineWatch {
    mailbox: Arc<Mailbox>,
    /// Rings when it is dropped, after the mailbox, so that the loop notices the end of the watch.
    doorbell: Doorbell,
}

/// The loop's end of a watch.
pub(crate) struct WatchEnd {
    mailbox: Arc<Mailbox>,
    steps: StepRecords,
}

#[derive(Default)]
struct Mailbox {
    is_due: AtomicBool,
    inner: Mutex<Inner>,
}

/// The mailbox holds at most one snapshot: the newest replaces one that was not fetched.
#[derive(Default)]
struct Inner {
    snapshot: Option<EngineSnapshot>,
    waker: Option<Waker>,
    has_ended: bool,
}

pub(crate) fn watch(doorbell: Doorbell) -> (EngineWatch, WatchEnd) {
    let mailbox = Arc::new(Mailbox::default());
    let watch = EngineWatch {
        mailbox: mailbox.clone(),
        doorbell,
    };
    let end = WatchEnd {
        mailbox,
        steps: StepRecords::default(),
    };
    (watch, end)
}

impl EngineWatch {
    /// Asks for a snapshot and waits for it, which takes milliseconds even during a long step.
    /// `None` when the engine has stopped, or another watch has replaced this one.
    pub async fn snapshot(&mut self) -> Option<EngineSnapshot> {
        self.mailbox.is_due.store(true, Ordering::Release);
        self.doorbell.ring();
        poll_fn(|cx| self.mailbox.poll_snapshot(cx)).await
    }
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll_snapshot(&self, cx: &mut Context<'_>) -> Poll<Option<EngineSnapshot>> {
        let mut inner = self.lock();
        if let Some(snapshot) = inner.snapshot.take() {
            return Poll::Ready(Some(snapshot));
        }
        if inner.has_ended {
            return Poll::Ready(None);
        }
        inner.waker = Some(cx.waker().clone());
        Poll::Pending
    }

    fn wake(mut inner: MutexGuard<'_, Inner>) {
        let waker = inner.waker.take();
        drop(inner);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl WatchEnd {
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.mailbox) == 1
    }

    /// Whether a snapshot has been asked for since the last one.
    pub fn is_due(&self) -> bool {
        self.mailbox.is_due.load(Ordering::Acquire)
    }

    /// Records a step that returned at `ended`.
    pub fn note_step(
        &mut self,
        batch: &Batch,
        num_prefill_tokens: u32,
        ended: Duration,
        step_time: Duration,
    ) {
        let drafts = batch.spans.iter().map(|span| u64::from(span.num_drafts));
        let num_draft_tokens = drafts.sum();
        let num_prefill_tokens = u64::from(num_prefill_tokens);
        let num_others = num_prefill_tokens + num_draft_tokens;
        self.steps.push(StepRecord {
            first: batch.step,
            num_steps: 1,
            ended,
            step_time,
            num_prefill_tokens,
            num_decode_tokens: (batch.num_tokens() as u64).saturating_sub(num_others),
            num_draft_tokens,
            max_requests: batch.spans.len() as u32,
        });
    }

    pub fn take_steps(&mut self) -> Vec<StepRecord> {
        self.steps.take()
    }

    pub fn give(&self, snapshot: EngineSnapshot) {
        self.mailbox.is_due.store(false, Ordering::Relaxed);
        let mut inner = self.mailbox.lock();
        inner.snapshot = Some(snapshot);
        Mailbox::wake(inner);
    }
}

impl Drop for WatchEnd {
    fn drop(&mut self) {
        let mut inner = self.mailbox.lock();
        inner.has_ended = true;
        Mailbox::wake(inner);
    }
}
