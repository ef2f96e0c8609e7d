//! Gated delta networks: the rows of a chunk of one value head, and the state after a chunk. Each instruction set has
//! its own compiled copy. All copies with fused multiply-adds compute the same bits.
//!
//! With S the state in front of a chunk, and D(s, t) the decays after token s up to token t of the chunk,
//!
//! ```text
//! u_t = strength_t * (v_t - D(-1, t) Sᵀk_t - Σ_{s < t} D(s, t) (k_s·k_t) u_s)
//! o_t = D(-1, t) Sᵀq_t + Σ_{s <= t} D(s, t) (k_s·q_t) u_s
//! S'  = D(-1, end) S + Σ_s D(s, end) k_s u_sᵀ
//! ```
//!
//! Sums are in ascending order. A row depends on no row after it, and not on how many rows are computed at once.

use super::exp::exp_lane;
use super::sum_lanes;
use super::vector::Vector;

/// The number of partial sums of a product of two rows.
const LANES: usize = 16;
/// The number of rows that share a pass over the state.
const ROWS: usize = 2;
/// The number of the state's rows that share a pass over the updates.
const STATE_ROWS: usize = 2;
/// The number of tokens of a chunk. Chunks begin at multiples of this number, so it affects the last bits of results.
/// Chunks of 16 are as fast as chunks of 32; with 64, each row reads more other rows.
pub const DELTA_CHUNK: usize = 32;

/// Some rows of a chunk of one value head. All pointers to rows are to `key_dim` or `value_dim` elements.
pub struct DeltaRows<'a> {
    /// The state in front of the chunk, `[key_dim][value_dim]`; null if it is zero.
    pub state: *const f32,
    pub key_dim: usize,
    pub value_dim: usize,
    /// The keys of the chunk's tokens, up to the last row.
    pub keys: &'a [*const f32],
    /// For each token, the logarithm of the decays from the chunk's start on, up to the last row.
    pub decays: &'a [f32],
    /// The number of tokens in front of the rows.
    pub first: usize,
    /// For each row, its query, its value and its strength.
    pub rows: &'a [DeltaRow],
    /// `u` of the chunk's tokens, one after the other. The kernel writes `u` of its rows.
    pub updates: *mut f32,
    /// The outputs of the rows, one after the other.
    pub out: *mut f32,
}

#[derive(Clone, Copy)]
pub struct DeltaRow {
    pub query: *const f32,
    pub value: *const f32,
    pub strength: f32,
}

/// A state, moved on after a whole chunk.
pub struct StateUpdate<'a> {
    /// The state in front of the chunk; null if it is zero.
    pub from: *const f32,
    /// The destination of the new state, which may be `from`.
    pub to: *mut f32,
    pub key_dim: usize,
    pub value_dim: usize,
    pub keys: &'a [*const f32],
    pub decays: &'a [f32],
    pub updates: *const f32,
}

/// # Safety
/// See [`DeltaRows`].
#[inline(always)]
pub unsafe fn delta_rows<V: Vector>(it: DeltaRows<'_>) {
    let dim = it.value_dim;
    // SAFETY: the caller upholds the contract.
    unsafe {
        for (index, rows) in it.rows.chunks(ROWS).enumerate() {
            let first = it.first + index * ROWS;
            let updates = it.updates.add(first * dim);
            let out = it.out.add(index * ROWS * dim);
            // A row's result memory first holds the row's read of the state.
            if it.state.is_null() {
                std::ptr::write_bytes(updates, 0, rows.len() * dim);
                std::ptr::write_bytes(out, 0, rows.len() * dim);
            } else if let [a, b] = *rows {
                let (k, next) = (it.keys[first], it.keys[first + 1]);
                let to = [updates, out, updates.add(dim), out.add(dim)];
                read_state::<V, 4>([k, a.query, next, b.query], &it, to);
            } else {
                read_state::<V, 2>([it.keys[first], rows[0].query], &it, [updates, out]);
            }
            for (r, row) in rows.iter().enumerate() {
                finish_row::<V>(&it, first + r, row, out.add(r * dim));
            }
        }
    }
}

