//! Blocks for other nodes: lookups, and holds during their loads.
//!
//! A driver calls [`look_up_lendable`](Scheduler::look_up_lendable) when a node asks. A lookup holds nothing. For a
//! load it calls [`hold_blocks`](Scheduler::hold_blocks), stops the readers of holds that
//! [`poll_ended_hold`](Scheduler::poll_ended_hold) names, and says with [`release_blocks`](Scheduler::release_blocks)
//! that these readers have stopped. The load is complete only if the hold was live until then.

use alloc::vec::Vec;

use crate::cache::block_hold::{HeldKv, MAX_BLOCK_HOLDS};
use crate::{BlockId, BlockList, HeldBlocks, HoldId, HoldRefusal, PageId, Scheduler};

impl Scheduler {
    /// Returns the number of settled blocks at the beginning of a list. Holds none of them. With recurrent layers, a node
    /// that lends no blocks counts none, because a block alone does not say whether its state is kept.
    pub fn look_up_blocks(&self, list: &BlockList) -> u32 {
        match self.config.max_served_pages == 0 && self.kv.is_recurrent() {
            true => 0,
            false => self.settled_blocks(list).len() as u32,
        }
    }

    /// Returns the largest number of first blocks of a list after which a node can continue, if it has the blocks
    /// before `first_block` and loads the others from this node. Holds none of them.
    pub fn look_up_lendable(&self, list: &BlockList, first_block: u32) -> u32 {
        let path = self.settled_blocks(list);
        self.num_lendable(&path, first_block) as u32
    }

    /// Lends the blocks from `first_block` on of the longest settled prefix of a list, and keeps them unchanged.
    /// Settled blocks are published, computed by steps that have returned, and whole in every KV group. If they have
    /// more pages than may be lent, lends only the first of them. The hold ends at `until_us`, after the lease of holds
    /// ([`hold_lease_us`](crate::SchedulerConfig::hold_lease_us)), when a request needs the pages, or when the blocks
    /// turn out to be undefined.
    pub fn hold_blocks(
        &mut self,
        list: &BlockList,
        first_block: u32,
        until_us: u64,
    ) -> Result<HeldBlocks, HoldRefusal> {
        let now_us = self.pace.now_us();
        if until_us <= now_us {
            return Err(HoldRefusal::Late);
        }
        if self.holds.of_blocks().len() >= MAX_BLOCK_HOLDS {
            return Err(HoldRefusal::TooMany);
        }
        let mut path = self.settled_blocks(list);
        let first = first_block as usize;
        if path.len() <= first {
            return Err(HoldRefusal::NothingHere);
        }
        let num_blocks = self.num_lendable(&path, first_block);
        if num_blocks <= first {
            let num_pages = self.num_pages_behind(first, first + 1);
            let limit = self.config.max_served_pages;
            return Err(match limit > 0 && num_pages <= self.num_lendable_pages() {
                true => HoldRefusal::NothingHere,
                false => HoldRefusal::TooLarge { num_pages, limit },
            });
        }
        path.truncate(num_blocks);
        let tables = self.kv.tables_of(&path);
        let is_cached = |page: &PageId| !self.kv.is_locked(*page);
        let num_new_pages = tables.pages().filter(is_cached).count();
        self.keep_pages_of_running();
        let num_needed_pages = num_new_pages + self.forecast.pages().peak();
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
        let lent = tables.iter().map(|table| table.part(first, num_blocks));
        let lent: Vec<_> = lent.collect();
        let kv = HeldKv {
            pages: tables.pages().collect(),
            num_lent_pages: lent.iter().map(|table| table.pages.len()).sum(),
            state: self.kv.hold_snapshot(&path),
        };
        Ok(HeldBlocks {
            num_blocks: num_blocks as u32,
            tables: lent,
            state: kv.state,
            id: self.holds.of_blocks_mut().insert(kv, until_us),
        })
    }

    /// Returns the longest prefix of a settled path, in blocks, whose blocks from `first_block` on fit into the pages
    /// that may be lent.
    fn num_lendable(&self, path: &[BlockId], first_block: u32) -> usize {
        // With a limit of 0 nothing is lent, not even a block outside every window, which takes no page.
        if self.config.max_served_pages == 0 {
            return 0;
        }
        let first = first_block as usize;
        let num_pages = self.num_lendable_pages();
        let fits = |num_blocks: &usize| self.num_pages_behind(first, *num_blocks) <= num_pages;
        let num_fitting = (first..=path.len()).rev().find(fits);
        let path = &path[..num_fitting.unwrap_or(path.len())];
        self.kv.num_settled(path, self.inflight.last_returned())
    }

    /// Returns the numbers of first blocks of a list after which a model with recurrent layers has a state, smallest
    /// first. A hold of a list that ends there keeps the state. Holds none of the blocks.
    pub fn look_up_states(&self, list: &BlockList) -> Vec<u32> {
        let path = self.settled_blocks(list);
        let states = self.kv.settled_states(&path, self.inflight.last_returned());
        let states = states.into_iter();
        states.map(|num_blocks| num_blocks as u32).collect()
    }

    fn num_lendable_pages(&self) -> usize {
        let num_lent_pages = self.holds.of_blocks().num_lent_pages();
        (self.config.max_served_pages as usize).saturating_sub(num_lent_pages)
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
        let (kv, has_lived) = self.holds.of_blocks_mut().remove(id, now_us)?;
        self.kv.unlock_all(kv.pages);
        if let Some(state) = kv.state {
            self.kv.release_snapshot(state);
        }
        Some(has_lived)
    }

    /// Ends a hold, because requests lack pages. Returns whether pages of a hold are about to be released.
    pub(super) fn give_up_hold(&mut self) -> bool {
        let now_us = self.pace.now_us();
        self.holds.of_blocks_mut().give_up(now_us)
    }
}
