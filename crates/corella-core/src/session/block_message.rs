//! The messages between a node that loads cached blocks and their source.

use core::fmt;
use core::ops::Range;

use crate::{BlockList, Incarnation};

/// Identifies a load of one node from another. Messages with an earlier incarnation of either node are late and are
/// ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoadKey {
    pub fetcher: Incarnation,
    pub source: Incarnation,
    /// The index of this load among all loads of the loading node since its start.
    pub number: u64,
}

/// Messages of the loading node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSource {
    /// Asks how many blocks of a list the source has, from `first_block` on. The source holds nothing for a lookup.
    Lookup {
        list: BlockList,
        /// 0 from nodes of versions without this field.
        first_block: u32,
    },
    LoadBlocks(LoadBlocks),
    /// All rows of the blocks before `num_blocks`, counted from the beginning of the list, have landed. Asks whether
    /// the hold lived throughout, and gives credit for the same number of further blocks.
    Landed {
        num_blocks: u32,
    },
    /// The loading node has ended the load.
    Release,
}

/// Asks for the rows of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBlocks {
    /// All blocks from the beginning of the sequence. If the source can hold only the first of them, the load ends with
    /// [`LoadFailure::NotHere`] and their number. The loading node may then ask for only these blocks.
    pub list: BlockList,
    /// Blocks before this one are neither sent nor held.
    pub first_block: u32,
    /// The part of each row that the loading node needs, if it is one of several ranks or stages.
    pub rows: RowPart,
    /// The time for which the blocks are held, counted from the receipt of the message, because the nodes' clocks
    /// differ.
    pub lease_us: u64,
    /// The number of blocks that may be in transit.
    pub credit: u32,
}

/// Layers of each KV group, counted within the group, and KV heads of each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    pub layers: Range<u32>,
    pub heads: Range<u32>,
}

/// Messages of the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToFetcher {
    Found {
        num_blocks: u32,
    },
    /// The rows of one block in one layer. The transport carries them, or names the memory where they can be read.
    Data(BlockPart),
    /// The hold lived while the rows of the blocks before `num_blocks` were read.
    Complete {
        num_blocks: u32,
    },
    Failed(LoadFailure),
}

/// The rows of one block in one layer of a KV group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockPart {
    /// Counted from the beginning of the sequence.
    pub block: u32,
    pub group: u8,
    /// Counted within the group.
    pub layer: u32,
}

/// The reason why a source ends a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoadFailure {
    /// Only the first `num_blocks` blocks of the list can be held: the next one is gone, or too many pages are held.
    NotHere { num_blocks: u32 },
    /// The source runs too many loads, or the request is invalid.
    Refused,
    /// The hold has ended. Rows that were read later may belong to other blocks.
    HoldEnded,
    /// The loading node was silent for too long.
    Stalled,
    /// The source does not know the load, or has ended it.
    Unknown,
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotHere { num_blocks } => {
                write!(f, "the node can lend only {num_blocks} of the blocks now")
            }
            Self::Refused => f.write_str("the node takes no more loads now"),
            Self::HoldEnded => f.write_str("the node did not keep the blocks until they were read"),
            Self::Stalled => f.write_str("the node has heard nothing for too long"),
            Self::Unknown => f.write_str("the node knows of no such load"),
        }
    }
}
