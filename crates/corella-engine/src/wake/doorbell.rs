//! The sleep of the engine's loop, and its wake-up.
//!
//! The loop waits for several events at once: commands, the step in flight, and room in its feeds. A select over
//! channels would work, but it spins and yields before it sleeps. On a machine whose cores all compute, that time is
//! taken from the step that the loop waits for.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use crossbeam_channel::Sender;

/// Wakes the loop. All rings before the loop looks count as one.
#[derive(Clone)]
pub(crate) struct Doorbell(SyncSender<()>);

/// The loop's end of its doorbell.
pub(crate) struct WakeReceiver(Receiver<()>);

pub(crate) fn doorbell() -> (Doorbell, WakeReceiver) {
    let (sender, receiver) = sync_channel(1);
    (Doorbell(sender), WakeReceiver(receiver))
}

impl Doorbell {
    pub(crate) fn ring(&self) {
        // When the channel is full, an earlier ring is still pending.
        let _ = self.0.try_send(());
    }
}

/// The loop must also notice that a channel has closed. Therefore a doorbell is declared after the end of its channel:
/// fields are dropped in that order.
impl Drop for Doorbell {
    fn drop(&mut self) {
        self.ring();
    }
}

impl WakeReceiver {
    /// Forgets earlier rings. The loop looks for news after this, so that it misses none.
    pub(crate) fn clear(&self) {
        let _ = self.0.try_recv();
    }

    /// Sleeps until the next ring, or until the timeout, if any, has passed.
    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        match timeout {
            // Without any ringer left, the loop finds its command channel closed.
            None => drop(self.0.recv()),
            Some(timeout) => drop(self.0.recv_timeout(timeout)),
        }
    }
}

/// Sends to the loop over a channel, and wakes it.
pub(crate) struct LoopSender<T> {
    channel: Sender<T>,
    doorbell: Doorbell,
}

impl<T> LoopSender<T> {
    pub(crate) fn new(channel: Sender<T>, doorbell: Doorbell) -> Self {
        Self { channel, doorbell }
    }

    /// Returns false when the loop has ended. `news` is then dropped, and the streams in a command end with the reason.
    pub(crate) fn send(&self, news: T) -> bool {
        let is_sent = self.channel.send(news).is_ok();
        if is_sent {
            self.doorbell.ring();
        }
        is_sent
    }

    pub(crate) fn doorbell(&self) -> Doorbell {
        self.doorbell.clone()
    }
}

impl<T> Clone for LoopSender<T> {
    fn clone(&self) -> Self {
        Self::new(self.channel.clone(), self.doorbell.clone())
    }
}
