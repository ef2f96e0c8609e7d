//! The adapters of a step's rows: computes their inner values before the dense layers that the adapters update.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use corella_model::{Adapter, AdapterSource, Adapters, DecoderSpec};

use crate::dense::{Buffer, PackedRows, Updates, Weights};
use crate::weights::{AdaptedMatrix, AdapterPacking, PackedAdapter, PackedMatrix};

use crate::step::forward::Forward;
use crate::step::layout::StepLayout;
use crate::step::profile::barrier_after;
use crate::step::profile::{Operation, Walk};

/// The memory for computing updates.
pub struct AdapterRows {
    /// The inner values of all rows, `[rows][num_inner]`.
    inner: Buffer,
    /// For each worker, an input row in f32.
    inputs: Buffer,
}

impl AdapterRows {
    /// Memory for adapters whose matrices have at most this rank.
    pub fn new(
        spec: &DecoderSpec,
        max_rows: usize,
        num_threads: usize,
        max_rank: usize,
    ) -> io::Result<Self> {
        // At most this many matrices are packed as one: queries, keys and values.
        const MAX_PARTS: usize = 3;
        let lens = spec.layers.iter().flat_map(|layer| {
            let inner = layer.feed_forward.mlp().intermediate_size;
            [spec.hidden_size, layer.attention.query_len(), inner]
        });
        Ok(Self {
            inner: Buffer::new(max_rows, MAX_PARTS * max_rank)?,
            inputs: Buffer::new(num_threads, lens.max().unwrap_or(0))?,
        })
    }
}

impl Forward {
    /// The weights of a dense layer with the updates of the rows' adapters. Rows have been complete
    /// since the last barrier; all workers call this together.
    pub(super) fn adapted<'a>(
        &'a self,
        layout: &'a StepLayout,
        (layer, place): (usize, AdaptedMatrix),
        rows: &PackedRows,
        matrix: &'a PackedMatrix,
        walk: &mut Walk<'_>,
    ) -> Weights<'a> {
        let memory = self.activations.adapters.as_ref();
        let Some(memory) = memory.filter(|_| !layout.adapters.is_empty()) else {
            return matrix.into();
        };
        let updates = Updates {
            adapters: &layout.adapters,
            layer: self.first_layer + layer,
            matrix: place,
            inner: &memory.inner,
        };
        let worker = walk.worker.index();
        for row in layout.grid.own_rows(worker) {
            let Some(update) = updates.of(row) else {
                continue;
            };
            let tile = layout.grid.tiles.rows(layout.grid.tiles.tile_of(row));
            // SAFETY: the input belongs to this worker, and so do the inner values of its own rows;
            // the row is not written before the next barrier.
            unsafe {
                let input = &mut memory.inputs.row_mut(worker)[..update.k()];
                rows.read(&tile, row, input);
                update.inner(self.kernels, input, memory.inner.row_mut(row));
            }
        }
        barrier_after(Operation::Adapter, walk);
        Weights {
            matrix,
            updates: Some(updates),
        }
    }
}

/// The adapters that requests may name. Slots that have started keep a removed adapter.
pub struct AdapterStore {
    packing: AdapterPacking,
    max_rank: usize,
    by_name: RwLock<HashMap<Box<str>, Arc<PackedAdapter>>>,
}

impl AdapterStore {
    pub fn new(packing: AdapterPacking, max_rank: usize) -> Self {
        Self {
            packing,
            max_rank,
            by_name: RwLock::default(),
        }
    }
}

impl AdapterSource<PackedAdapter> for AdapterStore {
    fn get(&self, name: &str) -> Option<Arc<PackedAdapter>> {
        let by_name = self.by_name.read();
        by_name
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .cloned()
    }
}

impl Adapters for AdapterStore {
    fn max_rank(&self) -> usize {
        self.max_rank
    }

    fn add(&self, name: &str, adapter: &Adapter) {
        assert!(
            adapter.max_rank() <= self.max_rank,
            "the adapter's rank is too large"
        );
        let packed = Arc::new(self.packing.pack(adapter));
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        by_name.insert(name.into(), packed);
    }

    fn remove(&self, name: &str) {
        let mut by_name = self.by_name.write().unwrap_or_else(PoisonError::into_inner);
        by_name.remove(name);
    }
}
