//! The calibration data of a matrix's inputs.

/// Sums of products of a matrix's inputs with each other, over rows of calibration text: up to a
/// factor, the second derivatives of the squared error of its outputs.
pub struct Hessian {
    num_columns: usize,
    sums: Vec<f32>,
}

impl Hessian {
    /// Wraps sums, `[in, in]`. Only elements on and right of the diagonal are used.
    pub fn new(num_columns: usize, sums: Vec<f32>) -> Self {
        assert_eq!(sums.len(), num_columns * num_columns);
        Self { num_columns, sums }
    }

    pub fn num_columns(&self) -> usize {
        self.num_columns
    }

    /// `[in, in]`, row-major. Elements left of the diagonal are void.
    pub fn sums(&self) -> &[f32] {
        &self.sums
    }
}
