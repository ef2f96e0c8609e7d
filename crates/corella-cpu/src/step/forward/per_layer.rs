//! The end of a layer: the addition of the layer's own input for each token, and the scale of the residual stream.

use std::io;

use corella_model::{DecoderSpec, PerLayerSpec};

use crate::dense::{Buffer, Epilogue, PackedRows};
use crate::kernels::{Form, Kernels};
use crate::system::Worker;
use crate::weights::{PackedLayer, PackedPerLayer};

use crate::step::forward::Forward;
use crate::step::forward::norm::RowNorm;
use crate::step::layout::StepLayout;
use crate::step::profile::barrier_after;
use crate::step::profile::{Operation, Walk};

/// The memory of the layers' own inputs.
pub struct PerLayerRows {
    /// The embeddings, in the form for their projection.
    embedded: PackedRows,
    /// The inputs of all layers, `[row][layer][element]`.
    inputs: Buffer,
    /// For each worker, a token's row of the table.
    looked_up: Buffer,
    /// The gates of a layer's input.
    gates: Buffer,
    /// The gated input.
    gated: PackedRows,
}

impl PerLayerRows {
    /// `None` for models without such inputs.
    pub fn new(
        spec: &DecoderSpec,
        kernels: &Kernels,
        (max_rows, num_threads): (usize, usize),
        packed: impl Fn(usize, usize) -> io::Result<PackedRows>,
    ) -> io::Result<Option<Self>> {
        let Some(of_layer) = spec.per_layer() else {
            return Ok(None);
        };
        let num_elements = spec.layers.len() * of_layer.len;
        let embedded_rows = max_rows.next_multiple_of(kernels.rows_at_once(Form::Columns));
        Ok(Some(Self {
            embedded: PackedRows::new(embedded_rows, spec.hidden_size, Form::Columns, false)?,
            inputs: Buffer::new(max_rows, num_elements)?,
            looked_up: Buffer::new(num_threads, num_elements)?,
            gates: Buffer::new(max_rows, of_layer.len)?,
            gated: packed(max_rows, of_layer.len)?,
        }))
    }
}

impl Forward {
    /// Keeps the embeddings of the worker's rows for their projection.
    pub(super) fn enter_per_layer(&self, layout: &StepLayout, worker: &Worker<'_>) {
        let Some(rows) = &self.activations.per_layer else {
            return;
        };
        let tiles = self.column_grid(layout).tiles;
        for row in layout.grid.own_rows(worker.index()) {
            let tile = tiles.rows(tiles.tile_of(row));
            // SAFETY: this worker has written the row of the residual stream, and the embedded row belongs to this
            // worker, too.
            unsafe {
                let x = &self.activations.hidden.row(row)[..self.spec.hidden_size];
                rows.embedded.write(self.kernels, &tile, row, 0, x);
            }
        }
    }

    /// Makes the inputs of all layers. Each worker reads only the inputs of its own rows, so no barrier is needed
    /// afterwards.
    pub(super) fn make_per_layer(&self, layout: &StepLayout, walk: &mut Walk<'_>) {
        let (Some(rows), Some(ends)) = (&self.activations.per_layer, &self.ends().per_layer) else {
            return;
        };
        let (grid, out) = (self.column_grid(layout), Epilogue::Store(&rows.inputs));
        let projection = (&ends.projection).into();
        self.dense(
            Operation::Embed,
            &rows.embedded,
            grid,
            projection,
            out,
            walk,
        );
        let num_elements = ends.table.shape[1];
        let worker = walk.worker.index();
        for row in layout.grid.own_rows(worker) {
            let token = layout.rows.rows[row].token as usize;
            // SAFETY: the rows are complete since the last barrier, and belong to this worker.
            let (inputs, looked_up) =
                unsafe { (rows.inputs.row_mut(row), rows.looked_up.row_mut(worker)) };
            let (inputs, looked_up) = (&mut inputs[..num_elements], &mut looked_up[..num_elements]);
            let norm = |x: &mut [f32]| {
                RowNorm::new(self.kernels, Some(&ends.norm), x).apply(x);
            };
            ends.finish(token, self.spec.hidden_size, inputs, looked_up, norm);
        }
        walk.note(Operation::Embed);
    }

    /// Adds the layer's own input, and scales the residual stream. Each worker scales the rows that it reads next.
    pub(super) fn end_layer(
        &self,
        layout: &StepLayout,
        index: usize,
        layer: &PackedLayer,
        walk: &mut Walk<'_>,
    ) {
        if let (Some(spec), Some(part)) = (&self.spec.layers[index].per_layer, &layer.per_layer) {
            self.add_per_layer(layout, index, (spec, part), walk);
        }
        if self.spec.layers[index].has_scale {
            for row in layout.grid.own_rows(walk.worker.index()) {
                // SAFETY: the rows belong to this worker.
                let x = unsafe { self.activations.hidden.row_mut(row) };
                let x = &mut x[..self.spec.hidden_size];
                x.iter_mut().for_each(|x| *x *= layer.scale);
            }
        }
    }

    fn add_per_layer(
        &self,
        layout: &StepLayout,
        index: usize,
        (spec, part): (&PerLayerSpec, &PackedPerLayer),
        walk: &mut Walk<'_>,
    ) {
        let (act, grid) = (&self.activations, layout.grid);
        let rows = act.per_layer.as_ref();
        let rows = rows.expect("a layer has an input of its own, but no rows for it");
        self.normalise(None, |r| r, grid, (&act.normed, &part.gate), walk.worker);
        barrier_after(Operation::Norm, walk);
        let out = Epilogue::Store(&rows.gates);
        self.dense(
            Operation::GateUp,
            &act.normed,
            grid,
            (&part.gate).into(),
            out,
            walk,
        );
        for row in grid.own_rows(walk.worker.index()) {
            let tile = grid.tiles.rows(grid.tiles.tile_of(row));
            // SAFETY: gates are complete since the last barrier, and the rows belong to this worker.
            unsafe {
                let gates = &mut rows.gates.row_mut(row)[..spec.len];
                (self.kernels.activate)(spec.activation, gates.as_mut_ptr(), gates.len());
                let inputs = &rows.inputs.row(row)[index * spec.len..][..spec.len];
                gates.iter_mut().zip(inputs).for_each(|(x, y)| *x *= y);
                rows.gated.write(self.kernels, &tile, row, 0, gates);
                rows.gated.complete(self.kernels, &tile, row, &part.output);
            }
        }
        barrier_after(Operation::GateUp, walk);
        let out = Epilogue::Store(self.branch());
        self.dense(
            Operation::Down,
            &rows.gated,
            grid,
            (&part.output).into(),
            out,
            walk,
        );
        self.add_normed(self.branch(), &part.norm, 1.0, grid, walk.worker);
    }
}
