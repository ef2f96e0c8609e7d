//! The rows of a load whose transport orders and limits them itself: all rows land, or none.

use std::collections::BTreeSet;

use corella_core::session::BlockPart;
use corella_core::{FetchGrant, NodeId, PageId};

pub struct WholeLoad {
    /// The node whose connection brings the rows.
    source: NodeId,
    grant: FetchGrant,
    /// Parts that have not landed.
    left: BTreeSet<BlockPart>,
    num_writing: u32,
    /// Whether no further part may be written.
    is_stopped: bool,
}

impl WholeLoad {
    pub fn new(source: NodeId, grant: FetchGrant, num_layers: &[u32]) -> Self {
        let mut left = BTreeSet::new();
        for (group, (table, &num_layers)) in grant.tables.iter().zip(num_layers).enumerate() {
            for block in table.num_gone..table.len() {
                left.extend((0..num_layers).map(|layer| BlockPart {
                    block: block as u32,
                    group: group as u8,
                    layer,
                }));
            }
        }
        Self {
            source,
            grant,
            left,
            num_writing: 0,
            is_stopped: false,
        }
    }

    /// Begins writing a part, and returns its page.
    pub fn begin(&mut self, from: NodeId, part: BlockPart) -> Option<PageId> {
        if from != self.source || self.is_stopped || !self.left.contains(&part) {
            return None;
        }
        let table = &self.grant.tables[usize::from(part.group)];
        let page = table.page(part.block as usize)?;
        self.num_writing += 1;
        Some(page)
    }

    /// Ends writing a part. A torn part ends the load, like a lost connection.
    pub fn end(&mut self, part: BlockPart, is_whole: bool) {
        self.num_writing -= 1;
        match is_whole {
            true => drop(self.left.remove(&part)),
            false => self.is_stopped = true,
        }
    }

    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// Returns whether all parts have landed; `None` while the load continues.
    pub fn outcome(&self) -> Option<bool> {
        let is_whole = self.left.is_empty();
        let is_at_rest = self.num_writing == 0 && (is_whole || self.is_stopped);
        is_at_rest.then_some(is_whole)
    }
}
