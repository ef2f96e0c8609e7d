//! Holds of blocks that other nodes load: the pages that stay unchanged until the load has ended.
//!
//! ```text
//! hold ──▶ Live ──until_us, or given up, or undefined──▶ Ended
//!            └────── its readers have stopped ── release ──┘
//! ```
//!
//! A query after the hold's last block reads certain pages. The hold lends the pages that the loading node lacks. It
//! locks the other pages, too, because a page before a locked page must not be evicted. A hold belongs to one load and
//! ends at a fixed time. The driver hears of the end, stops the readers in this process, and releases the pages. A node
//! that reads this one's memory directly cannot be stopped, so a load is complete only if its hold is still live after
//! the last read.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::{BlockHasher, HoldId, Namespace, PageHash, PageId, PageTable, SnapshotId, TokenId};

/// The most holds at a time.
pub(crate) const MAX_BLOCK_HOLDS: usize = 64;

/// A sequence's whole blocks, from its beginning on, as one node names them to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockList {
    pub namespace: Namespace,
    /// A part of a block at the end is left out.
    pub tokens: Vec<TokenId>,
    /// A hash for each block. Equal hashes show that model, KV format and page size are the same. The tokens identify a
    /// block's content.
    pub hashes: Vec<PageHash>,
}

impl BlockList {
    pub fn new(
        namespace: Namespace,
        tokens: Vec<TokenId>,
        hasher: &BlockHasher,
        page_size: u32,
    ) -> Self {
        let hashes = hasher.hashes(&namespace, &tokens, page_size).collect();
        Self {
            namespace,
            tokens,
            hashes,
        }
    }

    /// Leaves out all but the first `num_blocks` blocks.
    pub fn truncate(&mut self, num_blocks: u32, page_size: u32) {
        self.hashes.truncate(num_blocks as usize);
        self.tokens.truncate((num_blocks * page_size) as usize);
    }

    /// The tokens of the first blocks, up to the first block whose hash here differs from the hash that `hasher` gives.
    pub(crate) fn known_tokens(&self, hasher: &BlockHasher, page_size: u32) -> &[TokenId] {
        let hashes = hasher.hashes(&self.namespace, &self.tokens, page_size);
        let is_equal = |(ours, theirs): &(PageHash, &PageHash)| ours == *theirs;
        let num_blocks = hashes.zip(&self.hashes).take_while(is_equal).count();
        &self.tokens[..num_blocks * page_size as usize]
    }
}

/// Blocks that stay unchanged while their hold is live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldBlocks {
    pub id: HoldId,
    /// The number of blocks from the beginning of the list.
    pub num_blocks: u32,
    /// The lent pages of each KV group: a query after the held blocks reads these pages, and the loading node lacks
    /// them. Entry `i` belongs to block `i` of the sequence.
    pub tables: Vec<PageTable>,
    /// The snapshot of the recurrent state after the held blocks. `None` for models without recurrent layers.
    pub state: Option<SnapshotId>,
}

/// The reason why no blocks are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldRefusal {
    /// The first wanted block is not cached here, or has another hash here.
    NothingHere,
    /// `MAX_BLOCK_HOLDS` holds exist already.
    TooMany,
    /// Even with only the first wanted block, holds would lend more pages than
    /// [`max_served_pages`](crate::SchedulerConfig::max_served_pages).
    TooLarge { num_pages: usize, limit: u32 },
    /// Requests need the pages.
    NoRoom {
        num_needed_pages: usize,
        num_available_pages: usize,
    },
    /// The time at which the hold would end has passed.
    Late,
}

/// The KV that a hold keeps.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct HeldKv {
    /// Each page has a lock of its own.
    pub pages: Vec<PageId>,
    pub num_lent_pages: usize,
    pub state: Option<SnapshotId>,
}

#[derive(Debug)]
struct BlockHold {
    kv: HeldKv,
    until_us: u64,
    is_live: bool,
}

#[derive(Debug, Default)]
pub(crate) struct BlockHolds {
    by_id: BTreeMap<HoldId, BlockHold>,
    /// Live holds.
    by_end: BTreeSet<(u64, HoldId)>,
    num_begun: u64,
    num_lent_pages: usize,
    /// Holds whose readers have to be told to stop.
    ended: VecDeque<HoldId>,
}

