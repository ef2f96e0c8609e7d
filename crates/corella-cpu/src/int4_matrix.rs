//! Matrices of 4-bit weights: integers and scales that a checkpoint stores, or that are worked out
//! here, brought into panels.
//!
//! Scales are kept as f16 times a power of two of their output, which gives them the range of f32:
//! those that a checkpoint has as f16 are not rounded again, others lose less than a thousandth of
//! what the 4 bits have lost.

use corella_model::{GroupFormat, GroupedRow};
use half::f16;

use crate::kernels::Kernels;
use crate::kernels::int4::{CHUNK_K, Int4Shape, LANE_F16_BYTES, MIDDLE};
use crate::weight_panel::{Lane, Packing, decode_lane};

/// How a matrix gets into 4 bits, and how it then lies.
#[derive(Clone, Copy, Debug)]
pub struct Int4Packing {
    pub shape: Int4Shape,
    pub is_stored: bool,
}

impl Int4Packing {
    /// Rounded to the nearest, a scale for each `group_len` weights of an output: 32, 64 or 128.
    pub fn rounded(k: usize, group_len: usize) -> Self {
        assert!(matches!(group_len, 32 | 64 | 128));
        Self {
            shape: Int4Shape {
                num_chunks: k.div_ceil(CHUNK_K),
                group_chunks: group_len / CHUNK_K,
                has_minimum: false,
            },
            is_stored: false,
        }
    }

