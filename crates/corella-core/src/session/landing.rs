//! The landed parts of a load, and its whole blocks.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use crate::session::BlockPart;
use crate::{PageId, PageTable};

/// Tracks the parts of a load. A block is whole when all of its layers have landed in each group that has a page for
/// it.
#[derive(Debug)]
pub(super) struct Landing {
    first_block: u32,
    end_block: u32,
    /// The pages to fill in each group.
    tables: Vec<PageTable>,
    num_layers: Vec<u32>,
    /// By block, then by group, then by layer.
    has_landed: Vec<bool>,
    /// The number of parts that each block lacks.
    num_left: Vec<u32>,
    num_whole: u32,
    /// Parts that are being written.
    written: BTreeSet<BlockPart>,
    /// The transport is writing all parts, without naming them.
    is_all_written: bool,
}

impl Landing {
    pub fn new(
        first_block: u32,
        end_block: u32,
        tables: Vec<PageTable>,
        num_layers: &[u32],
    ) -> Self {
        let num_blocks = (end_block - first_block) as usize;
        let num_layers_of = |block: usize| {
            let block = first_block as usize + block;
            let groups = tables.iter().zip(num_layers);
            let with_page = groups.filter(|(table, _)| table.page(block).is_some());
            with_page.map(|(_, num_layers)| num_layers).sum()
        };
        let num_all_layers: u32 = num_layers.iter().sum();
        let mut landing = Self {
            first_block,
            end_block,
            num_left: (0..num_blocks).map(num_layers_of).collect(),
            has_landed: alloc::vec![false; num_blocks * num_all_layers as usize],
            num_layers: num_layers.to_vec(),
            tables,
            num_whole: 0,
            written: BTreeSet::new(),
            is_all_written: false,
        };
        landing.advance();
        landing
    }

    pub fn end_block(&self) -> u32 {
        self.end_block
    }

    pub fn first_block(&self) -> u32 {
        self.first_block
    }

    /// Returns the end of the whole blocks, counted from the beginning of the sequence.
    pub fn end_whole(&self) -> u32 {
        self.first_block + self.num_whole
    }

    /// Returns whether any part has landed, or is being written after `begin`.
    pub fn has_begun(&self) -> bool {
        !self.written.is_empty() || self.has_landed.contains(&true)
    }

    pub fn is_at_rest(&self) -> bool {
        self.written.is_empty() && !self.is_all_written
    }

    /// Begins writing a part and returns its page, or `None` if the part is not expected or came before.
    pub fn begin(&mut self, part: BlockPart) -> Option<PageId> {
        let at = self.index(part)?;
        let page = self.tables[usize::from(part.group)].page(part.block as usize)?;
        let is_free = !self.has_landed[at] && !self.is_all_written;
        let is_new = is_free && self.written.insert(part);
        is_new.then_some(page)
    }

    /// Ends writing a part, which has landed if it `is_whole`. Returns false if the part was not being written.
    pub fn end(&mut self, part: BlockPart, is_whole: bool) -> bool {
        let is_known = self.written.remove(&part);
        if is_known
            && is_whole
            && let Some(at) = self.index(part)
        {
            self.has_landed[at] = true;
            self.num_left[(part.block - self.first_block) as usize] -= 1;
            self.advance();
        }
        is_known
    }

    /// Begins writing all parts, in the transport's order.
    pub fn begin_all(&mut self) {
        self.is_all_written = true;
    }

    /// Ends writing after `begin_all`. All parts have landed if the load `is_whole`.
    pub fn end_all(&mut self, is_whole: bool) {
        self.is_all_written = false;
        if is_whole {
            self.has_landed.fill(true);
            self.num_left.fill(0);
            self.advance();
        }
    }

    fn advance(&mut self) {
        while self.num_left.get(self.num_whole as usize) == Some(&0) {
            self.num_whole += 1;
        }
    }

    fn index(&self, part: BlockPart) -> Option<usize> {
        let group = usize::from(part.group);
        let is_here = (self.first_block..self.end_block).contains(&part.block)
            && part.layer < *self.num_layers.get(group)?;
        if !is_here {
            return None;
        }
        let num_all_layers: u32 = self.num_layers.iter().sum();
        let before: u32 = self.num_layers[..group].iter().sum();
        let at = (part.block - self.first_block) * num_all_layers;
        Some((at + before + part.layer) as usize)
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn part(block: u32, group: u8, layer: u32) -> BlockPart {
        BlockPart {
            block,
            group,
            layer,
        }
    }

    /// Blocks 1 to 3 of two groups, the first with one layer, the second with two and a page for the last block alone.
    #[test]
    fn a_block_is_whole_with_its_last_layer() {
        let full = PageTable {
            num_gone: 1,
            pages: vec![PageId(10), PageId(11), PageId(12)],
        };
        let window = PageTable {
            num_gone: 3,
            pages: vec![PageId(13)],
        };
        let mut landing = Landing::new(1, 4, vec![full, window], &[1, 2]);
        let mut land = |part| {
            (
                landing.begin(part),
                landing.end(part, true),
                landing.end_whole(),
            )
        };
        assert_eq!(land(part(2, 0, 0)), (Some(PageId(11)), true, 1));
        assert_eq!(land(part(3, 1, 1)), (Some(PageId(13)), true, 1));
        assert_eq!(land(part(1, 0, 0)), (Some(PageId(10)), true, 3));
        // Each of these parts is out of range, has no page, or has landed already.
        for other in [
            part(0, 0, 0),
            part(4, 0, 0),
            part(u32::MAX, 0, 0),
            part(3, 0, 1),
            part(3, 0, u32::MAX),
            part(3, 2, 0),
            part(2, 1, 0),
            part(1, 0, 0),
        ] {
            assert_eq!(land(other), (None, false, 3), "{other:?}");
        }
        assert_eq!(land(part(3, 1, 0)), (Some(PageId(13)), true, 3));
        assert_eq!(land(part(3, 0, 0)), (Some(PageId(12)), true, 4));
    }

    /// The table of the second group begins after the first block.
    #[test]
    fn all_parts_land_together_or_none() {
        let tables = || {
            let window = PageTable {
                num_gone: 1,
                pages: vec![PageId(8)],
            };
            vec![PageTable::whole(vec![PageId(5), PageId(6)]), window]
        };
        let mut landing = Landing::new(0, 2, tables(), &[2, 1]);
        landing.begin_all();
        assert_eq!(landing.begin(part(1, 1, 0)), None);
        landing.end_all(false);
        assert!(landing.is_at_rest());
        assert_eq!(landing.end_whole(), 0);
        landing.begin_all();
        assert!(!landing.is_at_rest());
        landing.end_all(true);
        assert_eq!(landing.end_whole(), 2);
    }

    #[test]
    fn a_part_that_comes_twice_is_written_once_and_a_torn_one_again() {
        let table = PageTable::whole(vec![PageId(5)]);
        let mut landing = Landing::new(0, 1, vec![table], &[1]);
        assert_eq!(landing.begin(part(0, 0, 0)), Some(PageId(5)));
        assert_eq!(landing.begin(part(0, 0, 0)), None);
        assert!(!landing.is_at_rest());
        assert!(landing.end(part(0, 0, 0), false));
        assert!(!landing.end(part(0, 0, 0), true));
        assert!(landing.is_at_rest());
        assert_eq!(landing.end_whole(), 0);
        assert_eq!(landing.begin(part(0, 0, 0)), Some(PageId(5)));
        assert!(landing.end(part(0, 0, 0), true));
        assert_eq!(landing.end_whole(), 1);
    }
}