impl BlockHolds {
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The number of lent pages. A page counts once for each hold that lends it.
    pub fn num_lent_pages(&self) -> usize {
        self.num_lent_pages
    }

    /// The pages of all holds. A page comes once for each hold that locks it.
    pub fn pages(&self) -> impl Iterator<Item = PageId> {
        self.by_id.values().flat_map(|hold| &hold.kv.pages).copied()
    }

    pub fn insert(&mut self, kv: HeldKv, until_us: u64) -> HoldId {
        let id = HoldId(self.num_begun);
        self.num_begun += 1;
        self.num_lent_pages += kv.num_lent_pages;
        self.by_end.insert((until_us, id));
        let hold = BlockHold {
            kv,
            until_us,
            is_live: true,
        };
        self.by_id.insert(id, hold);
        id
    }

    /// Removes a hold whose readers have stopped. Returns its KV, and whether it was live until `now_us`.
    pub fn remove(&mut self, id: HoldId, now_us: u64) -> Option<(HeldKv, bool)> {
        let hold = self.by_id.remove(&id)?;
        self.by_end.remove(&(hold.until_us, id));
        self.ended.retain(|&other| other != id);
        self.num_lent_pages -= hold.kv.num_lent_pages;
        Some((hold.kv, hold.is_live && now_us < hold.until_us))
    }

    pub fn pop_ended(&mut self) -> Option<HoldId> {
        self.ended.pop_front()
    }

    pub fn next_end_us(&self) -> Option<u64> {
        self.by_end.first().map(|&(until_us, _)| until_us)
    }

    fn end(&mut self, id: HoldId) {
        if let Some(hold) = self.by_id.get_mut(&id)
            && core::mem::take(&mut hold.is_live)
        {
            self.by_end.remove(&(hold.until_us, id));
            self.ended.push_back(id);
        }
    }

    /// Ends the holds whose time is over.
    pub fn end_late(&mut self, now_us: u64) {
        while let Some(&(until_us, id)) = self.by_end.first()
            && until_us <= now_us
        {
            self.end(id);
        }
    }

    /// Ends the holds with a page for which `has_page` is true.
    pub fn end_with(&mut self, has_page: impl Fn(PageId) -> bool) {
        let holds = self.by_id.iter();
        let with_page = holds.filter(|(_, hold)| hold.kv.pages.iter().any(|&page| has_page(page)));
        let ids: Vec<_> = with_page.map(|(&id, _)| id).collect();
        for id in ids {
            self.end(id);
        }
    }

    /// Ends the newest live hold, unless the readers of another hold are already stopping. Returns whether pages of a
    /// hold are about to be released. A hold whose readers have not stopped by its planned end no longer counts.
    pub fn give_up(&mut self, now_us: u64) -> bool {
        let is_stopping = |hold: &BlockHold| !hold.is_live && now_us < hold.until_us;
        if self.by_id.values().any(is_stopping) {
            return true;
        }
        let newest = self.by_id.iter().rev().find(|(_, hold)| hold.is_live);
        let Some((&id, _)) = newest else {
            return false;
        };
        self.end(id);
        true
    }