    /// As the checkpoint has all lanes; `None` if it has one of them otherwise, or in groups that
    /// are no multiples of 32.
    pub fn stored(lanes: &[Option<Lane<'_>>], k: usize) -> Option<Self> {
        let mut shape = Int4Shape {
            num_chunks: k.div_ceil(CHUNK_K),
            group_chunks: MAX_GROUP_CHUNKS,
            has_minimum: false,
        };
        for lane in lanes.iter().flatten() {
            let format = lane.weight.group_format()?;
            shape.group_chunks = shape.group_chunks.min(group_chunks(format, k)?);
            shape.has_minimum |= format.has_minimum;
        }
        let is_stored = true;
        Some(Self { shape, is_stored })
    }

    /// Fills a panel of zeros, and for each lane what its scales are still to be multiplied by.
    pub fn pack_panel(
        &self,
        lanes: &[Option<Lane<'_>>],
        packing: Packing,
        kernels: &Kernels,
        factors: &mut [f32],
        out: &mut [u8],
    ) {
        let k = packing.k;
        let num_groups = self.shape.num_groups();
        let padded = num_groups * self.shape.group_chunks * CHUNK_K;
        let mut packed = PackedLane {
            q: vec![MIDDLE as u8; padded],
            scales: vec![0.0; num_groups],
            minimums: vec![0.0; num_groups],
        };
        let (mut row, mut scratch) = (vec![0.0; padded], Vec::new());
        let mut stored = GroupedRow::default();
        for (lane, source) in lanes.iter().enumerate() {
            let Some(source) = source else { continue };
            if self.is_stored {
                packed.read(source, k, self.shape, &mut stored);
            } else {
                decode_lane(source, packing, kernels, &mut scratch, &mut row[..k]);
                let (q, scales) = (packed.q.as_mut_ptr(), packed.scales.as_mut_ptr());
                let group_len = self.shape.group_chunks * CHUNK_K;
                // SAFETY: whole groups, and a scale for each.
                unsafe {
                    (kernels.quantise_groups)(row.as_ptr(), num_groups, group_len, q, scales)
                };
            }
            factors[lane] = packed.write(self.shape, lane, out);
        }
    }
}

const MAX_GROUP_CHUNKS: usize = 4;

/// Of the panel's groups, each of which lies inside one of the checkpoint's.
fn group_chunks(format: GroupFormat, k: usize) -> Option<usize> {
    if format.bits != 4 {
        return None;
    }
    let mut lens = [MAX_GROUP_CHUNKS, 2, 1].into_iter();
    lens.find(|chunks| format.group_len >= k || format.group_len.is_multiple_of(chunks * CHUNK_K))
}

/// One output on its way into a panel.
struct PackedLane {
    /// From 0 to 15.
    q: Vec<u8>,
    scales: Vec<f32>,
    minimums: Vec<f32>,
}

impl PackedLane {
    fn read(&mut self, source: &Lane<'_>, k: usize, shape: Int4Shape, stored: &mut GroupedRow) {
        let format = source.weight.group_format().expect("stored in groups");
        source.weight.read_groups(source.row, stored);
        assert_eq!(stored.quants.len(), k);
        let lowest = if format.has_minimum { 0 } else { MIDDLE as i8 };
        for (q, stored) in self.q.iter_mut().zip(&stored.quants) {
            *q = (stored + lowest) as u8;
        }
        for group in 0..shape.num_groups() {
            let from = group * shape.group_chunks * CHUNK_K / format.group_len;
            let scale = stored.scales[from];
            self.scales[group] = scale;
            self.minimums[group] = match stored.minimums.get(from) {
                Some(minimum) => *minimum,
                // Beside lanes with minimums.
                None => -(MIDDLE as f32) * scale,
            };
        }
    }

    /// Returns what scales and minimums are divided by.
    fn write(&self, shape: Int4Shape, lane: usize, out: &mut [u8]) -> f32 {
        let eights = self.q.as_chunks::<8>().0;
        for (i, eight) in eights
            .iter()
            .take(shape.num_chunks * CHUNK_K / 8)
            .enumerate()
        {
            let (at, _) = shape.position(i * 8, lane);
            let eight = u64::from_le_bytes(*eight);
            let bytes = (eight | eight >> 28) as u32;
            out[at..at + 4].copy_from_slice(&bytes.to_le_bytes());
        }
        let minimums = self.minimums.iter().filter(|_| shape.has_minimum);
        let largest = self.scales.iter().chain(minimums.clone());
        let largest = largest.fold(0.0, |most: f32, x| most.max(x.abs()));
        let factor = factor(largest);
        let mut put = |at: usize, value: f32| {
            let bytes = f16::from_f32(value / factor).to_le_bytes();
            out[at..at + 2].copy_from_slice(&bytes);
        };
        for (group, scale) in self.scales.iter().enumerate() {
            put(shape.scale_position(group, lane), *scale);
        }
        for (group, minimum) in minimums.enumerate() {
            put(shape.scale_position(group, lane) + LANE_F16_BYTES, *minimum);
        }
        factor
    }
}

/// The power of two that brings `largest` to the upper end of what f16 holds.
fn factor(largest: f32) -> f32 {
    let power = f32::from_bits(largest.to_bits() & f32::INFINITY.to_bits());
    let factor = power / 16384.0;
    if factor > 0.0 && factor.is_finite() {
        factor
    } else {
        1.0
    }
}

/// The weights of a lane, back from a panel.
pub fn read_lane(panel: &[u8], shape: Int4Shape, lane: usize, factor: f32, out: &mut [f32]) {
    let number = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32() * factor;
    let group_len = shape.group_chunks * CHUNK_K;
    for (group, out) in out.chunks_mut(group_len).enumerate() {
        let at = shape.scale_position(group, lane);
        let scale = number(at);
        let minimum = shape.has_minimum.then(|| number(at + LANE_F16_BYTES));
        for (i, value) in out.iter_mut().enumerate() {
            let (at, is_upper) = shape.position(group * group_len + i, lane);
            let q = i32::from(panel[at] >> (4 * u8::from(is_upper)) & 15);
            *value = match minimum {
                Some(minimum) => q as f32 * scale + minimum,
                None => (q - MIDDLE) as f32 * scale,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use corella_model::{Checkpoint, DType, Tensor};

    use super::*;
    use crate::buffer::Form;
    use crate::kernels::{Isa, kernels};
    use crate::thread_pool::ThreadPool;
    use crate::weight_panel::{PackedMatrix, Packing};

    fn checkpoint(name: &str) -> Checkpoint {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        Checkpoint::open(golden.join(name)).unwrap()
    }

    /// Rows of the parts in their order, back from 4 bits.
    fn packed(parts: &[&Tensor], k: usize, packing: Option<Int4Packing>) -> Vec<Vec<f32>> {
        let lanes = parts.iter().flat_map(|weight| {
            let rows = 0..weight.shape[0];
            rows.map(move |row| {
                let bias = None;
                Some(Lane { weight, bias, row })
            })
        });
        let lanes: Vec<_> = lanes.collect();
        let packing = packing.or_else(|| Int4Packing::stored(&lanes, k));
        let packing = Packing {
            k,
            dtype: DType::Bf16,
            form: Form::Int8,
            int4: Some(packing.expect("groups of 4 bits")),
            hadamard: false,
        };
        let kernels = kernels(Isa::Portable).unwrap();
        let pool = &mut ThreadPool::new(2).unwrap();
        let matrix = PackedMatrix::pack(&lanes, packing, kernels, pool).unwrap();
        let rows = (0..lanes.len()).map(|row| {
            let mut values = vec![f32::NAN; k];
            matrix.read_row(row, &mut values);
            values
        });
        rows.collect()
    }

    /// What groups say, which for those of blocks is tested beside them, and the magnitude of what it
    /// is the sum of.
    fn stored(weight: &Tensor, row: usize) -> Vec<(f32, f32)> {
        let mut groups = GroupedRow::default();
        weight.read_groups(row, &mut groups);
        let group_len = weight.group_format().unwrap().group_len;
        let values = groups.quants.iter().enumerate().map(|(i, q)| {
            let scale = groups.scales[i / group_len];
            let minimum = groups.minimums.get(i / group_len).copied().unwrap_or(0.0);
            let product = scale * f32::from(*q);
            (product + minimum, product.abs() + minimum.abs())
        });
        values.collect()
    }

    #[test]
    fn blocks_are_not_rounded_again() {
        let weights = checkpoint("llama-q4-gguf/model.gguf").weights().unwrap();
        let layer = &weights.layers[0];
        // Alone, and beside others with minimums; what Q4_K multiplies is no f16 any more.
        let alone = [(vec![&layer.q], 0.0), (vec![&layer.o], 0.0)];
        let others = [
            (vec![&layer.q, &layer.k, &layer.v], 0.0),
            (vec![&layer.down], 5e-4),
        ];
        for (parts, tolerance) in alone.into_iter().chain(others) {
            let k = parts[0].shape[1];
            let rows = packed(&parts, k, None);
            let expected = parts
                .iter()
                .flat_map(|part| (0..part.shape[0]).map(|row| stored(part, row)));
            for (row, (actual, expected)) in rows.iter().zip(expected).enumerate() {
                for (actual, (expected, magnitude)) in actual.iter().zip(expected) {
                    let error = (actual - expected).abs();
                    assert!(
                        error <= tolerance * magnitude,
                        "row {row}: {actual}, {expected}"
                    );
                }
            }
        }
    }

    /// Lengths that are no multiples of groups, and magnitudes that f16 has not.
    #[test]
    fn rounded_weights_are_within_a_step() {
        let mut weights = checkpoint("llama-mha-untied").weights().unwrap();
        let down = &mut weights.layers[0].down;
        let k = down.shape[1];
        assert_eq!((k, down.dtype), (96, DType::F32));
        for factor in [1.0, 1e-20, 1e20] {
            let values = down.bytes().as_chunks().0.iter();
            let values: Vec<f32> = values.map(|&x| f32::from_le_bytes(x) * factor).collect();
            let bytes = values.iter().flat_map(|x| x.to_le_bytes());
            let mut scaled = down.clone();
            scaled.range = 0..down.num_bytes();
            scaled.storage = std::sync::Arc::new(corella_model::Storage::Owned(bytes.collect()));
            for group_len in [32, 64, 128] {
                let packing = Some(Int4Packing::rounded(k, group_len));
                let rows = packed(&[&scaled], k, packing);
                for (actual, values) in rows.iter().zip(values.chunks(k)) {
                    for (actual, values) in actual.chunks(group_len).zip(values.chunks(group_len)) {
                        let most = values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                        for (actual, value) in actual.iter().zip(values) {
                            assert!((actual - value).abs() <= most / 7.0, "{actual} {value}");
                        }
                    }
                }
            }
        }
    }
}
