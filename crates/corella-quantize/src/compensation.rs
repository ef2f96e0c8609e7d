//! Rounding with error compensation: the error of one weight is distributed over the weights of the same output that
//! are still to be rounded, as far as their inputs are correlated (GPTQ, Frantar et al., "Accurate post-training
//! quantization for generative pre-trained transformers", 2023, arXiv 2210.17323).

use std::ops::Range;

use corella_cpu::Hessian;
use corella_model::DType;

use crate::rounding::{Codes, Scale};

/// The upper triangular factor U of a Hessian's inverse, with UᵀU = H⁻¹.
pub struct InverseFactor {
    num_columns: usize,
    /// `[in, in]`, row-major.
    rows: Vec<f32>,
    /// For each input, whether it was always 0. The weights of such an input do not matter.
    is_dead: Vec<bool>,
}

/// The addition to the diagonal, as a share of its mean, which keeps the inverse bounded for correlated inputs. The
/// value is the paper's.
const DAMPING: f64 = 0.01;
/// The number of columns whose errors are passed on together.
const BLOCK: usize = 64;

impl InverseFactor {
    /// Factorises a Hessian. `Err` says why this is not possible.
    pub fn new(hessian: &Hessian, num_threads: usize) -> Result<Self, String> {
        let (n, sums) = (hessian.num_columns(), hessian.sums());
        let diagonal: Vec<f64> = (0..n).map(|i| f64::from(sums[i * n + i])).collect();
        if !diagonal.iter().all(|sum| sum.is_finite()) {
            return Err(String::from(
                "its inputs on the calibration text are not finite",
            ));
        }
        let is_dead: Vec<bool> = diagonal.iter().map(|&sum| sum <= 0.0).collect();
        let mean = diagonal.iter().sum::<f64>() / n as f64;
        let damping = if mean > 0.0 { DAMPING * mean } else { 1.0 };
        // With rows and columns in reverse order, the inverse of the Cholesky factor L is the wanted factor: if J
        // reverses the order, then H = J L Lᵀ J, so H⁻¹ = (J L⁻¹ J)ᵀ (J L⁻¹ J).
        let mut lower = vec![0.0; n * n];
        for i in 0..n {
            let from = n - 1 - i;
            for j in 0..=i {
                // The elements are those from the diagonal to the right, last row first.
                lower[i * n + j] = f64::from(sums[from * n + (n - 1 - j)]);
            }
            lower[i * n + i] += damping;
        }
        factor(&mut lower, n, num_threads)?;
        let inverse = invert(&lower, n, num_threads);
        drop(lower);
        let mut rows = vec![0.0; n * n];
        for i in 0..n {
            for j in i..n {
                rows[i * n + j] = inverse[(n - 1 - i) * n + (n - 1 - j)] as f32;
            }
        }
        Ok(Self {
            num_columns: n,
            rows,
            is_dead,
        })
    }

    /// Rounds rows of weights to codes. The scale of a group is fitted when the group's first weight is rounded, to
    /// weights that already compensate the errors of earlier columns.
    pub(super) fn round_rows(
        &self,
        codes: &Codes,
        group_len: usize,
        scale_dtype: DType,
        rows: &mut [f32],
        scales: &mut [Scale],
    ) {
        let n = self.num_columns;
        let num_groups = n / group_len;
        for (k, _) in self.is_dead.iter().enumerate().filter(|(_, dead)| **dead) {
            rows.iter_mut()
                .skip(k)
                .step_by(n)
                .for_each(|weight| *weight = 0.0);
        }
        let mut errors = vec![[0.0; BLOCK]; rows.len() / n];
        let mut start = 0;
        while start < n {
            // Blocks end where groups do, because fitting a scale needs all of a group's weights.
            let group = start / group_len;
            let group_end = (group + 1) * group_len;
            let end = (start + BLOCK).min(group_end);
            let scales = scales.iter_mut().skip(group).step_by(num_groups);
            for ((row, scale), errors) in rows.chunks_exact_mut(n).zip(scales).zip(&mut errors) {
                if start == group * group_len {
                    *scale = codes.fit(&row[start..group_end], scale_dtype);
                }
                for k in start..end {
                    let factors = &self.rows[k * n..][..n];
                    let error = scale.round(codes, &mut row[k]) / factors[k];
                    errors[k - start] = error;
                    for (weight, factor) in row[k + 1..end].iter_mut().zip(&factors[k + 1..end]) {
                        *weight -= error * factor;
                    }
                }
            }
            self.pass_on(start..end, &errors, rows);
            start = end;
        }
    }

