//! Blocks for other nodes: what is here of a list, and what stays as it is while another node loads it.
//!
//! A driver calls [`look_up_blocks`](Scheduler::look_up_blocks) for a node that asks, which keeps nothing. For a load it
//! calls [`hold_blocks`](Scheduler::hold_blocks), stops the readers of holds that
//! [`poll_ended_hold`](Scheduler::poll_ended_hold) names, and says with
//! [`release_blocks`](Scheduler::release_blocks) that these readers have stopped. The load is complete only if the hold
//! was live until then.

use alloc::vec::Vec;

use crate::cache::block_hold::MAX_BLOCK_HOLDS;
use crate::{BlockId, BlockList, HeldBlocks, HoldId, HoldRefusal, PageId, Scheduler};

impl Scheduler {
    /// How many blocks from the beginning of a list could be held now. Keeps none of them.
    pub fn look_up_blocks(&self, list: &BlockList) -> u32 {
        match self.config.max_served_pages {
            0 => 0,
            _ => self.settled_blocks(list).len() as u32,
        }
    }

    /// Keeps the longest settled prefix of a list as it is: its blocks are published, computed by steps that have returned,
    /// and whole in every KV group. Ends at `until_us`, after the lease of holds
    /// ([`hold_lease_us`](crate::SchedulerConfig::hold_lease_us)), when a request needs the pages, or when they turn out
    /// to be undefined.
    pub fn hold_blocks(
        &mut self,
        list: &BlockList,
        until_us: u64,
    ) -> Result<HeldBlocks, HoldRefusal> {
        let now_us = self.pace.now_us();
        if until_us <= now_us {
            return Err(HoldRefusal::Late);
        }
        if self.holds.of_blocks().len() >= MAX_BLOCK_HOLDS {
            return Err(HoldRefusal::TooMany);
        }
        let path = self.settled_blocks(list);
        if path.is_empty() {
            return Err(HoldRefusal::NothingHere);
        }
        let tables = self.kv.tables_of(&path);
        let num_pages = tables.num_pages();
        let limit = self.config.max_served_pages;
        if self.holds.of_blocks().num_pages() + num_pages > limit as usize {
            return Err(HoldRefusal::TooLarge { num_pages, limit });
        }
        let is_cached = |page: &PageId| !self.kv.is_locked(*page);
        let num_new_pages = tables.pages().filter(is_cached).count();
        self.keep_pages_of_running();
        let num_needed_pages = num_new_pages + self.outlook.forecast().peak();
        let num_available_pages = self.kv.num_available();
        if self.holds.fetches().is_barred() || num_needed_pages > num_available_pages {
            return Err(HoldRefusal::NoRoom {
                num_needed_pages,
                num_available_pages,
            });
        }
        for page in tables.pages() {
            self.kv.lock(page);
        }
        let until_us = until_us.min(now_us.saturating_add(self.config.hold_lease_us));
        let holds = self.holds.of_blocks_mut();
        Ok(HeldBlocks {
            id: holds.insert(tables.pages().collect(), until_us),
            num_blocks: path.len() as u32,
            tables: tables.to_vec(),
        })
    }

    fn settled_blocks(&self, list: &BlockList) -> Vec<BlockId> {
        if !self.config.enable_prefix_caching {
            return Vec::new();
        }
        let tokens = list.known_tokens(&self.config.block_hasher, self.config.page_size);
        let last_returned = self.inflight.last_returned();
        self.kv.settled_path(&list.namespace, tokens, last_returned)
    }

    /// Releases the pages of a hold whose readers in this process have stopped. Returns whether the hold was live until
    /// `now_us`, or `None` for an unknown hold.
    pub fn release_blocks(&mut self, id: HoldId, now_us: u64) -> Option<bool> {
        let (pages, has_lived) = self.holds.of_blocks_mut().remove(id, now_us)?;
        self.kv.unlock_all(pages);
        Some(has_lived)
    }

    /// Ends a hold if requests lack pages. Returns whether pages of one are about to be released.
    pub(super) fn give_up_hold(&mut self) -> bool {
        let now_us = self.pace.now_us();
        self.holds.of_blocks_mut().give_up(now_us)
    }
}
