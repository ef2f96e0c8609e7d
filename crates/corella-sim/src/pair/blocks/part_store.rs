//! The written layers of fetched pages. A page has rows when all of its layers have the same ones.

use std::collections::BTreeMap;

use corella_core::PageId;

use crate::executor::Row;

#[derive(Default)]
pub struct PartStore {
    pages: BTreeMap<PageId, Vec<Option<Vec<Row>>>>,
}

impl PartStore {
    /// Adds a page that a fetch has reserved.
    pub fn begin(&mut self, page: PageId, num_layers: u32) {
        self.pages.insert(page, vec![None; num_layers as usize]);
    }

    /// Makes a layer undefined while it is being written.
    pub fn tear(&mut self, page: PageId, layer: u32) {
        if let Some(layers) = self.pages.get_mut(&page) {
            layers[layer as usize] = None;
        }
    }

    /// Adds a written layer. Returns the rows of the page, by position.
    pub fn land(&mut self, page: PageId, layer: u32, rows: Vec<Row>) -> Vec<Row> {
        let undefined = vec![None; rows.len()];
        let Some(layers) = self.pages.get_mut(&page) else {
            return undefined;
        };
        layers[layer as usize] = Some(rows);
        let first = layers[0].clone();
        match layers
            .iter()
            .all(|layer| layer.is_some() && *layer == first)
        {
            true => first.unwrap_or(undefined),
            false => undefined,
        }
    }
}
