//! Passes news from the scheduler to a subscriber, at the subscriber's pace.

use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};

use crate::wake::doorbell::Doorbell;

/// Passes news to one subscriber. News that the channel has no room for waits in the scheduler, which has a limit of
/// its own.
pub(crate) struct Feed<T> {
    subscriber: Option<Subscriber<T>>,
    /// The next news, while the subscriber has no room for it.
    held: Option<T>,
}

/// The feed's end of a subscription.
pub(crate) struct Subscriber<T> {
    news: Sender<T>,
    reader: Weak<()>,
}

/// The subscriber's end. Dropping it ends the subscription.
///
/// The reader wakes the loop when a full channel gets room, and when the reader is dropped.
pub struct FeedReader<T> {
    news: Receiver<T>,
    max_unread: usize,
    /// Dropped with the reader, before the doorbell rings.
    _is_read: Arc<()>,
    doorbell: Doorbell,
}

/// Makes the channel of a new subscription. At most `max_unread` news wait in it; more wait in the
/// scheduler, which has a limit of its own.
pub(crate) fn subscription<T>(
    max_unread: usize,
    doorbell: Doorbell,
) -> (Subscriber<T>, FeedReader<T>) {
    let (sender, news) = bounded(max_unread);
    let is_read = Arc::new(());
    let subscriber = Subscriber {
        news: sender,
        reader: Arc::downgrade(&is_read),
    };
    let reader = FeedReader {
        news,
        max_unread,
        _is_read: is_read,
        doorbell,
    };
    (subscriber, reader)
}

impl<T> FeedReader<T> {
    /// Blocks until the next news. `None` when the engine has stopped, or a newer subscriber has replaced this one.
    pub fn next_blocking(&self) -> Option<T> {
        let news = self.news.recv().ok()?;
        self.note_taken();
        Some(news)
    }

    /// `None` without pending news.
    pub fn try_next(&self) -> Option<T> {
        let news = self.news.try_recv().ok()?;
        self.note_taken();
        Some(news)
    }

    /// Wakes the loop if the channel was full. The loop may fill the free place before this method counts the news in
    /// the channel. The loop is then awake, and holds news back only if the channel is full again, so that the next
    /// call rings.
    fn note_taken(&self) {
        if self.news.len() + 1 >= self.max_unread {
            self.doorbell.ring();
        }
    }
}

impl<T> Default for Feed<T> {
    fn default() -> Self {
        Self {
            subscriber: None,
            held: None,
        }
    }
}

impl<T> Feed<T> {
    /// Replaces the earlier subscriber, if any.
    pub(crate) fn subscribe(&mut self, subscriber: Subscriber<T>) {
        self.subscriber = Some(subscriber);
        self.held = None;
    }

    pub(crate) fn has_subscriber(&self) -> bool {
        self.subscriber.is_some()
    }

    /// Passes pending news to the subscriber, as much as the channel has room for. Returns true if the subscriber has
    /// gone.
    pub(crate) fn forward(&mut self, mut poll: impl FnMut() -> Option<T>) -> bool {
        let Some(subscriber) = &self.subscriber else {
            return false;
        };
        if subscriber.reader.strong_count() == 0 {
            self.subscriber = None;
            return true;
        }
        while let Some(news) = self.held.take().or_else(&mut poll) {
            match subscriber.news.try_send(news) {
                Ok(()) => {}
                Err(TrySendError::Full(news)) => {
                    self.held = Some(news);
                    return false;
                }
                Err(TrySendError::Disconnected(_)) => {
                    self.subscriber = None;
                    return true;
                }
            }
        }
        false
    }
}
