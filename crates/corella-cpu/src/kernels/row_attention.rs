//! Attention in f32: what its kernels take and write.

/// The number of positions that one softmax takes, counted from position 0 of the sequence.
pub const ATTENTION_BLOCK: usize = 64;
/// The number of positions, or head dimensions, that attention computes side by side. Reads of KV
/// rows run up to this many elements past their end.
pub const ATTENTION_LANES: usize = 16;

/// The keys of consecutive positions in one page, whose scores are computed side by side.
#[derive(Clone, Copy)]
pub struct KeyGroup {
    /// Points to dimension 0 of the first position.
    pub keys: *const u8,
    /// The number of positions, `ATTENTION_LANES` at most.
    pub num_positions: usize,
    /// The place of the positions' scores in a row of `ATTENTION_BLOCK`.
    pub offset: usize,
}

/// `out[row][offset + lane] = Σ_i q[i][row] * keys[i][lane]`, accumulated in ascending order of i.
/// The dimensions of a key are `stride` bytes apart.
pub type Scores = unsafe fn(
    q: *const f32,
    num_rows: usize,
    groups: &[KeyGroup],
    stride: usize,
    head_dim: usize,
    out: *mut f32,
);

/// The values of consecutive positions in one page, `[position][head_dim]`.
#[derive(Clone, Copy)]
pub struct ValueRun {
    pub values: *const u8,
    pub num_positions: usize,
}

/// `out[row] = out[row] * scale[row] + Σ_j weights[row][j] * values[j]`, accumulated in ascending order of j over the
/// runs. Rows of `weights` have `ATTENTION_BLOCK` elements. Rows of `out` have `value_stride(head_dim)` elements.
pub type Values = unsafe fn(
    weights: *const f32,
    num_rows: usize,
    scale: *const f32,
    runs: &[ValueRun],
    head_dim: usize,
    out: *mut f32,
);

/// The distance between the rows that [`Values`] adds to, in elements.
pub const fn value_stride(head_dim: usize) -> usize {
    head_dim.next_multiple_of(ATTENTION_LANES)
}
