//! The KV memory of the mock executor: a row for each position of a layer records its history.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use corella_core::{PageId, StepId, TokenId};

use crate::generator::mix;
use crate::mock::mock_executor::state::Snapshots;
use crate::{
    DType, ElementOrder, KvFormat, KvGeometry, KvLayers, KvPages, LayerCounter, LayerProgress,
    MockConfig, StateRecords,
};

/// The KV of one position in the first layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row {
    pub position: u32,
    pub token: TokenId,
    /// A hash of all tokens up to this one.
    pub chain: u64,
}

impl Row {
    pub const NEVER_WRITTEN: Self = Self::without_token(u32::MAX);
    pub const UNDEFINED: Self = Self::without_token(u32::MAX - 1);
    pub const REJECTED: Self = Self::without_token(u32::MAX - 2);

    const fn without_token(position: u32) -> Self {
        Self {
            position,
            token: TokenId::MAX,
            chain: 0,
        }
    }

    pub fn describe(self) -> String {
        match self {
            Self::NEVER_WRITTEN => "was never written".into(),
            Self::UNDEFINED => "a failed step left undefined".into(),
            Self::REJECTED => "holds a draft that was not drawn".into(),
            Row {
                position, token, ..
            } => format!("holds token {token} at position {position} of another history"),
        }
    }

    /// The row in a KV group: a row read from a page of another group has another history.
    pub fn in_group(self, group: usize) -> Self {
        if group == 0 || self.token == TokenId::MAX {
            return self;
        }
        Self {
            chain: mix(self.chain, (group as u64) << 32),
            ..self
        }
    }

    /// The row in a layer: a row read from another layer has another history.
    pub fn in_layer(self, layer: usize) -> Self {
        if layer == 0 || self.token == TokenId::MAX {
            return self;
        }
        Self {
            chain: mix(self.chain, layer as u64),
            ..self
        }
    }
}

/// One KV head of two dimensions: a row's position and token are its key, the halves of its chain
/// its value.
const HEAD_DIM: usize = 2;

pub(crate) struct MockKv {
    geometry: KvGeometry,
    /// The elements of all pages. Other threads write them too, and atomics need no unsafe code.
    cells: Box<[AtomicU32]>,
    pub counter: LayerCounter,
    pub snapshots: Snapshots,
}

impl MockKv {
    pub fn new(config: &MockConfig) -> Self {
        let geometry = KvGeometry {
            num_layers: config.num_layers,
            layers: KvLayers::equal(&config.kv_groups, config.num_layers),
            num_kv_heads: 1,
            head_dim: HEAD_DIM as u32,
            page_size: config.page_size,
            num_pages: config.num_pages,
            format: KvFormat::Float(DType::F32),
            order: ElementOrder::Plain,
        };
        let num_cells = geometry.num_pages as usize * geometry.page_bytes() / size_of::<u32>();
        let kv = Self {
            geometry,
            cells: (0..num_cells).map(|_| AtomicU32::new(0)).collect(),
            counter: LayerCounter::default(),
            snapshots: Snapshots::new(config.num_snapshots),
        };
        for layer in 0..kv.num_layers() {
            let num_rows = kv.geometry.num_pages as usize * kv.page_size();
            for index in 0..num_rows {
                kv.store(layer, index, Row::NEVER_WRITTEN);
            }
        }
        kv
    }

    pub fn num_layers(&self) -> usize {
        self.geometry.num_layers as usize
    }

    fn page_size(&self) -> usize {
        self.geometry.page_size as usize
    }

    /// The cells of a row: `index` counts the positions of all pages.
    fn cells(&self, layer: usize, index: usize) -> [&AtomicU32; 4] {
        let size = self.page_size();
        let (page, position) = (index / size, index % size);
        let page = &self.cells[self.first_cell(layer, page)..];
        let (order, values) = (self.geometry.order, HEAD_DIM * size);
        let key = |i| &page[order.key_index(size, HEAD_DIM, i, position)];
        let value = |i| &page[values + order.value_index(HEAD_DIM, i, position)];
        [key(0), key(1), value(0), value(1)]
    }

    fn first_cell(&self, layer: usize, page: usize) -> usize {
        let page = layer * self.geometry.num_pages as usize + page;
        page * self.geometry.layer_bytes() / size_of::<u32>()
    }

    /// The stored row. For layers other than the first see `Row::in_layer`.
    pub fn load(&self, layer: usize, index: usize) -> Row {
        let cells = self.cells(layer, index);
        let [position, token, low, high] = cells.map(|cell| cell.load(Ordering::Relaxed));
        Row {
            position,
            token,
            chain: u64::from(high) << 32 | u64::from(low),
        }
    }

    pub fn store(&self, layer: usize, index: usize, row: Row) {
        let row = row.in_layer(layer);
        let values = [
            row.position,
            row.token,
            row.chain as u32,
            (row.chain >> 32) as u32,
        ];
        for (cell, value) in self.cells(layer, index).into_iter().zip(values) {
            cell.store(value, Ordering::Relaxed);
        }
    }

    /// Copies a row of a layer.
    pub fn copy(&self, layer: usize, from: usize, to: usize) {
        for (from, to) in self
            .cells(layer, from)
            .into_iter()
            .zip(self.cells(layer, to))
        {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    pub fn store_in_all_layers(&self, index: usize, row: Row) {
        for layer in 0..self.num_layers() {
            self.store(layer, index, row);
        }
    }
}

// SAFETY: each page of a layer has cells of its own, and the executor uses only pages that its
// batches name.
unsafe impl KvPages for MockKv {
    fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    fn regions(&self) -> Vec<NonNull<[u8]>> {
        let cells = NonNull::from(&*self.cells);
        let num_bytes = size_of_val(&*self.cells);
        vec![NonNull::slice_from_raw_parts(cells.cast(), num_bytes)]
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        let geometry = &self.geometry;
        assert!(layer < geometry.num_layers && page.0 < geometry.num_pages);
        let first = self.first_cell(layer as usize, page.0 as usize);
        let cells = &self.cells[first..][..geometry.layer_bytes() / size_of::<u32>()];
        let bytes = NonNull::from(cells).cast::<u8>();
        [geometry.layer_bytes(), 0].map(|len| NonNull::slice_from_raw_parts(bytes, len))
    }

    fn states(&self) -> Option<&dyn StateRecords> {
        self.snapshots.records()
    }

    fn num_layers_done(&self, step: StepId) -> u32 {
        let num_done = self.counter.num_done(step);
        num_done.map_or(self.geometry.num_layers, |num_done| num_done as u32)
    }

    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress {
        assert!(layer < self.geometry.num_layers);
        self.counter.wait(step, layer as usize, timeout)
    }
}
