//! The subscription to the blocks on a disk.

use std::sync::Arc;

use corella_core::{FetchMedium, KvEvent};
use crossbeam_channel::Receiver;

use super::tier::Tier;

/// Reads the changes of the blocks on a disk, beginning with the blocks that the file has. While the disk is off, it
/// counts as empty.
pub struct DiskEvents {
    tier: Arc<Tier>,
    bell: Receiver<()>,
    salt: u64,
    /// Whether the file's blocks are watched. Watching begins when the file is open.
    is_watching: bool,
}

impl DiskEvents {
    /// `None` if the tier has a subscriber, or if its blocks make no events.
    pub(crate) fn subscribe(tier: Arc<Tier>, salt: u64) -> Option<Self> {
        let (ring, bell) = crossbeam_channel::bounded(1);
        let is_first = tier.has_plain_blocks() && tier.set_bell(ring);
        is_first.then_some(Self {
            tier,
            bell,
            salt,
            is_watching: false,
        })
    }

    /// Whether the file is in host memory.
    pub fn is_in_memory(&self) -> bool {
        self.tier.medium() == FetchMedium::Host
    }

    /// Blocks until there are events, and returns at most `max_events`. `None` when the engine has stopped.
    pub fn next_blocking(&mut self, max_events: usize) -> Option<Vec<KvEvent>> {
        loop {
            if self.tier.is_stopping() {
                return None;
            }
            let mut events = Vec::new();
            while events.len() < max_events
                && let Some(event) = self.poll()
            {
                events.push(event);
            }
            if !events.is_empty() {
                return Some(events);
            }
            self.bell.recv().ok()?;
        }
    }

    fn poll(&mut self) -> Option<KvEvent> {
        if !self.is_watching {
            self.is_watching = self.tier.watch_pages();
        }
        self.tier.next_event(self.salt)
    }
}
