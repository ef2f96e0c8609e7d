//! Blocks that are worth a copy in a lower tier: those that a later request used again, and those that are next to be
//! evicted. The others are never offered, because most prompts do not come back and disks wear out.
//!
//! A block is offered once with all blocks before it, and once more when it has got a snapshot. Its number may be reused
//! after its eviction, and the number of its insertion tells both apart.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::cache::kv_cache::KvCache;
use crate::{BlockId, Namespace, StepId, TokenId};

/// The most paths of requests that wait for a poll. A further path is offered at its next use.
const MAX_WAITING: usize = 64;
/// Eviction is near when less than one page in this many is free, or when fewer pages are free than a prompt has lately
/// taken at once.
const FREE_SHARE: usize = 8;
/// With each later prompt, the remembered number of pages taken at once shrinks by one part in this many.
const DECAY: usize = 64;
/// A poll looks for a block among this many pages, those next to be evicted.
const MAX_LOOKED_AT: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct CopyOffers {
    is_on: bool,
    /// The ends of paths that were used again, with the numbers of their insertions.
    reused: VecDeque<(BlockId, u64)>,
    /// The insertion of each offered block, indexed by block.
    offered: Vec<u64>,
    /// The largest number of pages lately taken at once. The next prompt is expected to take this number, and to evict
    /// pages if fewer are free.
    num_taken: usize,
}

impl CopyOffers {
    fn has(&self, block: BlockId, insertion: u64) -> bool {
        self.offered.get(block.0 as usize) == Some(&insertion)
    }

    /// Has a block offered again at its next use, because more of it is worth a copy.
    pub(super) fn forget(&mut self, block: BlockId) {
        if let Some(offered) = self.offered.get_mut(block.0 as usize) {
            *offered = 0;
        }
    }

    fn set(&mut self, block: BlockId, insertion: u64) {
        let at = block.0 as usize;
        if self.offered.len() <= at {
            self.offered.resize(at + 1, 0);
        }
        self.offered[at] = insertion;
    }

    /// Records pages that were taken at once. A single page does not count, because answers take pages one by one.
    pub(super) fn note_taken(&mut self, num_pages: usize) {
        if num_pages > 1 {
            self.num_taken = num_pages.max(self.num_taken - self.num_taken / DECAY);
        }
    }
}

impl KvCache {
    /// Records that requests share the path up to `end`.
    pub(crate) fn note_reused(&mut self, end: BlockId) {
        if !self.offers.is_on || self.offers.reused.len() >= MAX_WAITING {
            return;
        }
        if let Some(insertion) = self.insertion(end)
            && !self.offers.has(end, insertion)
        {
            self.offers.reused.push_back((end, insertion));
        }
    }

    pub(crate) fn begin_copy_offers(&mut self) {
        self.offers.is_on = true;
    }

    /// Has all blocks offered that no request uses, those of the latest use first. The pages of the pool limit their
    /// number. Blocks that were offered before are offered again, because the tier may have lost them meanwhile.
    pub(crate) fn offer_all_copies(&mut self) {
        self.offers.offered.clear();
        let pages = self.evictable.iter().chain(self.retained.listed());
        let blocks = pages.filter_map(|&(_, page)| self.block_of(page));
        let ends = blocks.filter_map(|block| Some((block, self.insertion(block)?)));
        let mut ends: Vec<_> = ends.collect();
        ends.reverse();
        self.offers.reused.extend(ends);
    }

    /// The namespace and the tokens of the next path to copy, whose last block was not offered before.
    pub(crate) fn poll_copy_offer(
        &mut self,
        last_returned: Option<StepId>,
    ) -> Option<(Namespace, Vec<TokenId>)> {
        if !self.offers.is_on {
            return None;
        }
        while let Some(&(end, insertion)) = self.offers.reused.front() {
            let is_there = self.insertion(end) == Some(insertion);
            if is_there && !self.is_settled(end, last_returned) {
                break;
            }
            self.offers.reused.pop_front();
            if is_there && let Some(offer) = self.offer(end) {
                return Some(offer);
            }
        }
        let num_free = self.num_free();
        if num_free * FREE_SHARE >= self.pool.num_pages() && num_free >= self.offers.num_taken {
            return None;
        }
        // Retained pages are evicted after all others.
        let coldest = self.evictable.iter().chain(self.retained.listed());
        let coldest = coldest.take(MAX_LOOKED_AT);
        let coldest = coldest.filter_map(|&(_, page)| self.block_of(page));
        let is_ready = |block: &BlockId| self.is_settled(*block, last_returned);
        let ready: Vec<_> = coldest.filter(is_ready).collect();
        ready.into_iter().find_map(|block| self.offer(block))
    }