/// `out[m][j] = Σ_i x[m][i] * state[i][j]`.
#[inline(always)]
unsafe fn read_state<V: Vector, const M: usize>(
    x: [*const f32; M],
    it: &DeltaRows<'_>,
    out: [*mut f32; M],
) {
    let dim = it.value_dim;
    let mut j = 0;
    // SAFETY: the caller upholds the contract; blocks end at the state's last column.
    unsafe {
        while j + 2 * V::LEN <= dim {
            let mut sums = [[V::splat(0.0); 2]; M];
            for i in 0..it.key_dim {
                let state = it.state.add(i * dim + j);
                let state = [V::load(state), V::load(state.add(V::LEN))];
                for m in 0..M {
                    let x = V::splat(*x[m].add(i));
                    sums[m][0] = x.mul_add(state[0], sums[m][0]);
                    sums[m][1] = x.mul_add(state[1], sums[m][1]);
                }
            }
            for m in 0..M {
                sums[m][0].store(out[m].add(j));
                sums[m][1].store(out[m].add(j + V::LEN));
            }
            j += 2 * V::LEN;
        }
        while j < dim {
            for m in 0..M {
                let mut sum = 0.0;
                for i in 0..it.key_dim {
                    sum = V::mul_add_one(*x[m].add(i), *it.state.add(i * dim + j), sum);
                }
                *out[m].add(j) = sum;
            }
            j += 1;
        }
    }
}

/// Called when token `t` has read the state. Adds the terms of the chunk's tokens.
#[inline(always)]
unsafe fn finish_row<V: Vector>(it: &DeltaRows<'_>, t: usize, row: &DeltaRow, out: *mut f32) {
    let dim = it.value_dim;
    let decay = it.decays[t];
    let mut since = [0.0; DELTA_CHUNK];
    for (since, other) in since.iter_mut().zip(&it.decays[..=t]) {
        *since = exp_lane(decay - other);
    }
    let (mut of_key, mut of_query) = ([0.0; DELTA_CHUNK], [0.0; DELTA_CHUNK]);
    // SAFETY: the caller upholds the contract. A chunk has at most `DELTA_CHUNK` tokens; blocks end at the last column.
    unsafe {
        for s in 0..=t {
            // The terms of updates are subtracted, and the terms of outputs are added.
            of_key[s] = -since[s] * dot::<V>(it.keys[s], it.keys[t], it.key_dim);
            of_query[s] = since[s] * dot::<V>(it.keys[s], row.query, it.key_dim);
        }
        let end = RowEnd {
            it,
            t,
            row,
            since_start: exp_lane(decay),
            of_key,
            of_query,
            out,
        };
        let mut j = 0;
        while j + 4 * V::LEN <= dim {
            end.finish_columns::<V, 4>(j);
            j += 4 * V::LEN;
        }
        while j + V::LEN <= dim {
            end.finish_columns::<V, 1>(j);
            j += V::LEN;
        }
        while j < dim {
            end.finish_column::<V>(j);
            j += 1;
        }
    }
}

/// The operands of the final sums of token `t`'s row.
struct RowEnd<'a> {
    it: &'a DeltaRows<'a>,
    t: usize,
    row: &'a DeltaRow,
    since_start: f32,
    /// For each token up to `t`, the factors of the token's update in the update of `t` and in the output of `t`.
    of_key: [f32; DELTA_CHUNK],
    of_query: [f32; DELTA_CHUNK],
    out: *mut f32,
}

impl RowEnd<'_> {
    /// Finishes `N` vectors of columns from column `j` on. Their sums are independent of each other.
    #[inline(always)]
    unsafe fn finish_columns<V: Vector, const N: usize>(&self, j: usize) {
        let dim = self.it.value_dim;
        // SAFETY: the caller promises as many columns.
        unsafe {
            let own = self.it.updates.add(self.t * dim + j);
            let (value, out) = (self.row.value.add(j), self.out.add(j));
            let decayed = V::splat(-self.since_start);
            let (mut updates, mut sums) = ([V::splat(0.0); N], [V::splat(0.0); N]);
            for n in 0..N {
                let at = n * V::LEN;
                updates[n] = decayed.mul_add(V::load(own.add(at)), V::load(value.add(at)));
                sums[n] = V::load(out.add(at)).mul(V::splat(self.since_start));
            }
            for s in 0..self.t {
                let (of_key, of_query) = (V::splat(self.of_key[s]), V::splat(self.of_query[s]));
                for n in 0..N {
                    let other = V::load(self.it.updates.add(s * dim + j + n * V::LEN));
                    updates[n] = of_key.mul_add(other, updates[n]);
                    sums[n] = of_query.mul_add(other, sums[n]);
                }
            }
            for n in 0..N {
                let update = updates[n].mul(V::splat(self.row.strength));
                update.store(own.add(n * V::LEN));
                let sum = V::splat(self.of_query[self.t]).mul_add(update, sums[n]);
                sum.store(out.add(n * V::LEN));
            }
        }
    }

    #[inline(always)]
    unsafe fn finish_column<V: Vector>(&self, j: usize) {
        let (dim, t) = (self.it.value_dim, self.t);
        // SAFETY: the caller promises the column.
        unsafe {
            let (own, out) = (self.it.updates.add(t * dim + j), self.out.add(j));
            let mut update = V::mul_add_one(-self.since_start, *own, *self.row.value.add(j));
            let mut sum = *out * self.since_start;
            for s in 0..t {
                let other = *self.it.updates.add(s * dim + j);
                update = V::mul_add_one(self.of_key[s], other, update);
                sum = V::mul_add_one(self.of_query[s], other, sum);
            }
            update *= self.row.strength;
            *own = update;
            *out = V::mul_add_one(self.of_query[t], update, sum);
        }
    }
}

