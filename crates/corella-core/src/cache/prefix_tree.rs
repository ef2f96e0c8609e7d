//! The prefix tree: the token sequences of the cache, block by block. `residency.rs` maps blocks to pages.

mod invariant;

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::num::NonZeroU64;

use crate::cache::first_block::{Child, FirstBlock, neighbours, num_common_tokens};
use crate::cache::page_hash::PageHash;
use crate::{BlockId, Namespace, TokenId};

/// A node has at most this many tokens, or one block if a block has more. So cutting a node costs little even in a long
/// prompt. Tests use a small limit so that short sequences reach it.
const MAX_NODE_TOKENS: usize = if cfg!(test) { 6 } else { 8192 };

/// A radix tree over tokens, one root per namespace. A node is one of two kinds:
/// * a run of whole blocks: `tokens.len() == blocks.len() * page_size`. The runs and tails that follow are its
///   children. A run is only ever cut between blocks.
/// * a tail: one block of fewer tokens, whose pages are filled in part. A tail has no children, and other requests use
///   its rows only by copying them.
///
/// No node's first block is a prefix of a sibling's first block. So each token sequence has one path, and the sibling
/// with the longest match of a key is one of the key's two neighbours in sorted order.
///
/// The cost of an operation hardly depends on the number of namespaces, siblings and blocks: it searches maps and
/// touches only the blocks that it concerns. A node's memory is proportional to its blocks.
///
/// A block knows its position, so callers need no node ids, and splitting a node does not invalidate their block ids.
#[derive(Debug)]
pub(crate) struct PrefixTree {
    page_size: usize,
    max_node_blocks: usize,
    /// At most twice as many nodes as blocks: each node has at least one block, or is the root above such a node.
    nodes: Vec<Node>,
    unused_nodes: Vec<TreeNodeId>,
    /// The roots by namespace. The keys begin with a hash of the namespace, so that a search seldom compares the names
    /// themselves.
    roots: BTreeMap<(u64, Namespace), TreeNodeId>,
    /// The position of each block, or `None` if the block is not in the tree.
    positions: Vec<Option<TreePosition>>,
    /// The ids of blocks that have left the tree, for reuse.
    unused_blocks: Vec<BlockId>,
    /// The number of the next insertion.
    next_insertion: NonZeroU64,
}

/// The part of a token sequence in the tree.
#[derive(Debug, Default, PartialEq)]
pub struct PrefixMatch {
    /// Whole blocks from the start of the sequence.
    pub blocks: Vec<BlockId>,
    /// A block that begins with the next tokens, and the number of these tokens.
    pub donor: Option<(BlockId, u32)>,
}

/// The whole blocks found for a token sequence, each with the number of its insertion. A block that was removed and
/// inserted again has another number.
#[derive(Debug, Default)]
pub(crate) struct KnownPath {
    blocks: Vec<(BlockId, NonZeroU64)>,
}

impl KnownPath {
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }
}