    /// Passes the errors of a block on to the columns after it. A few columns are updated at a time, so that their
    /// factors stay in the first-level cache for all rows.
    fn pass_on(&self, block: Range<usize>, errors: &[[f32; BLOCK]], rows: &mut [f32]) {
        const LANES: usize = 16;
        let n = self.num_columns;
        for first in (block.end..n).step_by(LANES) {
            let columns = first..(first + LANES).min(n);
            for (row, errors) in rows.chunks_exact_mut(n).zip(errors) {
                let weights = &mut row[columns.clone()];
                let mut sums = [0.0; LANES];
                sums[..weights.len()].copy_from_slice(weights);
                for (k, error) in block.clone().zip(errors) {
                    let factors = &self.rows[k * n..][columns.clone()];
                    match factors.first_chunk::<LANES>() {
                        Some(factors) => {
                            for (sum, factor) in sums.iter_mut().zip(factors) {
                                *sum -= error * factor;
                            }
                        }
                        None => {
                            for (sum, factor) in sums.iter_mut().zip(factors) {
                                *sum -= error * factor;
                            }
                        }
                    }
                }
                weights.copy_from_slice(&sums[..weights.len()]);
            }
        }
    }
}

/// Cholesky factorisation: replaces the lower triangle of a matrix A by L with L Lᵀ = A.
fn factor(a: &mut [f64], n: usize, num_threads: usize) -> Result<(), String> {
    let mut panel = Vec::new();
    for start in (0..n).step_by(BLOCK) {
        let end = (start + BLOCK).min(n);
        for i in start..end {
            for j in start..=i {
                let dot = dot(&a[i * n + start..i * n + j], &a[j * n + start..j * n + j]);
                let rest = a[i * n + j] - dot;
                a[i * n + j] = match i == j {
                    true if rest > 0.0 => rest.sqrt(),
                    true => {
                        let reason = "its inputs on the calibration text do not differ enough";
                        return Err(String::from(reason));
                    }
                    false => rest / a[j * n + j],
                };
            }
        }
        let (done, below) = a.split_at_mut(end * n);
        // In the rows below, the elements in the block's columns are computed first. Then the remaining elements are
        // updated.
        in_parallel(below, n, num_threads, |_, row| {
            for j in start..end {
                let dot = dot(&row[start..j], &done[j * n + start..j * n + j]);
                row[j] = (row[j] - dot) / done[j * n + j];
            }
        });
        panel.clear();
        for row in below.chunks(n) {
            panel.extend_from_slice(&row[start..end]);
        }
        let width = end - start;
        in_parallel(below, n, num_threads, |i, row| {
            let (own, _) = row.split_at(end);
            let own: Vec<f64> = own[start..].to_vec();
            for j in 0..=i {
                row[end + j] -= dot(&own, &panel[j * width..][..width]);
            }
        });
    }
    Ok(())
}

/// Inverts a lower triangular matrix.
fn invert(lower: &[f64], n: usize, num_threads: usize) -> Vec<f64> {
    // Row j of `columns` is column j of the inverse, so that dot products run along memory.
    let mut columns = vec![0.0; n * n];
    in_parallel(&mut columns, n, num_threads, |j, column| {
        column[j] = 1.0 / lower[j * n + j];
        for i in j + 1..n {
            let dot = dot(&lower[i * n + j..i * n + i], &column[j..i]);
            column[i] = -dot / lower[i * n + i];
        }
    });
    let mut inverse = vec![0.0; n * n];
    for i in 0..n {
        for j in 0..=i {
            inverse[i * n + j] = columns[j * n + i];
        }
    }
    inverse
}

