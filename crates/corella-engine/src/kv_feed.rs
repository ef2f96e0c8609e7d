//! The scheduler's KV events on their way to a subscriber, at the pace that it takes them.

use corella_core::{KvEvent, Scheduler};
use crossbeam_channel::{Receiver, RecvError, Select, Sender, TrySendError};

use crate::engine::Command;

/// What the prefix cache holds, as it comes and goes. Dropping it ends the subscription.
pub struct KvEventStream(pub(crate) Receiver<KvEvent>);

impl KvEventStream {
    /// `None` when the engine has stopped, or someone else has subscribed.
    pub fn next_blocking(&mut self) -> Option<KvEvent> {
        self.0.recv().ok()
    }

    /// `None` when there is nothing now.
    pub fn try_next(&mut self) -> Option<KvEvent> {
        self.0.try_recv().ok()
    }
}

#[derive(Default)]
pub(crate) struct KvFeed {
    subscriber: Option<Sender<KvEvent>>,
    /// The next event, while the subscriber has no room for it.
    held: Option<KvEvent>,
}

impl KvFeed {
    pub(crate) fn subscribe(&mut self, subscriber: Sender<KvEvent>) {
        self.subscriber = Some(subscriber);
        self.held = None;
    }

    /// Hands over what there is and what there is room for.
    pub(crate) fn forward(&mut self, scheduler: &mut Scheduler) {
        let Some(subscriber) = &self.subscriber else {
            return;
        };
        while let Some(event) = self.held.take().or_else(|| scheduler.poll_kv_event()) {
            match subscriber.try_send(event) {
                Ok(()) => {}
                Err(TrySendError::Full(event)) => {
                    self.held = Some(event);
                    return;
                }
                Err(TrySendError::Disconnected(_)) => {
                    scheduler.unwatch_kv();
                    self.subscriber = None;
                    return;
                }
            }
        }
    }

    /// Blocks until there is a command; `None` when a held event went out before.
    pub(crate) fn recv(
        &mut self,
        commands: &Receiver<Command>,
    ) -> Result<Option<Command>, RecvError> {
        let (Some(subscriber), Some(event)) = (&self.subscriber, self.held.take()) else {
            return commands.recv().map(Some);
        };
        let mut select = Select::new();
        let has_command = select.recv(commands);
        select.send(subscriber);
        let operation = select.select();
        if operation.index() == has_command {
            self.held = Some(event);
            return operation.recv(commands).map(Some);
        }
        if let Err(error) = operation.send(subscriber, event) {
            // Gone; the next forwarding sees it too.
            self.held = Some(error.into_inner());
        }
        Ok(None)
    }
}
