//! The sleep of the engine's loop, and its wake-up.
//!
//! The loop waits for several events at once: commands, the step in flight, and room in its feeds. A select over
//! channels would work, but it spins and yields before it sleeps. On a machine whose cores all compute, that time is
//! taken from the step that the loop waits for.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

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
    channel: SyncSender<T>,
    doorbell: Doorbell,
}

/// Makes a channel to the loop with room for `max_unread` news.
///
/// When the loop ends, unread news is dropped with the receiver: the news may have the end of a stream or of an answer
/// for which its sender waits. A bounded channel of crossbeam would keep the news as long as it has a sender.
pub(crate) fn loop_channel<T>(
    max_unread: usize,
    doorbell: Doorbell,
) -> (LoopSender<T>, Receiver<T>) {
    let (channel, receiver) = sync_channel(max_unread);
    (LoopSender { channel, doorbell }, receiver)
}

impl<T> LoopSender<T> {
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
        Self {
            channel: self.channel.clone(),
            doorbell: self.doorbell.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn unread_news_is_dropped_when_the_loop_ends() {
        let (bell, _wake_receiver) = doorbell();
        let (sender, receiver) = loop_channel(3, bell);
        let answer = Arc::new(());
        for _ in 0..3 {
            assert!(sender.send(answer.clone()));
        }
        drop(receiver.recv());
        assert_eq!(Arc::strong_count(&answer), 1 + 2);
        drop(receiver);
        assert_eq!(Arc::strong_count(&answer), 1);
        assert!(!sender.send(answer.clone()));
        assert_eq!(Arc::strong_count(&answer), 1);
    }
}
