//! What two nodes tell each other when one loads cached blocks of the other.

use core::fmt;
use core::ops::Range;

use crate::{BlockList, Incarnation};

/// One load of one node from another. What carries the key of another start of either node is late and is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoadKey {
    pub loader: Incarnation,
    pub source: Incarnation,
    /// Counts the loads that the loading node has begun since it started.
    pub number: u64,
}

/// Messages of the node that loads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToSource {
    /// Asks how many blocks of a list there are for a node that has those before `first_block`. Nothing is kept for it.
    Lookup {
        list: BlockList,
        /// 0 from nodes that do not say it.
        first_block: u32,
    },
    LoadBlocks(LoadBlocks),
    /// Everything of the blocks before `num_blocks`, counted from the beginning of the list, has landed. Asks whether the
    /// hold was live all the time, and lets the source send as many blocks more.
    Landed {
        num_blocks: u32,
    },
    /// The load is over for this side.
    Release,
}

/// Asks for the rows of blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBlocks {
    /// All blocks from the beginning of the sequence. If fewer can be held, the load ends with
    /// [`LoadFailure::NotHere`], which says how many, and the loading node may ask for those.
    pub list: BlockList,
    /// The blocks before it are neither sent nor lent.
    pub first_block: u32,
    /// The part of each row that the loading node has: it may be one of several ranks or stages.
    pub rows: RowPart,
    /// How long the blocks are wanted: not a point in time, because clocks differ.
    pub lease_us: u64,
    /// The number of blocks that may be on their way without having landed.
    pub credit: u32,
}

/// Layers of each KV group, counted within the group, and KV heads of each layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowPart {
    pub layers: Range<u32>,
    pub heads: Range<u32>,
}

/// Messages of the node that has the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToLoader {
    Found {
        num_blocks: u32,
    },
    /// The rows of one block in one layer. A transport carries them, or says where they can be read.
    Data(BlockPart),
    /// The rows of the blocks before `num_blocks` have been read while the hold was live.
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

/// Why a load gives nothing more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LoadFailure {
    /// Only so many blocks of the list can be held: the next one is gone, or more pages would be lent than may be.
    NotHere { num_blocks: u32 },
    /// There is no room for another load, or the request makes no sense.
    Refused,
    /// The hold has ended. Rows that were read since may be those of other blocks.
    HoldEnded,
    /// Nothing was heard for too long.
    Stalled,
    /// There is no such load, or no longer.
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
