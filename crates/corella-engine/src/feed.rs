//! What the scheduler tells a subscriber, at the pace that it takes it.

use crossbeam_channel::{Sender, TrySendError};

/// One subscriber. What it has no room for waits in the scheduler, which has a bound of its own.
pub(crate) struct Feed<T> {
    subscriber: Option<Sender<T>>,
    /// The next news, while the subscriber has no room for it.
    held: Option<T>,
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
    /// Takes the place of an earlier subscriber.
    pub(crate) fn subscribe(&mut self, subscriber: Sender<T>) {
        self.subscriber = Some(subscriber);
        self.held = None;
    }

    pub(crate) fn has_subscriber(&self) -> bool {
        self.subscriber.is_some()
    }

    /// Hands over what there is and what there is room for. True when the subscriber was found to
    /// have gone.
    pub(crate) fn forward(&mut self, mut poll: impl FnMut() -> Option<T>) -> bool {
        let Some(subscriber) = &self.subscriber else {
            return false;
        };
        while let Some(news) = self.held.take().or_else(&mut poll) {
            match subscriber.try_send(news) {
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

    /// Where held news will go when there is room.
    pub(crate) fn blocked_on(&self) -> Option<&Sender<T>> {
        self.held.as_ref()?;
        self.subscriber.as_ref()
    }
}
