//! The decode nodes as a prefill node knows them: their health and load, the pages that it has reserved on each, and
//! the prompts that each has.

use alloc::collections::BTreeMap;

use crate::fleet::block_source_map::BlockSourceMap;
use crate::fleet::peer::ReservationId;
use crate::fleet::peer_table::{PeerTable, PeerTableConfig};
use crate::session::NodeIncarnation;
use crate::{DecodeCandidate, Incarnation, NodeId, PageHash, PlacementConfig, SessionId};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryConfig {
    pub peer_table: PeerTableConfig,
    pub placement: PlacementConfig,
    /// Whether this node may decode requests itself.
    pub falls_back: bool,
    pub page_size: u32,
    pub kv_bytes_per_token: u64,
    /// The limit of prompts whose node is remembered. An entry takes about 150 bytes, and a conversation has one for
    /// each of its turns.
    pub max_sent: usize,
    /// The start of the cursor. It differs on each prefill node, so that the nodes begin at different decode nodes.
    pub first_cursor: u64,
}

impl Default for DirectoryConfig {
    fn default() -> Self {
        Self {
            peer_table: PeerTableConfig::default(),
            placement: PlacementConfig::default(),
            falls_back: true,
            page_size: 1,
            kv_bytes_per_token: 0,
            max_sent: 1 << 16,
            first_cursor: 0,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Directory {
    pub(super) config: DirectoryConfig,
    /// The registry's lists and the nodes' answers go here.
    pub peers: PeerTable,
    sent: BlockSourceMap,
    /// Each session's pages on a decode node, requested or reserved.
    reservations: BTreeMap<SessionId, ReservationId>,
    cursor: u64,
}

/// A node that probably has the beginning of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    pub peer: NodeIncarnation,
    pub num_rows: u32,
}

impl Directory {
    pub fn new(config: DirectoryConfig) -> Self {
        Self {
            peers: PeerTable::new(config.peer_table.clone()),
            sent: BlockSourceMap::new(config.max_sent),
            reservations: BTreeMap::new(),
            cursor: config.first_cursor,
            config,
        }
    }

    /// Returns the node that is known to have the most of a prompt, given the hashes of its whole blocks. A node that
    /// has restarted since counts as having nothing.
    pub fn holder(&mut self, hashes: &[PageHash]) -> Option<Holder> {
        let site = self.sent.find(hashes)?;
        let incarnation = Incarnation(self.peers.incarnation(site.node)?);
        Some(Holder {
            peer: NodeIncarnation {
                node: site.node,
                incarnation,
            },
            num_rows: site.num_blocks * self.config.page_size,
        })
    }

    /// Records that a node has reserved pages for a session, as the node's reservation number `granted_as`, and will
    /// soon have the rows of the session's prompt. `last` is the hash of the prompt's last whole block.
    pub fn handle_allocated(
        &mut self,
        session: SessionId,
        last: Option<PageHash>,
        peer: NodeIncarnation,
        granted_as: Option<u64>,
    ) {
        if let Some(last) = last {
            self.sent.note(last, peer.node);
        }
        // The session may have moved to another node since.
        if let Some(granted_as) = granted_as
            && let Some(&reservation) = self.reservations.get(&session)
            && reservation.peer_id == peer.node
        {
            self.peers.handle_granted(reservation, granted_as);
        }
    }

    /// Releases a session's reserved pages.
    pub fn handle_left(&mut self, session: SessionId) {
        if let Some(reservation) = self.reservations.remove(&session) {
            self.peers.release(reservation);
        }
    }

    /// Counts pages as taken before the node reports them.
    pub(super) fn reserve(&mut self, session: SessionId, node: NodeId, num_pages: u32) {
        self.handle_left(session);
        if let Some(reservation) = self.peers.reserve(node, num_pages) {
            self.reservations.insert(session, reservation);
        }
    }

    pub(super) fn next_cursor(&mut self) -> u64 {
        let cursor = self.cursor;
        self.cursor = cursor.wrapping_add(1);
        cursor
    }

    pub(super) fn node(&self, node: NodeId, now_us: u64) -> Option<DecodeCandidate> {
        let mut nodes = self.peers.decode_nodes(now_us).into_iter();
        nodes.find(|known| known.peer_id == node)
    }

    pub fn num_reservations(&self) -> usize {
        self.reservations.len()
    }
}