#[inline(always)]
unsafe fn dot<V: Vector>(a: *const f32, b: *const f32, n: usize) -> f32 {
    let mut lanes = [0.0; LANES];
    let num_whole = n / LANES * LANES;
    // SAFETY: the caller upholds the contract; blocks end at n, and all partial sums are written.
    unsafe {
        let mut sums = [V::splat(0.0); LANES / 4];
        for i in (0..num_whole).step_by(LANES) {
            for (q, sum) in sums[..LANES / V::LEN].iter_mut().enumerate() {
                let at = i + q * V::LEN;
                *sum = V::load(a.add(at)).mul_add(V::load(b.add(at)), *sum);
            }
        }
        for (q, sum) in sums[..LANES / V::LEN].iter().enumerate() {
            sum.store(lanes[q * V::LEN..].as_mut_ptr());
        }
        for i in num_whole..n {
            let lane = &mut lanes[i - num_whole];
            *lane = V::mul_add_one(*a.add(i), *b.add(i), *lane);
        }
    }
    sum_lanes(&lanes)
}

/// # Safety
/// See [`StateUpdate`].
#[inline(always)]
pub unsafe fn update_state<V: Vector>(it: StateUpdate<'_>) {
    let num_tokens = it.keys.len();
    let decay = it.decays[num_tokens - 1];
    let since_start = exp_lane(decay);
    let mut weights = [0.0; DELTA_CHUNK];
    for s in 0..num_tokens {
        weights[s] = exp_lane(decay - it.decays[s]);
    }
    let mut i = 0;
    // SAFETY: the caller upholds the contract; blocks end at the state's last row.
    unsafe {
        while i + STATE_ROWS <= it.key_dim {
            update_rows::<V, STATE_ROWS>(&it, i, since_start, &weights);
            i += STATE_ROWS;
        }
        while i < it.key_dim {
            update_rows::<V, 1>(&it, i, since_start, &weights);
            i += 1;
        }
    }
}

/// Updates `M` rows of the state, from row `i` on.
#[inline(always)]
unsafe fn update_rows<V: Vector, const M: usize>(
    it: &StateUpdate<'_>,
    i: usize,
    since_start: f32,
    weights: &[f32; DELTA_CHUNK],
) {
    let (dim, num_tokens) = (it.value_dim, it.keys.len());
    // SAFETY: the caller upholds the contract; blocks end at the state's last column.
    unsafe {
        let mut factors = [[0.0; M]; DELTA_CHUNK];
        for s in 0..num_tokens {
            for m in 0..M {
                factors[s][m] = weights[s] * *it.keys[s].add(i + m);
            }
        }
        let mut j = 0;
        while j + 4 * V::LEN <= dim {
            update_columns::<V, M, 4>(it, i, j, since_start, &factors);
            j += 4 * V::LEN;
        }
        while j + V::LEN <= dim {
            update_columns::<V, M, 1>(it, i, j, since_start, &factors);
            j += V::LEN;
        }
        while j < dim {
            for m in 0..M {
                let at = (i + m) * dim + j;
                let mut sum = match it.from.is_null() {
                    true => 0.0,
                    false => *it.from.add(at) * since_start,
                };
                for s in 0..num_tokens {
                    sum = V::mul_add_one(factors[s][m], *it.updates.add(s * dim + j), sum);
                }
                *it.to.add(at) = sum;
            }
            j += 1;
        }
    }
}

