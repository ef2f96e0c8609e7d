//! Storing the whole cache before it ends.

use corella_core::Scheduler;
use crossbeam_channel::Sender;

use super::tier::Store;

pub(super) struct StoreAll {
    reply: Sender<()>,
    /// The time of all paths in the store, so that none of them makes room for another: the paths of the latest use
    /// come first and keep their slots. `None` until all blocks are offered.
    time: Option<u64>,
}

impl StoreAll {
    pub fn new(reply: Sender<()>) -> Self {
        Self { reply, time: None }
    }

    pub fn time(&self) -> Option<u64> {
        self.time
    }

    /// Has all blocks offered, once no request and no step is left: a cancelled request keeps its blocks until its step
    /// returns. Returns whether they are offered now.
    pub fn begin(&mut self, store: &Store, scheduler: &mut Scheduler) -> bool {
        let begins = self.time.is_none() && !scheduler.has_unfinished();
        if begins {
            scheduler.offer_all_copies();
            self.time = Some(store.begin_path(&[]));
        }
        begins
    }

    /// Reports that all blocks are stored.
    pub fn end(self) {
        // The caller may have given up.
        let _ = self.reply.try_send(());
    }
}
