//! The nodes that have the blocks of a sequence, as far as this node knows from blocks that it has sent and from
//! reports that it has received.

use alloc::collections::{BTreeMap, BTreeSet};

use crate::{NodeId, PageHash};

/// Maps the last block of each sequence to a node that has the sequence. Forgets the least recently used sequence
/// first. An entry is a hint: a lookup tells which blocks the node still has. A restarted node has another id.
#[derive(Clone, Debug)]
pub(crate) struct BlockSourceMap {
    max_len: usize,
    by_hash: BTreeMap<PageHash, Site>,
    by_use: BTreeSet<(u64, PageHash)>,
    /// Advances with each use.
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Site {
    node: NodeId,
    last_used: u64,
}

/// A node that reportedly has the beginning of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockSite {
    pub node: NodeId,
    /// The number of blocks from the beginning of the sequence.
    pub num_blocks: u32,
}

impl BlockSourceMap {
    /// `max_len` is at least 1.
    pub fn new(max_len: usize) -> Self {
        Self {
            max_len: max_len.max(1),
            by_hash: BTreeMap::new(),
            by_use: BTreeSet::new(),
            clock: 0,
        }
    }

    /// Records that a node has a sequence whose last block has this hash.
    pub fn note(&mut self, last: PageHash, node: NodeId) {
        self.forget(last);
        if self.by_hash.len() == self.max_len
            && let Some(&(_, oldest)) = self.by_use.first()
        {
            self.forget(oldest);
        }
        self.clock += 1;
        let site = Site {
            node,
            last_used: self.clock,
        };
        self.by_hash.insert(last, site);
        self.by_use.insert((self.clock, last));
    }

    /// The node with the most blocks of a sequence, given the hashes of all of its blocks.
    pub fn find(&mut self, hashes: &[PageHash]) -> Option<BlockSite> {
        let at = hashes
            .iter()
            .rposition(|hash| self.by_hash.contains_key(hash))?;
        let last = hashes[at];
        let site = self.by_hash[&last];
        self.note(last, site.node);
        Some(BlockSite {
            node: site.node,
            num_blocks: at as u32 + 1,
        })
    }

    fn forget(&mut self, last: PageHash) {
        if let Some(site) = self.by_hash.remove(&last) {
            self.by_use.remove(&(site.last_used, last));
        }
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    fn site(node: u32, num_blocks: u32) -> Option<BlockSite> {
        Some(BlockSite {
            node: NodeId(node),
            num_blocks,
        })
    }

    #[test]
    fn the_longest_known_beginning_is_found_and_the_oldest_forgotten() {
        let hashes: Vec<_> = (10..16).map(PageHash).collect();
        let mut map = BlockSourceMap::new(2);
        assert_eq!(map.find(&hashes), None);
        map.note(hashes[1], NodeId(1));
        map.note(hashes[3], NodeId(2));
        assert_eq!(map.find(&hashes), site(2, 4));
        assert_eq!(map.find(&hashes[..3]), site(1, 2));
        // The entry of node 2 is forgotten, because the entry of node 1 was used later.
        map.note(hashes[5], NodeId(3));
        assert_eq!(map.by_hash.len(), 2);
        assert_eq!(map.find(&hashes[..5]), site(1, 2));
        map.forget(hashes[5]);
        assert_eq!(map.find(&hashes), site(1, 2));
        // A later turn is on another node.
        map.note(hashes[1], NodeId(4));
        assert_eq!(map.find(&hashes), site(4, 2));
        assert_eq!(map.by_hash.len(), 1);
    }
}