/// Updates `N` vectors of columns of `M` rows of the state, from row `i` and column `j` on.
#[inline(always)]
unsafe fn update_columns<V: Vector, const M: usize, const N: usize>(
    it: &StateUpdate<'_>,
    i: usize,
    j: usize,
    since_start: f32,
    factors: &[[f32; M]; DELTA_CHUNK],
) {
    let (dim, num_tokens) = (it.value_dim, it.keys.len());
    let at = |m: usize, n: usize| (i + m) * dim + j + n * V::LEN;
    // SAFETY: the caller upholds the contract.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; M];
        if !it.from.is_null() {
            let since_start = V::splat(since_start);
            for m in 0..M {
                for n in 0..N {
                    sums[m][n] = V::load(it.from.add(at(m, n))).mul(since_start);
                }
            }
        }
        for s in 0..num_tokens {
            for n in 0..N {
                let update = V::load(it.updates.add(s * dim + j + n * V::LEN));
                for m in 0..M {
                    sums[m][n] = V::splat(factors[s][m]).mul_add(update, sums[m][n]);
                }
            }
        }
        for m in 0..M {
            for n in 0..N {
                sums[m][n].store(it.to.add(at(m, n)));
            }
        }
    }
}

/// Some channels of a row, convolved over the last tokens. SiLU is not applied.
pub struct Convolution<'a> {
    /// The inputs of the tokens, the newest last; null in front of the first token of a sequence.
    pub inputs: &'a [*const f32],
    /// The weights of the oldest token's channels. The next token's weights follow at a distance of `stride` elements.
    pub weights: *const f32,
    pub stride: usize,
    pub len: usize,
    pub out: *mut f32,
}

/// # Safety
/// See [`Convolution`].
#[inline(always)]
pub unsafe fn convolve<V: Vector>(it: Convolution<'_>) {
    let inputs = || it.inputs.iter().enumerate().filter(|(_, x)| !x.is_null());
    let mut c = 0;
    // SAFETY: the caller upholds the contract; blocks end at `len`.
    unsafe {
        while c + V::LEN <= it.len {
            let mut sum = V::splat(0.0);
            for (i, input) in inputs() {
                let weights = V::load(it.weights.add(i * it.stride + c));
                sum = weights.mul_add(V::load(input.add(c)), sum);
            }
            sum.store(it.out.add(c));
            c += V::LEN;
        }
        while c < it.len {
            let mut sum = 0.0;
            for (i, input) in inputs() {
                sum = V::mul_add_one(*it.weights.add(i * it.stride + c), *input.add(c), sum);
            }
            *it.out.add(c) = sum;
            c += 1;
        }
    }
}

