//! Both ends of a load, message by message.

mod fetcher;
mod shortening;
mod source;

use corella_core::session::{BlockPart, LoadBlocks, LoadConfig, LoadKey, RowPart, ToSource};
use corella_core::{
    BlockHasher, BlockList, HeldBlocks, HoldId, Incarnation, Namespace, NodeId, PageId, PageTable,
};

const LOADER: NodeId = NodeId(1);
const SOURCE: NodeId = NodeId(2);

/// Pages of four tokens, one group with one layer, credit for two blocks.
fn config() -> LoadConfig {
    LoadConfig {
        lookup_us: 100,
        stall_us: 1_000,
        lease_us: 5_000,
        max_loads: 2,
        credit_blocks: 2,
        ..LoadConfig::new(4, vec![1])
    }
}

/// Three blocks.
fn list() -> BlockList {
    let tokens = (0..12).collect();
    BlockList::new(Namespace::default(), tokens, &BlockHasher::default(), 4)
}

fn rows() -> RowPart {
    RowPart {
        layers: 0..1,
        heads: 0..8,
    }
}

fn part(block: u32) -> BlockPart {
    BlockPart {
        block,
        group: 0,
        layer: 0,
    }
}

fn key() -> LoadKey {
    LoadKey {
        fetcher: Incarnation(5),
        source: Incarnation(7),
        number: 0,
    }
}

/// A load of three blocks.
fn request() -> LoadBlocks {
    LoadBlocks {
        list: list(),
        first_block: 0,
        rows: rows(),
        lease_us: 9_000,
        credit: 2,
    }
}

fn load_blocks() -> ToSource {
    ToSource::LoadBlocks(request())
}

fn lookup(first_block: u32) -> ToSource {
    let list = list();
    ToSource::Lookup { list, first_block }
}

fn held(num_blocks: u32) -> HeldBlocks {
    HeldBlocks {
        id: HoldId(3),
        num_blocks,
        tables: vec![PageTable::whole((0..num_blocks).map(PageId).collect())],
        state: None,
    }
}