/// The position after which the next block of a sequence follows.
#[derive(Clone, Copy, Debug)]
pub enum Parent<'a> {
    Root(&'a Namespace),
    Block(BlockId),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TreeNodeId(u32);

#[derive(Clone, Copy, Debug)]
struct TreePosition {
    node: TreeNodeId,
    index: u32,
    /// The number of the insertion, which distinguishes this use of the block from earlier ones.
    insertion: NonZeroU64,
    /// The number of requests' paths that end at the block. While it is above 0, the block stays even without pages.
    num_ends: u32,
}

/// Blocks that have left the tree.
#[derive(Debug, Default)]
pub(crate) struct RemovedBlocks {
    pub blocks: Vec<BlockId>,
    /// The number of paths that ended at those blocks.
    pub num_ends: u32,
}

#[derive(Debug, Default)]
struct Node {
    above: Above,
    tokens: Vec<TokenId>,
    blocks: Vec<BlockId>,
    children: BTreeMap<FirstBlock, TreeNodeId>,
}

/// The parent of a node.
#[derive(Debug, Default)]
enum Above {
    /// The node is unused.
    #[default]
    Nothing,
    /// The node is the root of this namespace.
    Namespace(Namespace),
    Node(TreeNodeId),
}

impl Node {
    fn first_block(&self, page_size: usize) -> FirstBlock {
        FirstBlock::new(&self.tokens[..self.tokens.len().min(page_size)])
    }

    /// Frees memory once four times as much is allocated as needed, so that removing a block copies
    /// only a few blocks on average.
    fn shrink(&mut self) {
        if self.tokens.capacity() > 4 * self.tokens.len() {
            self.tokens.shrink_to(2 * self.tokens.len());
        }
        if self.blocks.capacity() > 4 * self.blocks.len() {
            self.blocks.shrink_to(2 * self.blocks.len());
        }
    }
}

impl PrefixTree {
    /// Reserves room for `num_pages` blocks. The tree may grow beyond that.
    pub fn new(num_pages: u32, page_size: u32) -> Self {
        Self {
            page_size: page_size as usize,
            max_node_blocks: (MAX_NODE_TOKENS / page_size as usize).max(1),
            nodes: Vec::new(),
            unused_nodes: Vec::new(),
            roots: BTreeMap::new(),
            positions: Vec::with_capacity(num_pages as usize),
            unused_blocks: Vec::with_capacity(num_pages as usize),
            next_insertion: NonZeroU64::MIN,
        }
    }

    /// Finds the longest match of a token sequence, up to a position within a block.
    ///
    /// `known` is the path that an earlier call found for the same tokens, and is updated. The known blocks that are
    /// still in the tree are not compared again.
    pub fn match_prefix(
        &self,
        namespace: &Namespace,
        tokens: &[TokenId],
        known: &mut KnownPath,
    ) -> PrefixMatch {
        // A block leaves the tree together with all blocks after it, so the path to a block in the tree is unchanged.
        while let Some(&(block, insertion)) = known.blocks.last()
            && self.positions[block.0 as usize].map(|position| position.insertion)
                != Some(insertion)
        {
            known.blocks.pop();
        }
        let (mut node, mut num_blocks) = match known.blocks.last() {
            Some(&(block, _)) => self.behind(block),
            None => match self.roots.get(&root_key(namespace)) {
                Some(&root) => (root, 0),
                None => return PrefixMatch::default(),
            },
        };
        let mut rest = &tokens[known.blocks.len() * self.page_size..];
        let donor = loop {
            let Node { tokens, blocks, .. } = self.node(node);
            let first = num_blocks;
            num_blocks += tokens[first * self.page_size..]
                .chunks_exact(self.page_size)
                .zip(rest.chunks_exact(self.page_size))
                .take_while(|(ours, theirs)| ours == theirs)
                .count();
            for &block in &blocks[first..num_blocks] {
                known.blocks.push((block, self.position(block).insertion));
            }
            rest = &rest[(num_blocks - first) * self.page_size..];
            if let Some(&block) = blocks.get(num_blocks) {
                let num_rows = num_common_tokens(&tokens[num_blocks * self.page_size..], rest);
                break (block, num_rows);
            }
            match self.closest_child(node, rest) {
                Some((child, num_common)) if num_common < self.page_size => {
                    break (self.node(child).blocks[0], num_common);
                }
                Some((child, _)) => (node, num_blocks) = (child, 0),
                None => break (BlockId(0), 0),
            }
        };
        PrefixMatch {
            blocks: known.blocks.iter().map(|&(block, _)| block).collect(),
            donor: (donor.1 > 0).then_some((donor.0, donor.1 as u32)),
        }
    }

    /// Inserts a block of `tokens` after `parent`; fewer tokens than a page has rows make a tail. If the tree already
    /// has these tokens after `parent`, nothing changes, and `Err` names their block. A tail that the new block covers
    /// leaves the tree and is appended to `superseded`.
    pub fn insert(
        &mut self,
        parent: Parent,
        tokens: &[TokenId],
        superseded: &mut RemovedBlocks,
    ) -> Result<BlockId, BlockId> {
        debug_assert!(!tokens.is_empty() && tokens.len() <= self.page_size);
        let (mut parent, after) = match parent {
            Parent::Root(namespace) => (self.root(namespace), 0),
            Parent::Block(block) => self.behind(block),
        };
        if after < self.node(parent).blocks.len() {
            let there = &self.node(parent).tokens[after * self.page_size..];
            if there.starts_with(tokens) {
                return Err(self.node(parent).blocks[after]);
            }
            parent = self.split(parent, after);
        }
        let Node {
            blocks, children, ..
        } = self.node(parent);
        let mut covered = None;
        if !children.is_empty() {
            let (before, from) = neighbours(children, &FirstBlock::new(tokens));
            if let Some((first_block, child)) = from
                && first_block.starts_with(tokens)
            {
                return Err(self.node(child).blocks[0]);
            }
            // A sibling that is a prefix of the key sorts directly before it.
            let is_covered = |(first_block, _): &Child| tokens.starts_with(first_block);
            covered = before.filter(is_covered).map(|(_, tail)| tail);
        }
        let has_room = !blocks.is_empty() && blocks.len() < self.max_node_blocks;
        let is_whole = tokens.len() == self.page_size;
        let is_extended = is_whole && has_room && children.len() == usize::from(covered.is_some());
        let (node, index) = match is_extended {
            true => (parent, self.node(parent).blocks.len()),
            false => {
                let node = self.new_node(Above::Node(parent));
                let siblings = &mut self.node_mut(parent).children;
                siblings.insert(FirstBlock::new(tokens), node);
                (node, 0)
            }
        };
        let block = self.new_block(TreePosition {
            node,
            index: index as u32,
            insertion: self.next_insertion,
            num_ends: 0,
        });
        self.next_insertion = self.next_insertion.saturating_add(1);
        let target = self.node_mut(node);
        target.tokens.extend_from_slice(tokens);
        target.blocks.push(block);
        if let Some(tail) = covered {
            self.remove_node(tail, superseded);
        }
        Ok(block)
    }

    /// The whole block of `tokens` that follows `parent`, if any.
    pub fn child(&self, parent: Parent, tokens: &[TokenId]) -> Option<BlockId> {
        let (node, after) = match parent {
            Parent::Root(namespace) => (*self.roots.get(&root_key(namespace))?, 0),
            Parent::Block(block) => self.behind(block),
        };
        let node = self.node(node);
        match node.blocks.get(after) {
            Some(&next) => node.tokens[after * self.page_size..]
                .starts_with(tokens)
                .then_some(next),
            None => {
                let child = node.children.get(&FirstBlock::new(tokens))?;
                self.node(*child).blocks.first().copied()
            }
        }
    }

    /// The whole blocks that follow a block.
    pub fn children(&self, block: BlockId) -> impl Iterator<Item = BlockId> {
        let TreePosition { node, index, .. } = self.position(block);
        let node = self.node(node);
        let next = node.blocks.get(index as usize + 1).copied();
        let is_last = next.is_none();
        let below = node.children.values().filter(move |_| is_last);
        let below = below.map(|&child| self.node(child));
        let whole = below.filter(|child| child.tokens.len() >= self.page_size);
        next.into_iter().chain(whole.map(|child| child.blocks[0]))
    }

    /// Removes a block and all blocks below it from the tree.
    pub fn remove_from(&mut self, block: BlockId, removed: &mut RemovedBlocks) {
        let TreePosition { node, index, .. } = self.position(block);
        let below = core::mem::take(&mut self.node_mut(node).children);
        let mut below: Vec<TreeNodeId> = below.into_values().collect();
        while let Some(child) = below.pop() {
            below.extend(self.node(child).children.values());
            let child = self.drop_node(child);
            self.forget(&child.blocks, removed);
        }
        if index == 0 {
            self.remove_node(node, removed);
            return;
        }
        let target = &mut self.nodes[node.0 as usize];
        target.tokens.truncate(index as usize * self.page_size);
        for block in target.blocks.drain(index as usize..) {
            let position = self.positions[block.0 as usize].take();
            removed.num_ends += position.map_or(0, |position| position.num_ends);
            self.unused_blocks.push(block);
            removed.blocks.push(block);
        }
        target.shrink();
    }

    /// Whether `block` can be removed alone: it is the last block of a node without children.
    pub fn is_leaf(&self, block: BlockId) -> bool {
        self.positions[block.0 as usize].is_some_and(|position| {
            let node = self.node(position.node);
            node.children.is_empty() && node.blocks.len() == position.index as usize + 1
        })
    }

    /// The block before `block` on its path.
    pub fn block_before(&self, block: BlockId) -> Option<BlockId> {
        match self.parent(block)? {
            Parent::Block(before) => Some(before),
            Parent::Root(_) => None,
        }
    }

    /// The parent of `block`, or `None` if it is not in the tree.
    pub fn parent(&self, block: BlockId) -> Option<Parent<'_>> {
        let position = self.positions[block.0 as usize]?;
        let node = self.node(position.node);
        if let Some(index) = (position.index as usize).checked_sub(1) {
            return Some(Parent::Block(node.blocks[index]));
        }
        let Above::Node(above) = node.above else {
            unreachable!("a node that has blocks has no parent");
        };
        let above = self.node(above);
        match &above.above {
            Above::Namespace(namespace) => Some(Parent::Root(namespace)),
            _ => above.blocks.last().copied().map(Parent::Block),
        }
    }

    /// The namespace whose prefix `block` is part of, or `None` if it is not in the tree.
    pub fn namespace(&self, block: BlockId) -> Option<&Namespace> {
        let mut node = self.positions[block.0 as usize]?.node;
        loop {
            match &self.node(node).above {
                Above::Namespace(namespace) => return Some(namespace),
                Above::Node(above) => node = *above,
                Above::Nothing => unreachable!("a block is in an unused node"),
            }
        }
    }

    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// The tokens of a block's filled rows; fewer than `page_size` in a tail.
    pub fn block_tokens(&self, block: BlockId) -> &[TokenId] {
        let TreePosition { node, index, .. } = self.position(block);
        let rest = &self.node(node).tokens[index as usize * self.page_size..];
        &rest[..rest.len().min(self.page_size)]
    }

    /// All whole blocks in the order of their insertion, so that each block comes after its parent.
    pub fn whole_blocks(&self) -> Vec<BlockId> {
        let placed = self.positions.iter().enumerate();
        let mut blocks: Vec<(NonZeroU64, BlockId)> = placed
            .filter_map(|(block, position)| {
                Some((position.as_ref()?.insertion, BlockId(block as u32)))
            })
            .collect();
        blocks.sort_unstable();
        let is_whole = |block: &BlockId| self.block_tokens(*block).len() == self.page_size;
        let blocks = blocks.into_iter().map(|(_, block)| block);
        blocks.filter(is_whole).collect()
    }

    /// All blocks in the order of their numbers.
    pub fn blocks(&self) -> impl Iterator<Item = BlockId> {
        let placed = self.positions.iter().enumerate();
        placed.filter_map(|(block, position)| position.map(|_| BlockId(block as u32)))
    }

    pub fn insertion(&self, block: BlockId) -> Option<u64> {
        let position = self.positions.get(block.0 as usize)?.as_ref()?;
        Some(position.insertion.get())
    }

    /// The number of requests' paths that end at a block.
    pub fn num_ends(&self, block: BlockId) -> u32 {
        self.positions[block.0 as usize].map_or(0, |position| position.num_ends)
    }

    /// Records that one more request's path ends at a block.
    pub fn add_end(&mut self, block: BlockId) {
        self.position_mut(block).num_ends += 1;
    }

    /// Records that one request's path no longer ends at a block.
    pub fn remove_end(&mut self, block: BlockId) {
        self.position_mut(block).num_ends -= 1;
    }

    /// The number of blocks before `block` on its path.
    pub fn depth(&self, block: BlockId) -> usize {
        let TreePosition { node, index, .. } = self.position(block);
        let mut depth = index as usize;
        let mut node = self.node(node);
        while let Above::Node(above) = node.above {
            node = self.node(above);
            depth += node.blocks.len();
        }
        depth
    }

    pub fn num_blocks(&self) -> usize {
        self.positions.len() - self.unused_blocks.len()
    }

    /// The child whose first block shares the most tokens with the front of `key`, and the number of these tokens. The
    /// child sorts directly before or after the key.
    fn closest_child(&self, node: TreeNodeId, key: &[TokenId]) -> Option<(TreeNodeId, usize)> {
        let children = &self.node(node).children;
        if children.is_empty() {
            return None;
        }
        let key = &key[..key.len().min(self.page_size)];
        let first_block = FirstBlock::new(key);
        if let Some(&child) = children.get(&first_block) {
            return Some((child, key.len()));
        }
        let (before, from) = neighbours(children, &first_block);
        let num_common = |(block, child)| (child, num_common_tokens(block, key));
        before
            .into_iter()
            .chain(from)
            .map(num_common)
            .filter(|&(_, num_common)| num_common > 0)
            .max_by_key(|&(_, num_common)| num_common)
    }

    /// Cuts a node before block `index` and returns the front. The back keeps the node's id, because
    /// any number of children may name it.
    fn split(&mut self, node: TreeNodeId, index: usize) -> TreeNodeId {
        let page_size = self.page_size;
        let front_id = self.new_node(Above::Nothing);
        let back = &mut self.nodes[node.0 as usize];
        let mut front = Node {
            above: core::mem::replace(&mut back.above, Above::Node(front_id)),
            tokens: back.tokens.drain(..index * page_size).collect(),
            blocks: back.blocks.drain(..index).collect(),
            children: BTreeMap::new(),
        };
        back.shrink();
        let positions = &mut self.positions;
        for block in &front.blocks {
            if let Some(position) = &mut positions[block.0 as usize] {
                position.node = front_id;
            }
        }
        for block in &back.blocks {
            if let Some(position) = &mut positions[block.0 as usize] {
                position.index -= index as u32;
            }
        }
        front.children.insert(back.first_block(page_size), node);
        if let Above::Node(parent) = front.above {
            let siblings = &mut self.node_mut(parent).children;
            let entry = siblings.get_mut(&front.first_block(page_size));
            *entry.expect("a node is missing among its parent's children") = front_id;
        }
        *self.node_mut(front_id) = front;
        front_id
    }

    /// Removes a node without children, and the root above it if no other node is left there.
    fn remove_node(&mut self, node: TreeNodeId, removed: &mut RemovedBlocks) {
        let dropped = self.drop_node(node);
        self.forget(&dropped.blocks, removed);
        let Above::Node(parent) = dropped.above else {
            unreachable!("a node that has blocks has no parent");
        };
        let first_block = dropped.first_block(self.page_size);
        let parent_node = self.node_mut(parent);
        let entry = parent_node.children.remove(&first_block);
        debug_assert_eq!(entry, Some(node));
        if parent_node.children.is_empty()
            && let Above::Namespace(namespace) = &parent_node.above
        {
            let key = root_key(namespace);
            self.roots.remove(&key);
            self.drop_node(parent);
        }
    }

    fn drop_node(&mut self, node: TreeNodeId) -> Node {
        self.unused_nodes.push(node);
        core::mem::take(self.node_mut(node))
    }

    fn forget(&mut self, blocks: &[BlockId], removed: &mut RemovedBlocks) {
        for block in blocks {
            let position = self.positions[block.0 as usize].take();
            removed.num_ends += position.map_or(0, |position| position.num_ends);
        }
        self.unused_blocks.extend_from_slice(blocks);
        removed.blocks.extend_from_slice(blocks);
    }

    fn root(&mut self, namespace: &Namespace) -> TreeNodeId {
        let key = root_key(namespace);
        if let Some(&root) = self.roots.get(&key) {
            return root;
        }
        let root = self.new_node(Above::Namespace(namespace.clone()));
        self.roots.insert(key, root);
        root
    }

    fn new_block(&mut self, position: TreePosition) -> BlockId {
        let block = self.unused_blocks.pop().unwrap_or_else(|| {
            self.positions.push(None);
            BlockId(self.positions.len() as u32 - 1)
        });
        self.positions[block.0 as usize] = Some(position);
        block
    }

    fn new_node(&mut self, above: Above) -> TreeNodeId {
        let node = self.unused_nodes.pop().unwrap_or_else(|| {
            self.nodes.push(Node::default());
            TreeNodeId(self.nodes.len() as u32 - 1)
        });
        self.node_mut(node).above = above;
        node
    }

    fn node(&self, node: TreeNodeId) -> &Node {
        &self.nodes[node.0 as usize]
    }

    fn node_mut(&mut self, node: TreeNodeId) -> &mut Node {
        &mut self.nodes[node.0 as usize]
    }

    /// The node of a block, and the index after the block's own.
    fn behind(&self, block: BlockId) -> (TreeNodeId, usize) {
        let position = self.position(block);
        (position.node, position.index as usize + 1)
    }

    fn position(&self, block: BlockId) -> TreePosition {
        self.positions[block.0 as usize].expect("the block is not in the tree")
    }

    fn position_mut(&mut self, block: BlockId) -> &mut TreePosition {
        let position = self.positions[block.0 as usize].as_mut();
        position.expect("the block is not in the tree")
    }
}

fn root_key(namespace: &Namespace) -> (u64, Namespace) {
    (PageHash::root(0, namespace).0 as u64, namespace.clone())
}