/// `x[i] *= sigmoid(gates[i])`.
///
/// # Safety
/// Both have `n` elements.
#[inline(always)]
pub unsafe fn gate(x: *mut f32, gates: *const f32, n: usize) {
    // SAFETY: the caller upholds the contract.
    let (x, gates) = unsafe {
        let x = std::slice::from_raw_parts_mut(x, n);
        (x, std::slice::from_raw_parts(gates, n))
    };
    let (x, x_rest) = x.as_chunks_mut::<LANES>();
    let (gates, gates_rest) = gates.as_chunks::<LANES>();
    for (x, gate) in x.iter_mut().zip(gates) {
        for l in 0..LANES {
            x[l] *= 1.0 / (1.0 + exp_lane(-gate[l]));
        }
    }
    for (x, gate) in x_rest.iter_mut().zip(gates_rest) {
        *x *= 1.0 / (1.0 + exp_lane(-gate));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Isa, is_supported, kernels};
    use super::*;

    /// Neither length is a multiple of a vector's length. A value consists of a block of four of the longest vectors,
    /// one more vector, and some elements.
    const KEY_DIM: usize = 21;
    const VALUE_DIM: usize = 83;

    fn numbers(seed: usize, len: usize) -> Vec<f32> {
        let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
        (0..len).map(number).collect()
    }

    /// A chunk's rows, with the state that they leave.
    struct Chunk {
        out: Vec<f32>,
        state: Vec<f32>,
    }

    fn run(isa: Isa, rows_at_once: usize, state: Option<&[f32]>) -> Chunk {
        let kernels = kernels(isa).unwrap();
        let (keys, queries) = (numbers(1, 32 * KEY_DIM), numbers(2, 32 * KEY_DIM));
        let values = numbers(3, 32 * VALUE_DIM);
        let mut updates = vec![f32::NAN; 32 * VALUE_DIM];
        let mut out = vec![f32::NAN; 32 * VALUE_DIM];
        let keys: Vec<_> = keys.chunks(KEY_DIM).map(|key| key.as_ptr()).collect();
        let decays: Vec<f32> = (1..=32).map(|token| -0.03 * token as f32).collect();
        let row = |token: usize| DeltaRow {
            query: queries[token * KEY_DIM..].as_ptr(),
            value: values[token * VALUE_DIM..].as_ptr(),
            strength: 0.02 * token as f32 / 32.0 + 0.05,
        };
        let from = state.map_or(std::ptr::null(), <[f32]>::as_ptr);
        for first in (0..32).step_by(rows_at_once) {
            let end = 32.min(first + rows_at_once);
            let rows: Vec<_> = (first..end).map(row).collect();
            // SAFETY: all pointers are to as many elements as the sizes say.
            unsafe {
                (kernels.delta_rows)(DeltaRows {
                    state: from,
                    key_dim: KEY_DIM,
                    value_dim: VALUE_DIM,
                    keys: &keys[..end],
                    decays: &decays[..end],
                    first,
                    rows: &rows,
                    updates: updates.as_mut_ptr(),
                    out: out[first * VALUE_DIM..].as_mut_ptr(),
                });
            }
        }
        let mut state = vec![f32::NAN; KEY_DIM * VALUE_DIM];
        // SAFETY: the same holds here.
        unsafe {
            (kernels.update_state)(StateUpdate {
                from,
                to: state.as_mut_ptr(),
                key_dim: KEY_DIM,
                value_dim: VALUE_DIM,
                keys: &keys,
                decays: &decays,
                updates: updates.as_ptr(),
            });
        }
        Chunk { out, state }
    }

    #[test]
    fn rows_have_the_same_bits_alone_and_with_vectors_of_any_length() {
        let state = numbers(4, KEY_DIM * VALUE_DIM);
        for state in [None, Some(&state[..])] {
            for (isa, like) in [
                (Isa::Portable, Isa::Portable),
                (Isa::Avx2, Isa::Avx2),
                (Isa::Avx512, Isa::Avx2),
            ] {
                if !is_supported(isa) {
                    continue;
                }
                let expected = run(like, 32, state);
                for rows_at_once in [1, 2, 3, 7, 32] {
                    let found = run(isa, rows_at_once, state);
                    assert!(found.out == expected.out, "{isa}, {rows_at_once} rows");
                    assert!(found.state == expected.state, "{isa}, {rows_at_once} rows");
                }
            }
        }
    }

    /// The recurrence that the chunk stands for, token by token in f64.
    #[test]
    fn a_chunk_is_the_recurrence_of_its_tokens() {
        let (keys, queries) = (numbers(1, 32 * KEY_DIM), numbers(2, 32 * KEY_DIM));
        let (values, first) = (numbers(3, 32 * VALUE_DIM), numbers(4, KEY_DIM * VALUE_DIM));
        let found = run(Isa::Portable, 32, Some(&first));
        let mut state: Vec<f64> = first.iter().map(|&x| f64::from(x)).collect();
        let decay = (-0.03_f64).exp();
        for token in 0..32 {
            let strength = f64::from(0.02 * token as f32 / 32.0 + 0.05);
            let of = |x: &[f32], i| f64::from(x[token * KEY_DIM + i]);
            state.iter_mut().for_each(|x| *x *= decay);
            for j in 0..VALUE_DIM {
                let column = |state: &[f64], x: &[f32]| -> f64 {
                    (0..KEY_DIM)
                        .map(|i| state[i * VALUE_DIM + j] * of(x, i))
                        .sum()
                };
                let value = f64::from(values[token * VALUE_DIM + j]);
                let update = strength * (value - column(&state, &keys));
                for i in 0..KEY_DIM {
                    state[i * VALUE_DIM + j] += of(&keys, i) * update;
                }
                let (out, expected) = (found.out[token * VALUE_DIM + j], column(&state, &queries));
                assert!(
                    (f64::from(out) - expected).abs() < 1e-4,
                    "{token}, {j}: {out}, {expected}"
                );
            }
        }
        for (found, expected) in found.state.iter().zip(state) {
            assert!(
                (f64::from(*found) - expected).abs() < 1e-4,
                "{found}, {expected}"
            );
        }
    }
}
