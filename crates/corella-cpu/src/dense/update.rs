//! The weights of a dense layer together with what adapters add to its outputs.

use crate::weights::{AdaptedMatrix, PackedMatrix, PackedUpdate, RowAdapters};

use super::buffer::Buffer;

/// The weights of a dense layer, and what adapters add to its outputs.
#[derive(Clone, Copy)]
pub struct Weights<'a> {
    pub matrix: &'a PackedMatrix,
    pub updates: Option<Updates<'a>>,
}

impl<'a> From<&'a PackedMatrix> for Weights<'a> {
    fn from(matrix: &'a PackedMatrix) -> Self {
        Self {
            matrix,
            updates: None,
        }
    }
}

/// The additions of a step's adapters to the outputs of one matrix.
#[derive(Clone, Copy)]
pub struct Updates<'a> {
    pub adapters: &'a RowAdapters,
    pub layer: usize,
    pub matrix: AdaptedMatrix,
    /// The inner values of the rows that have an adapter, `[row][num_inner]`, complete since the last barrier.
    pub inner: &'a Buffer,
}

impl<'a> Updates<'a> {
    /// The update of a row's outputs, if the row's adapter has one.
    pub fn of(&self, row: usize) -> Option<&'a PackedUpdate> {
        self.adapters.update(row, self.layer, self.matrix)
    }
}
