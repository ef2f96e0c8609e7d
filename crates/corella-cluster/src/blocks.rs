//! Cached blocks that one node loads from another.
//!
//! The [`FetcherNode`] looks a sequence up at another node, reserves pages for its blocks and loads their rows.
//! Meanwhile the [`SourceNode`] of the other node holds the blocks. Both pass messages, facts and the time to their
//! state machine in `corella_core::session`, and carry out the machine's actions.

mod fetcher_node;
mod source_node;

pub use fetcher_node::{FetchStart, FetchStats, FetcherNode};
pub use source_node::{SourceNode, SourceStats};

use std::io;
use std::sync::Arc;
use std::time::Duration;

use corella_core::NodeId;
use corella_core::session::{LoadConfig, RowPart};
use corella_engine::{BlockFact, FeedReader};
use corella_model::KvGeometry;

/// When blocks are fetched, and how long loads and waiting requests may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FetchConfig {
    /// Blocks are fetched even if computing them is as quick.
    pub is_forced: bool,
    /// The limit of the time for a connection to the source.
    pub greeting: Duration,
    /// The limit of the time for the answer to a lookup.
    pub lookup: Duration,
    /// The limit of the time without new rows.
    pub stall: Duration,
    /// The least time that requests wait for blocks. They wait longer, up to `limit`, if computing the blocks would
    /// take longer or for an unknown time.
    pub wait: Duration,
    /// The limit of the time for a whole load.
    pub limit: Duration,
}

impl Default for FetchConfig {
    /// A source that does not answer delays a request by half a second at most.
    fn default() -> Self {
        Self {
            is_forced: false,
            greeting: Duration::from_millis(250),
            lookup: Duration::from_millis(250),
            stall: Duration::from_secs(1),
            wait: Duration::from_millis(200),
            limit: Duration::from_secs(30),
        }
    }
}

/// Stands for the node at the other end. The state machines need no real number: a load's key names both ends, and the
/// transport checks the key.
const OTHER_END: NodeId = NodeId(0);

/// Passes the scheduler's facts to both ends, until the engine has stopped, has a newer subscriber, or both ends are
/// gone.
pub fn follow_facts(
    facts: FeedReader<BlockFact>,
    source: &Arc<SourceNode>,
    fetcher: &Arc<FetcherNode>,
) -> io::Result<()> {
    let (source, fetcher) = (Arc::downgrade(source), Arc::downgrade(fetcher));
    let follow = move || {
        while let Some(fact) = facts.next_blocking() {
            match (fact, source.upgrade(), fetcher.upgrade()) {
                (_, None, None) => return,
                (BlockFact::HoldEnded(hold), Some(source), _) => source.handle_hold_ended(hold),
                (BlockFact::FetchCancelled(fetch), _, Some(fetcher)) => {
                    fetcher.handle_fetch_cancelled(fetch);
                }
                (BlockFact::HoldEnded(_) | BlockFact::FetchCancelled(_), _, _) => {}
            }
        }
    };
    let thread = std::thread::Builder::new().name("corella-blocks".to_owned());
    thread.spawn(follow).map(drop)
}

/// Returns the part of the rows that each load brings: all layers and heads, because no node has only some of them yet.
fn whole_rows(geometry: &KvGeometry) -> RowPart {
    RowPart {
        layers: 0..geometry.layers.num_layers(),
        heads: 0..geometry.num_kv_heads,
    }
}

/// Returns a configuration that leaves the order of rows and the credit to the transport.
fn load_config(geometry: &KvGeometry) -> LoadConfig {
    let mut num_layers = vec![0; geometry.layers.groups().len()];
    for layer in 0..geometry.layers.num_layers() {
        num_layers[geometry.layers.place(layer).group] += 1;
    }
    LoadConfig {
        credit_blocks: u32::MAX,
        ..LoadConfig::new(geometry.page_size, num_layers)
    }
}
