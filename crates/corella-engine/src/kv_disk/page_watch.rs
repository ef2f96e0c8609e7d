//! The blocks of a file that a subscriber to KV events knows, and the changes that it does not know yet.
//!
//! A block is announced only while all blocks before it are announced. Events are made only on request. So a slow
//! subscriber costs at most an entry for each block in the file, and one for each block that it knows.

use std::collections::{BTreeSet, HashMap, VecDeque};

use corella_core::{KvEvent, Namespace, PageHash};
use crossbeam_channel::Sender;

use super::slot::PlainBlock;

#[derive(Debug)]
pub(super) struct PageWatch {
    /// Depths and slots of blocks to announce, so that each block comes after its parent.
    untold: BTreeSet<(u32, u32)>,
    /// The blocks whose headers were read, by slot.
    read: HashMap<u32, ReadBlock>,
    /// The hash of each read block's parent, and the block's slot.
    children: BTreeSet<(PageHash, u32)>,
    /// The names of announced blocks in events, by their hashes in the file.
    told: HashMap<PageHash, PageHash>,
    /// Names of announced blocks that are no longer there.
    removed: VecDeque<PageHash>,
    /// Wakes the subscriber. Its channel has one place.
    bell: Sender<()>,
}

#[derive(Clone, Copy, Debug)]
struct ReadBlock {
    hash: PageHash,
    parent: Option<PageHash>,
    depth: u32,
}

impl PageWatch {
    pub fn new(bell: Sender<()>) -> Self {
        Self {
            untold: BTreeSet::new(),
            read: HashMap::new(),
            children: BTreeSet::new(),
            told: HashMap::new(),
            removed: VecDeque::new(),
            bell,
        }
    }

    pub fn note_stored(&mut self, depth: u32, slot: u32) {
        self.untold.insert((depth, slot));
        self.ring();
    }

    pub fn note_removed(&mut self, depth: u32, slot: u32) {
        self.untold.remove(&(depth, slot));
        let Some(block) = self.read.remove(&slot) else {
            return;
        };
        if let Some(parent) = block.parent {
            self.children.remove(&(parent, slot));
        }
        self.retract(block.hash);
    }

    /// Retracts a block and the blocks after it, which the file cannot serve without it.
    fn retract(&mut self, hash: PageHash) {
        let mut hashes = vec![hash];
        while let Some(hash) = hashes.pop() {
            if let Some(name) = self.told.remove(&hash) {
                self.removed.push_back(name);
                hashes.extend(self.children_of(hash).map(|(_, child)| child.hash));
                self.ring();
            }
        }
    }

    fn children_of(&self, hash: PageHash) -> impl Iterator<Item = (u32, ReadBlock)> {
        let children = self.children.range((hash, 0)..=(hash, u32::MAX));
        children.filter_map(|&(_, slot)| Some((slot, *self.read.get(&slot)?)))
    }

    fn ring(&self) {
        // A full channel wakes the subscriber as well.
        let _ = self.bell.try_send(());
    }

    pub fn pop_removed(&mut self) -> Option<KvEvent> {
        let page = self.removed.pop_front()?;
        Some(KvEvent::Removed { page })
    }

    /// The slot of the next block to announce. The caller reports retracted blocks first, because one of these may be
    /// the next block to announce.
    pub fn pop_untold(&mut self) -> Option<u32> {
        self.untold.pop_first().map(|(_, slot)| slot)
    }

    /// Announces the block of a slot. Returns `None` if the block's parent is not announced. The block is then
    /// announced after its parent.
    pub fn tell(&mut self, slot: u32, block: PlainBlock, salt: u64) -> Option<KvEvent> {
        let (hash, parent) = (block.key.hash, block.parent);
        self.read.insert(
            slot,
            ReadBlock {
                hash,
                parent,
                depth: block.depth,
            },
        );
        let parent_name = match parent {
            Some(parent) => {
                self.children.insert((parent, slot));
                Some(*self.told.get(&parent)?)
            }
            None => None,
        };
        // The header of a new block may be read for an earlier block of the slot, and then again.
        if self.told.contains_key(&hash) {
            return None;
        }
        let namespace = Namespace::default();
        let before = parent_name.unwrap_or_else(|| PageHash::root(salt, &namespace));
        let page = before.next(salt, &block.tokens);
        self.told.insert(hash, page);
        let children: Vec<_> = self.children_of(hash).collect();
        let again = children.iter().map(|(slot, child)| (child.depth, *slot));
        self.untold.extend(again);
        Some(KvEvent::Stored {
            page,
            parent: parent_name,
            tokens: block.tokens,
            namespace,
        })
    }
}