/// Calls `work` for all rows of `n` elements. Threads get rows in turn, because rows of a triangle differ in length.
fn in_parallel(
    rows: &mut [f64],
    n: usize,
    num_threads: usize,
    work: impl Fn(usize, &mut [f64]) + Sync,
) {
    let num_threads = num_threads.clamp(1, (rows.len() / n).max(1));
    let mut shares: Vec<Vec<(usize, &mut [f64])>> = Vec::new();
    shares.resize_with(num_threads, Vec::new);
    for (i, row) in rows.chunks_mut(n).enumerate() {
        shares[i % num_threads].push((i, row));
    }
    std::thread::scope(|scope| {
        for share in shares {
            scope.spawn(|| {
                for (i, row) in share {
                    work(i, row);
                }
            });
        }
    });
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    const LANES: usize = 8;
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    let mut sums = [0.0; LANES];
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use corella_model::Scheme;

    use super::*;
    use crate::rounding::value;

    /// A number in [0, 1) for a place (the finaliser of SplitMix64, Steele et al. 2014).
    fn uniform(column: usize, row: usize) -> f64 {
        let mut bits = ((row << 32 | column) as u64)
            .wrapping_add(1)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15);
        bits = (bits ^ bits >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((bits ^ bits >> 31) >> 11) as f64 / (1_u64 << 53) as f64
    }

    const LEN: usize = 96;
    const GROUP_LEN: usize = 32;

    /// Rows with correlated neighbours, one input that is always 0, and two inputs that are always equal.
    fn inputs(num_rows: usize) -> Vec<Vec<f64>> {
        let rows = (0..num_rows).map(|row| {
            let noise = |k: usize| uniform(k, row) - 0.5;
            let mut x: Vec<f64> = (0..LEN)
                .map(|k| noise(k) + 0.8 * noise(k / 6 * 6) + 0.3 * noise(LEN))
                .collect();
            x[7] = 0.0;
            x[50] = x[49];
            x
        });
        rows.collect()
    }

    fn hessian(inputs: &[Vec<f64>]) -> Hessian {
        let mut sums = vec![0.0; LEN * LEN];
        for i in 0..LEN {
            for j in i..LEN {
                sums[i * LEN + j] = inputs.iter().map(|x| x[i] * x[j]).sum::<f64>() as f32;
            }
        }
        Hessian::new(LEN, sums)
    }

    fn codes(symmetric: bool) -> Codes {
        Codes::of(Scheme {
            num_bits: 4,
            group_len: Some(GROUP_LEN),
            symmetric,
            is_packed: true,
        })
    }

    fn row(seed: usize) -> Vec<f32> {
        let weight = |k| (uniform(k, seed) + uniform(LEN + k, seed) - 1.0) as f32;
        (0..LEN).map(weight).collect()
    }

    /// Inverts a matrix by Gauss-Jordan elimination.
    fn inverse(a: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let n = a.len();
        let mut rows: Vec<Vec<f64>> = a.to_vec();
        for (i, row) in rows.iter_mut().enumerate() {
            row.extend((0..n).map(|j| f64::from(u8::from(i == j))));
        }
        for pivot in 0..n {
            let scale = 1.0 / rows[pivot][pivot];
            rows[pivot].iter_mut().for_each(|x| *x *= scale);
            let own = rows[pivot].clone();
            for (i, row) in rows.iter_mut().enumerate() {
                let factor = row[pivot];
                if i != pivot {
                    row.iter_mut().zip(&own).for_each(|(x, p)| *x -= factor * p);
                }
            }
        }
        rows.into_iter().map(|row| row[n..].to_vec()).collect()
    }

    /// Computes the paper's equations (2) directly, with the inverse of the remaining Hessian
    /// computed anew for each weight.
    fn reference(hessian: &Hessian, codes: &Codes, row: &[f32]) -> Vec<f32> {
        let full = |i: usize, j: usize| f64::from(hessian.sums()[i.min(j) * LEN + i.max(j)]);
        let mean = (0..LEN).map(|i| full(i, i)).sum::<f64>() / LEN as f64;
        let mut weights: Vec<f64> = row.iter().map(|&w| f64::from(w)).collect();
        weights[7] = 0.0;
        let mut scale = Scale::default();
        let mut rounded = Vec::new();
        for k in 0..LEN {
            let rest: Vec<usize> = (k..LEN).collect();
            let left: Vec<Vec<f64>> = rest
                .iter()
                .map(|&i| {
                    let damped = |j| full(i, j) + if i == j { 0.01 * mean } else { 0.0 };
                    rest.iter().map(|&j| damped(j)).collect()
                })
                .collect();
            let inverse = inverse(&left);
            if k.is_multiple_of(GROUP_LEN) {
                let group: Vec<f32> = weights[k..k + GROUP_LEN]
                    .iter()
                    .map(|&w| w as f32)
                    .collect();
                scale = codes.fit(&group, DType::F32);
            }
            let code = codes.code(weights[k] as f32, scale);
            let lost = weights[k] - f64::from(value(code, scale));
            for (i, &column) in rest.iter().enumerate() {
                weights[column] -= lost / inverse[0][0] * inverse[0][i];
            }
            rounded.push(code);
        }
        rounded
    }

    #[test]
    fn the_paper_s_equations_give_the_same_codes() {
        let hessian = hessian(&inputs(400));
        for num_threads in [1, 3] {
            let factor = InverseFactor::new(&hessian, num_threads).unwrap();
            for symmetric in [true, false] {
                let codes = codes(symmetric);
                for seed in 0..4 {
                    let (mut row, mut scales) = (row(seed), vec![Scale::default(); 3]);
                    let expected = reference(&hessian, &codes, &row);
                    factor.round_rows(&codes, GROUP_LEN, DType::F32, &mut row, &mut scales);
                    // A weight halfway between two codes may be rounded either way, which changes later ones.
                    let same = row.iter().zip(&expected).filter(|(a, b)| a == b).count();
                    assert!(same >= LEN - 2, "{same} of {LEN} codes");
                }
            }
        }
    }

    #[test]
    fn outputs_lose_less_than_by_rounding_to_the_nearest() {
        let seen = inputs(400);
        let factor = InverseFactor::new(&hessian(&seen), 2).unwrap();
        let codes = codes(true);
        let (mut nearest_error, mut error) = (0.0, 0.0);
        for seed in 0..8 {
            let original = row(seed);
            let (mut made_up_for, mut scales) = (original.clone(), vec![Scale::default(); 3]);
            factor.round_rows(&codes, GROUP_LEN, DType::F32, &mut made_up_for, &mut scales);
            let output_error = |value: &dyn Fn(usize) -> f32| -> f64 {
                let errors = seen.iter().map(|x| {
                    let terms = (0..LEN).map(|k| f64::from(value(k) - original[k]) * x[k]);
                    terms.sum::<f64>().powi(2)
                });
                errors.sum()
            };
            error += output_error(&|k| value(made_up_for[k], scales[k / GROUP_LEN]));
            nearest_error += output_error(&|k| {
                let group = k / GROUP_LEN * GROUP_LEN;
                let scale = codes.fit(&original[group..group + GROUP_LEN], DType::F32);
                value(codes.code(original[k], scale), scale)
            });
        }
        assert!(error < 0.7 * nearest_error, "{error} and {nearest_error}");
    }

    #[test]
    fn inputs_that_were_never_seen_or_are_no_numbers() {
        let zeros = Hessian::new(LEN, vec![0.0; LEN * LEN]);
        let factor = InverseFactor::new(&zeros, 2).unwrap();
        let (mut row, mut scales) = (row(0), vec![Scale::default(); 3]);
        factor.round_rows(&codes(true), GROUP_LEN, DType::Bf16, &mut row, &mut scales);
        let values = row.iter().map(|&code| value(code, scales[0]));
        assert!(values.into_iter().all(|value| value == 0.0));
        let broken = Hessian::new(LEN, vec![f32::NAN; LEN * LEN]);
        assert!(InverseFactor::new(&broken, 1).is_err());
    }
}
