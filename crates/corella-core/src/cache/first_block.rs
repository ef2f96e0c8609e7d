//! The children of a node of the prefix tree, sorted by the tokens of their first blocks.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;

use crate::TokenId;
use crate::cache::prefix_tree::TreeNodeId;

/// The tokens of a node's first block, the sort key of a node's children.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FirstBlock {
    /// The first two tokens. The map itself stores them, so that most searches need not follow the pointer to `tokens`.
    head: u64,
    pub tokens: Box<[TokenId]>,
}

impl FirstBlock {
    pub fn new(tokens: &[TokenId]) -> Self {
        let token = |at: usize| u64::from(tokens.get(at).copied().unwrap_or(0));
        Self {
            head: token(0) << TokenId::BITS | token(1),
            tokens: tokens.into(),
        }
    }
}

pub(super) type Child<'a> = (&'a [TokenId], TreeNodeId);

/// The last child that sorts before `key`, and the first that does not.
pub(super) fn neighbours<'a>(
    children: &'a BTreeMap<FirstBlock, TreeNodeId>,
    key: &FirstBlock,
) -> (Option<Child<'a>>, Option<Child<'a>>) {
    let child = |(first_block, &node): (&'a FirstBlock, &TreeNodeId)| (&*first_block.tokens, node);
    let before = children.range(..key).next_back();
    let from = children.range(key..).next();
    (before.map(child), from.map(child))
}

pub(super) fn num_common_tokens(left: &[TokenId], right: &[TokenId]) -> usize {
    left.iter().zip(right).take_while(|(l, r)| l == r).count()
}
