//! A driver passes facts and the time to a state machine, and carries out its actions.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use corella_core::PrefillNode;
use corella_core::session::{
    BlockFetcher, BlockSource, DecodeAction, DecodeEnd, FetcherAction, PrefillAction, SourceAction,
};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::clock::Clock;

/// The timer's task sleeps no longer than this, because it must notice when its node has been dropped.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// A node that drives one end of its sessions.
pub(crate) trait Driver: Send + Sync + Sized + 'static {
    type End: SessionEnd;
    type State: Send;

    fn shared(&self) -> &Shared<Self::State>;

    fn end(state: &mut Self::State) -> &mut Self::End;

    /// Carries out an action of the end.
    fn act(self: &Arc<Self>, state: &mut Self::State, action: <Self::End as SessionEnd>::Action);

    fn clock(&self) -> &Clock {
        &self.shared().clock
    }

    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.shared().runtime.spawn(task)
    }

    fn lock(&self) -> MutexGuard<'_, Self::State> {
        let state = self.shared().state.lock();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes a fact to the end, and carries out the end's actions.
    fn with<T>(self: &Arc<Self>, tell: impl FnOnce(&mut Self::End, u64) -> T) -> T {
        self.tell(&mut self.lock(), tell)
    }

    fn tell<T>(
        self: &Arc<Self>,
        state: &mut Self::State,
        tell: impl FnOnce(&mut Self::End, u64) -> T,
    ) -> T {
        self.update(state, |state, now_us| tell(Self::end(state), now_us))
    }

    /// Changes the end and the driver's own state under one lock, and carries out the end's actions.
    fn update<T>(
        self: &Arc<Self>,
        state: &mut Self::State,
        change: impl FnOnce(&mut Self::State, u64) -> T,
    ) -> T {
        let before = Self::end(state).poll_timeout();
        let changed = change(state, self.clock().now_us());
        while let Some(action) = Self::end(state).poll_action() {
            self.act(state, action);
        }
        if Self::end(state).poll_timeout() != before {
            self.shared().timer.notify_one();
        }
        changed
    }

    /// Tells the end the time at its deadlines, until the node is dropped.
    fn start_timer(self: &Arc<Self>) {
        let weak = Arc::downgrade(self);
        self.spawn(async move {
            while let Some(node) = weak.upgrade() {
                let deadline = Self::end(&mut node.lock()).poll_timeout();
                let pause = deadline.map_or(MAX_PAUSE, |at_us| node.clock().until(at_us));
                let changed = node.shared().timer.notified();
                let _ = tokio::time::timeout(pause.min(MAX_PAUSE), changed).await;
                node.with(|end, now_us| end.handle_timeout(now_us));
            }
        });
    }
}

/// State shared by the tasks of a driver.
pub(crate) struct Shared<S> {
    pub clock: Clock,
    runtime: Handle,
    state: Mutex<S>,
    /// Wakes the timer's task when the end's deadline changes.
    timer: Notify,
}

impl<S> Shared<S> {
    /// Returns the driver's own state, for the end's use.
    pub fn state_mut(&mut self) -> &mut S {
        let state = self.state.get_mut();
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// Must be called within a tokio runtime.
    pub fn new(state: S) -> Self {
        Self {
            clock: Clock::start(),
            runtime: Handle::current(),
            state: Mutex::new(state),
            timer: Notify::new(),
        }
    }
}

/// A machine that returns actions and the next deadline at which it needs the time.
pub(crate) trait SessionEnd {
    type Action;

    fn poll_action(&mut self) -> Option<Self::Action>;

    fn poll_timeout(&self) -> Option<u64>;

    fn handle_timeout(&mut self, now_us: u64);
}

macro_rules! session_ends {
    ($($end:ty => $action:ty),* $(,)?) => {
        $(impl SessionEnd for $end {
            type Action = $action;

            fn poll_action(&mut self) -> Option<$action> {
                self.poll_action()
            }

            fn poll_timeout(&self) -> Option<u64> {
                self.poll_timeout()
            }

            fn handle_timeout(&mut self, now_us: u64) {
                self.handle_timeout(now_us);
            }
        })*
    };
}

session_ends! {
    PrefillNode => PrefillAction,
    DecodeEnd => DecodeAction,
    BlockSource => SourceAction,
    BlockFetcher => FetcherAction,
}