    /// # Panics
    /// When the bookkeeping contradicts itself.
    pub fn check_invariants(&self) {
        let num_lent_pages: usize = self.by_id.values().map(|hold| hold.kv.num_lent_pages).sum();
        assert_eq!(num_lent_pages, self.num_lent_pages, "lent pages");
        let mut holds = self.by_id.values();
        assert!(
            holds.all(|hold| hold.kv.num_lent_pages <= hold.kv.pages.len()),
            "a hold lends more pages than it locks"
        );
        let live = self.by_id.iter().filter(|(_, hold)| hold.is_live);
        let ends: BTreeSet<_> = live.map(|(&id, hold)| (hold.until_us, id)).collect();
        assert_eq!(ends, self.by_end, "ends of holds");
        let is_ended = |id| self.by_id.get(id).is_some_and(|hold| !hold.is_live);
        assert!(
            self.ended.iter().all(is_ended),
            "the end of a live or unknown hold is reported"
        );
        assert!(self.by_id.len() <= MAX_BLOCK_HOLDS, "holds are not bounded");
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::cache::kv_cache_model::below;

    /// A hold as the model knows it: its id, pages and end, and whether its end was reported.
    #[derive(Clone, Debug)]
    struct Known {
        id: u64,
        pages: Vec<u32>,
        num_lent_pages: usize,
        until_us: u64,
        has_ended: bool,
    }

    /// Compares random operations with a plain list. The end of each hold is reported at most once. A hold is live
    /// until its time is over or something else ends it.
    #[test]
    fn holds_live_like_their_model() {
        let mut counts = [0; 4];
        for seed in 0..300 {
            let random = &mut { seed };
            let mut holds = BlockHolds::default();
            let mut model: Vec<Known> = Vec::new();
            let mut told = vec![];
            let (mut now_us, mut num_begun) = (0, 0);
            for _ in 0..200 {
                now_us += below(random, 3);
                match below(random, 6) {
                    0 | 1 if model.len() < MAX_BLOCK_HOLDS => {
                        let pages: Vec<_> = (0..below(random, 4) as u32).collect();
                        let until_us = now_us + below(random, 20);
                        let num_lent_pages = below(random, pages.len() as u64 + 1) as usize;
                        let kv = HeldKv {
                            pages: pages.iter().copied().map(PageId).collect(),
                            num_lent_pages,
                            state: None,
                        };
                        let id = holds.insert(kv, until_us);
                        assert_eq!(id, HoldId(num_begun));
                        model.push(Known {
                            id: num_begun,
                            pages,
                            num_lent_pages,
                            until_us,
                            has_ended: false,
                        });
                        num_begun += 1;
                    }
                    2 if !model.is_empty() => {
                        let known = model.remove(below(random, model.len() as u64) as usize);
                        let lived = !known.has_ended && now_us < known.until_us;
                        counts[usize::from(lived)] += 1;
                        let pages: Vec<_> = known.pages.into_iter().map(PageId).collect();
                        told.retain(|&id| id != known.id);
                        let removed = holds.remove(HoldId(known.id), now_us);
                        assert_eq!(
                            removed.map(|(kv, lived)| (kv.pages, lived)),
                            Some((pages, lived))
                        );
                        assert_eq!(holds.remove(HoldId(known.id), now_us), None);
                    }
                    3 => {
                        holds.end_late(now_us);
                        let mut late: Vec<_> = model
                            .iter_mut()
                            .filter(|known| !known.has_ended && known.until_us <= now_us)
                            .collect();
                        late.sort_by_key(|known| (known.until_us, known.id));
                        for known in late {
                            known.has_ended = true;
                            told.push(known.id);
                        }
                    }
                    4 => {
                        let page = below(random, 40) as u32;
                        holds.end_with(|other| other.0 == page);
                        for known in &mut model {
                            if !known.has_ended && known.pages.contains(&page) {
                                known.has_ended = true;
                                told.push(known.id);
                                counts[2] += 1;
                            }
                        }
                    }
                    _ => {
                        let waits = model
                            .iter()
                            .any(|known| known.has_ended && now_us < known.until_us);
                        let newest = model.iter_mut().rev().find(|known| !known.has_ended);
                        let gives_up = waits || newest.is_some();
                        if let Some(newest) = newest.filter(|_| !waits) {
                            newest.has_ended = true;
                            told.push(newest.id);
                            counts[3] += 1;
                        }
                        assert_eq!(holds.give_up(now_us), gives_up);
                    }
                }
                holds.check_invariants();
                let num_lent_pages: usize = model.iter().map(|known| known.num_lent_pages).sum();
                assert_eq!(holds.num_lent_pages(), num_lent_pages);
                let live = model.iter().filter(|known| !known.has_ended);
                assert_eq!(holds.next_end_us(), live.map(|known| known.until_us).min());
                if below(random, 4) == 0 {
                    let ended: Vec<_> = core::iter::from_fn(|| holds.pop_ended()).collect();
                    let ended: Vec<_> = ended.into_iter().map(|id| id.0).collect();
                    assert_eq!(ended, core::mem::take(&mut told));
                }
            }
        }
        assert!(counts.iter().all(|&count| count > 100), "{counts:?}");
    }
}
