//! Norms of rows: before dense layers, and after a layer's parts.

use corella_model::{DecoderSpec, NormKind};

use crate::dense::{Buffer, Grid, PackedRows};
use crate::kernels::{Form, Kernels, TILE_K};
use crate::system::Worker;
use crate::weights::{PackedMatrix, PackedNorm};

use crate::step::forward::Forward;

/// The number of elements of a row that are normalised and packed at a time.
const NORM_CHUNK: usize = 256;

/// The parameters of a row's norm that depend on the whole row. Without a norm, rows stay unchanged.
pub struct RowNorm<'a> {
    kernels: &'a Kernels,
    norm: Option<&'a PackedNorm>,
    mean: f32,
    scale: f32,
}

impl<'a> RowNorm<'a> {
    pub fn new(kernels: &'a Kernels, norm: Option<&'a PackedNorm>, x: &[f32]) -> Self {
        let (mean, mean_square) = match norm.map(|norm| norm.spec.kind) {
            None => (0.0, 1.0),
            Some(NormKind::Rms) => {
                // SAFETY: the pointer and the length are those of `x`.
                let sum = unsafe { (kernels.sum_of_squares)(x.as_ptr(), x.len()) };
                (0.0, sum / x.len() as f32)
            }
            Some(NormKind::Layer { .. }) => {
                // SAFETY: the pointer and the length are those of `x`.
                let [mean, variance] = unsafe { (kernels.moments)(x.as_ptr(), x.len()) };
                (mean, variance)
            }
        };
        let eps = norm.map_or(0.0, |norm| norm.spec.eps);
        Self {
            kernels,
            norm,
            mean,
            scale: 1.0 / (mean_square + eps).sqrt(),
        }
    }

    /// Calls `take` with each part of the row in order, and the index of its first element.
    pub fn for_each_part(&self, x: &[f32], mut take: impl FnMut(usize, &[f32])) {
        let mut values = [0.0; NORM_CHUNK];
        for first in (0..x.len()).step_by(NORM_CHUNK) {
            let len = NORM_CHUNK.min(x.len() - first);
            self.write(&x[first..][..len], first, &mut values[..len]);
            take(first, &values[..len]);
        }
    }

    /// Normalises a row in place.
    pub fn apply(&self, x: &mut [f32]) {
        let mut values = [0.0; NORM_CHUNK];
        for (index, part) in x.chunks_mut(NORM_CHUNK).enumerate() {
            let values = &mut values[..part.len()];
            self.write(part, index * NORM_CHUNK, values);
            part.copy_from_slice(values);
        }
    }

    /// Normalises a part of the row that begins at element `first`.
    fn write(&self, x: &[f32], first: usize, out: &mut [f32]) {
        let Some(norm) = self.norm else {
            out.copy_from_slice(x);
            return;
        };
        let weight = &norm.weight[first..][..x.len()];
        let out = out.as_mut_ptr();
        // SAFETY: each pointer is to as many elements as `x` has.
        unsafe {
            match norm.spec.kind {
                NormKind::Rms => {
                    (self.kernels.weigh)(x.as_ptr(), weight.as_ptr(), self.scale, x.len(), out);
                }
                NormKind::Layer { .. } => {
                    let bias = norm.bias[first..][..x.len()].as_ptr();
                    let mean_and_scale = [self.mean, self.scale];
                    let (x, len) = (x.as_ptr(), x.len());
                    (self.kernels.weigh_centred)(
                        x,
                        weight.as_ptr(),
                        bias,
                        mean_and_scale,
                        len,
                        out,
                    );
                }
            }
        }
    }
}

impl Forward {
    /// Writes the norm of rows of the residual stream, in the form for the dense layer with these weights.
    pub(super) fn normalise(
        &self,
        norm: Option<&PackedNorm>,
        row_of: impl Fn(usize) -> usize,
        grid: Grid,
        (out, weights): (&PackedRows, &PackedMatrix),
        worker: &Worker<'_>,
    ) {
        for row in grid.own_rows(worker.index()) {
            let tile = grid.tiles.rows(grid.tiles.tile_of(row));
            // SAFETY: the residual stream is not written before the next barrier.
            let x = unsafe { self.activations.hidden.row(row_of(row)) };
            let x = &x[..self.spec.hidden_size];
            let row_norm = RowNorm::new(self.kernels, norm, x);
            if let Some(tiles) = self.kernels.tile_gemm
                && let Some(norm) = norm.filter(|norm| norm.spec.kind == NormKind::Rms)
                && out.form() == Form::MatrixTiles
                && x.len().is_multiple_of(TILE_K)
            {
                let (to, stride) = (out.row_ptr(&tile, row, 0), tile.len() * TILE_K);
                let (weight, scale) = (norm.weight[..x.len()].as_ptr(), row_norm.scale);
                // SAFETY: the row, its weights and the output have the same length; the row belongs to this worker.
                unsafe { (tiles.weigh)(x.as_ptr(), weight, scale, x.len(), to, stride) };
                continue;
            }
            // SAFETY: the row belongs to this worker, and is complete once all parts are written.
            unsafe {
                row_norm.for_each_part(x, |first, values| {
                    out.write(self.kernels, &tile, row, first, values);
                });
                out.complete(self.kernels, &tile, row, weights);
            }
        }
    }

    /// Replaces rows of the residual stream by their norms.
    pub(super) fn norm_sums(&self, norm: &PackedNorm, grid: Grid, worker: &Worker<'_>) {
        for row in grid.own_rows(worker.index()) {
            // SAFETY: the rows are complete since the last barrier, and belong to this worker.
            let x = unsafe { self.activations.hidden.row_mut(row) };
            let x = &mut x[..self.spec.hidden_size];
            RowNorm::new(self.kernels, Some(norm), x).apply(x);
        }
    }

    /// Adds the norm of the rows of a layer's part to the residual stream.
    pub(super) fn add_normed(
        &self,
        rows: &Buffer,
        norm: &PackedNorm,
        residual_scale: f32,
        grid: Grid,
        worker: &Worker<'_>,
    ) {
        for row in grid.own_rows(worker.index()) {
            // SAFETY: the rows are complete since the last barrier, and belong to this worker.
            unsafe {
                let x = &rows.row(row)[..self.spec.hidden_size];
                self.add_to_row(row, Some(norm), residual_scale, x);
            }
        }
    }

    /// Adds a row, or its norm, to the residual stream.
    ///
    /// # Safety
    /// No other thread uses this row of the residual stream meanwhile.
    pub(super) unsafe fn add_to_row(
        &self,
        row: usize,
        norm: Option<&PackedNorm>,
        residual_scale: f32,
        x: &[f32],
    ) {
        // SAFETY: the caller promises exclusive access.
        let hidden = unsafe { self.activations.hidden.row_mut(row) };
        RowNorm::new(self.kernels, norm, x).for_each_part(x, |first, values| {
            for (sum, value) in hidden[first..].iter_mut().zip(values) {
                *sum += value * residual_scale;
            }
        });
    }
}

/// Whether the norm after a layer's part is applied to the residual stream (BERT), and not to the part's output.
pub fn norms_sums(spec: &DecoderSpec) -> bool {
    spec.encoder
        .as_ref()
        .is_some_and(|encoder| encoder.norms_sums)
}
