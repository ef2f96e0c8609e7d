//! The reader of one load's pages, part by part.

use std::collections::VecDeque;
use std::ops::Range;

use corella_core::session::BlockPart;
use corella_core::{PageId, PageTable};

#[derive(Default)]
pub struct PartReader {
    pub left: VecDeque<(BlockPart, PageId)>,
    pub is_reading: bool,
    pub has_to_stop: bool,
}

impl PartReader {
    /// Adds the layers of further blocks. `num_layers` is by KV group.
    pub fn add(
        &mut self,
        tables: &[PageTable],
        blocks: Range<u32>,
        layers: Range<u32>,
        num_layers: &[u32],
    ) {
        for block in blocks {
            for (group, table) in tables.iter().enumerate() {
                let Some(page) = table.page(block as usize) else {
                    continue;
                };
                for layer in layers.start..layers.end.min(num_layers[group]) {
                    let part = BlockPart {
                        block,
                        group: group as u8,
                        layer,
                    };
                    self.left.push_back((part, page));
                }
            }
        }
    }
}