    /// Marks a block and the blocks before it as offered. Returns the namespace, and the tokens of the whole blocks, or
    /// `None` if all of them were offered before.
    fn offer(&mut self, end: BlockId) -> Option<(Namespace, Vec<TokenId>)> {
        if self
            .insertion(end)
            .is_none_or(|insertion| self.offers.has(end, insertion))
        {
            return None;
        }
        let page_size = self.page_size() as usize;
        let mut path = Vec::new();
        let mut is_new = false;
        let mut at = Some(end);
        while let Some(block) = at {
            let is_whole = self.tree.block_tokens(block).len() == page_size;
            if let Some(insertion) = self.insertion(block) {
                is_new |= is_whole && !self.offers.has(block, insertion);
                self.offers.set(block, insertion);
            }
            if is_whole {
                path.push(block);
            }
            at = self.tree.block_before(block);
        }
        if !is_new {
            return None;
        }
        let namespace = self.tree.namespace(end)?.clone();
        let tokens = path.iter().rev();
        let tokens = tokens.flat_map(|&block| self.tree.block_tokens(block));
        Some((namespace, tokens.copied().collect()))
    }

    pub(crate) fn retract_copy_offer(&mut self, namespace: &Namespace, tokens: &[TokenId]) {
        for block in self.match_prefix(namespace, tokens).blocks {
            self.offers.set(block, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{KvGroup, Parent};

    const LAST: Option<StepId> = Some(StepId(1));

    fn offer(tokens: &[TokenId]) -> Option<(Namespace, Vec<TokenId>)> {
        Some((Namespace::default(), tokens.to_vec()))
    }

    /// A pool of eight pages of two tokens.
    fn cache() -> KvCache {
        let mut cache = KvCache::new(8, 2, &[KvGroup::default()]);
        cache.begin_copy_offers();
        cache
    }

    /// Publishes blocks that `filled_by` fills, and unlocks their pages.
    fn publish(
        kv: &mut KvCache,
        namespace: &Namespace,
        tokens: &[TokenId],
        filled_by: u64,
    ) -> BlockId {
        let mut pages = Vec::new();
        assert!(kv.try_allocate(tokens.len().div_ceil(2), &mut pages));
        let mut end = None;
        for (block, &page) in tokens.chunks(2).zip(&pages) {
            let parent = end.map_or(Parent::Root(namespace), Parent::Block);
            let published = kv.publish(parent, block, |_| Some(page), StepId(filled_by));
            end = Some(published.unwrap_or_else(|there| there));
        }
        kv.unlock_all(pages);
        end.unwrap()
    }

    /// Three pages are free, and another prompt of five pages would evict two of the first.
    #[test]
    fn a_path_that_the_next_prompt_would_evict_is_offered() {
        let mut kv = cache();
        let prompt: Vec<TokenId> = (1..=10).collect();
        publish(&mut kv, &Namespace::default(), &prompt, 1);
        assert_eq!(kv.poll_copy_offer(LAST), offer(&prompt));
    }

    #[test]
    fn a_path_that_is_used_again_is_offered_once() {
        let mut kv = cache();
        let end = publish(&mut kv, &Namespace::default(), &[1, 2, 3, 4], 1);
        assert_eq!(kv.poll_copy_offer(LAST), None);
        kv.note_reused(end);
        assert_eq!(
            kv.poll_copy_offer(Some(StepId(0))),
            None,
            "its step has not returned"
        );
        assert_eq!(kv.poll_copy_offer(LAST), offer(&[1, 2, 3, 4]));
        kv.note_reused(end);
        assert_eq!(kv.poll_copy_offer(LAST), None);
        kv.retract_copy_offer(&Namespace::default(), &[1, 2, 3, 4]);
        kv.note_reused(end);
        assert_eq!(kv.poll_copy_offer(LAST), offer(&[1, 2, 3, 4]));
        // A new block with the number of an offered block is offered, too.
        kv.note_reused(end);
        kv.clear();
        let other = publish(&mut kv, &Namespace::default(), &[5, 6, 7, 8], 1);
        kv.note_reused(other);
        assert_eq!(kv.poll_copy_offer(LAST), offer(&[5, 6, 7, 8]));
    }

    #[test]
    fn a_path_with_a_new_state_is_offered_again() {
        let mut kv = cache().with_snapshots(1);
        let tokens = [1, 2, 3, 4];
        let end = publish(&mut kv, &Namespace::default(), &tokens, 1);
        kv.note_reused(end);
        assert_eq!(kv.poll_copy_offer(LAST), offer(&tokens));
        let id = kv.try_take_snapshot(StepId(2)).unwrap();
        kv.give_snapshot(id, end);
        assert_eq!(kv.poll_copy_offer(LAST), None, "no request has used it");
        kv.note_reused(end);
        assert_eq!(kv.poll_copy_offer(LAST), None, "the state is not there");
        assert_eq!(kv.poll_copy_offer(Some(StepId(2))), offer(&tokens));
        kv.note_reused(end);
        assert_eq!(kv.poll_copy_offer(Some(StepId(2))), None);
    }

    /// With no page free, the leaf that was released first is the next to be evicted.
    #[test]
    fn a_path_next_to_be_evicted_is_offered() {
        let mut kv = cache();
        publish(&mut kv, &Namespace::default(), &[1, 2, 3, 4], 1);
        publish(&mut kv, &Namespace::default(), &[5, 6, 7, 8, 9, 10], 1);
        assert_eq!(kv.poll_copy_offer(LAST), None, "three pages are free");
        publish(&mut kv, &Namespace::default(), &[11, 12, 13, 14, 15], 2);
        assert_eq!(kv.poll_copy_offer(LAST), offer(&[1, 2, 3, 4]));
        assert_eq!(kv.poll_copy_offer(LAST), offer(&[5, 6, 7, 8, 9, 10]));
        assert_eq!(
            kv.poll_copy_offer(LAST),
            None,
            "the last path is not computed"
        );
        let whole = offer(&[11, 12, 13, 14]);
        assert_eq!(kv.poll_copy_offer(Some(StepId(2))), whole);
        assert_eq!(kv.poll_copy_offer(Some(StepId(2))), None);
    }

    #[test]
    fn at_the_end_of_the_cache_all_paths_are_offered_the_latest_first() {
        let mut kv = cache();
        publish(&mut kv, &Namespace::default(), &[1, 2, 3, 4], 1);
        publish(&mut kv, &Namespace::default(), &[5, 6], 1);
        publish(&mut kv, &Namespace::default(), &[1, 2, 7], 1);
        assert_eq!(kv.poll_copy_offer(LAST), None, "three pages are free");
        // The tier may have lost blocks since they were offered.
        for _ in 0..2 {
            kv.offer_all_copies();
            // The block of one token is no whole page.
            for path in [&[1, 2][..], &[5, 6], &[1, 2, 3, 4]] {
                assert_eq!(kv.poll_copy_offer(LAST), offer(path));
            }
            assert_eq!(kv.poll_copy_offer(LAST), None);
        }
    }

    #[test]
    fn a_path_is_offered_with_its_salt_and_its_adapter() {
        let mut kv = cache();
        let namespace = Namespace {
            cache_salt: Some("a".into()),
            lora: Some("b".into()),
            ..Namespace::default()
        };
        let end = publish(&mut kv, &namespace, &[1, 2, 3, 4], 1);
        for _ in 0..2 {
            kv.note_reused(end);
            let offer = Some((namespace.clone(), alloc::vec![1, 2, 3, 4]));
            assert_eq!(kv.poll_copy_offer(LAST), offer);
            assert_eq!(kv.poll_copy_offer(LAST), None);
            kv.retract_copy_offer(&namespace, &[1, 2, 3, 4]);
        }
    }
}
