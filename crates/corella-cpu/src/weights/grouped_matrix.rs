//! Packing of weights quantised in groups: integers and scales stored in the checkpoint, or computed here.
//!
//! Group scales are stored as f16, and each output channel has a power of two as another factor, so that scales have
//! the range of f32. Scales in f16 in the checkpoint stay exact. The rounding of other scales adds less than a
//! thousandth of the error of 4-bit weights.

use corella_model::{FP4_LEVELS, GroupFormat, GroupedRow};
use half::f16;

use crate::kernels::Kernels;
use crate::kernels::grouped::{CHUNK_K, GroupedShape, LANE_F16_BYTES};

use super::lane::{Lane, decode_lane, round_to_bytes};

/// The source of a matrix's groups, and their shape in the panels.
#[derive(Clone, Copy, Debug)]
pub struct GroupedPacking {
    pub shape: GroupedShape,
    /// Whether the checkpoint's integers and scales are kept. Otherwise weights are quantised here.
    pub is_stored: bool,
}

impl GroupedPacking {
    /// Quantises to nearest, with one scale per `group_len` weights of an output channel: 32, 64 or 128.
    pub fn rounded(bits: usize, k: usize, group_len: usize) -> Self {
        assert!(matches!(bits, 4 | 8) && matches!(group_len, 32 | 64 | 128));
        Self {
            shape: GroupedShape {
                bits,
                num_chunks: k.div_ceil(CHUNK_K),
                group_chunks: group_len / CHUNK_K,
                has_minimum: false,
                is_fp4: false,
            },
            is_stored: false,
        }
    }

    /// Keeps the integers of the checkpoint, given the formats of the combined matrices. Returns `None` if the integers
    /// of a matrix do not have `bits` bits, if only some matrices have FP4 levels, or if the length of a group is not a
    /// multiple of 32.
    pub fn stored(
        bits: usize,
        parts: impl Iterator<Item = Option<GroupFormat>>,
        k: usize,
    ) -> Option<Self> {
        let mut parts = parts.peekable();
        let first = parts.peek().copied().flatten();
        let mut shape = GroupedShape {
            bits,
            num_chunks: k.div_ceil(CHUNK_K),
            group_chunks: MAX_GROUP_CHUNKS,
            has_minimum: false,
            is_fp4: first.is_some_and(|format| format.is_fp4),
        };
        for format in parts {
            let format = format?;
            shape.group_chunks = shape.group_chunks.min(group_chunks(format, k)?);
            shape.has_minimum |= format.has_minimum;
            if format.bits != bits || format.is_fp4 != shape.is_fp4 {
                return None;
            }
        }
        Some(Self {
            shape,
            is_stored: true,
        })
    }

    /// Fills a panel that is all zeros, and writes for each lane the factor of its group scales. Weights quantised here
    /// are first multiplied by the Hadamard matrix if `hadamard` is set.
    pub fn pack_panel(
        &self,
        lanes: &[Option<Lane<'_>>],
        k: usize,
        hadamard: bool,
        kernels: &Kernels,
        factors: &mut [f32],
        out: &mut [u8],
    ) {
        let num_groups = self.shape.num_groups();
        let group_len = self.shape.group_chunks * CHUNK_K;
        let padded = num_groups * group_len;
        let mut packed = PackedLane {
            q: vec![zero(self.shape); padded],
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
                decode_lane(source, hadamard, kernels, &mut scratch, &mut row[..k]);
                packed.round(&row, self.shape, kernels);
            }
            factors[lane] = packed.write(self.shape, lane, out);
        }
    }
}

/// The largest number of chunks in a group of a panel.
const MAX_GROUP_CHUNKS: usize = 4;
pub const MAX_GROUP_LEN: usize = MAX_GROUP_CHUNKS * CHUNK_K;

/// The number of chunks in a panel's groups, each of which lies within one group of the checkpoint.
fn group_chunks(format: GroupFormat, k: usize) -> Option<usize> {
    let mut lens = [MAX_GROUP_CHUNKS, 2, 1].into_iter();
    lens.find(|chunks| format.group_len >= k || format.group_len.is_multiple_of(chunks * CHUNK_K))
}

/// One output channel before it is written to a panel.
struct PackedLane {
    /// The integers in the panels' form, offset to be unsigned.
    q: Vec<u8>,
    scales: Vec<f32>,
    minimums: Vec<f32>,
}

impl PackedLane {
    fn read(&mut self, source: &Lane<'_>, k: usize, shape: GroupedShape, stored: &mut GroupedRow) {
        let format = source.weight.group_format().expect("stored in groups");
        source.weight.read_groups(source.row, stored);
        assert_eq!(stored.quants.len(), k);
        let lowest = match format.has_minimum {
            true => 0,
            false => shape.middle(),
        };
        for (q, stored) in self.q.iter_mut().zip(&stored.quants) {
            *q = match shape.is_fp4 {
                true => fp4_code(*stored),
                false => (i32::from(*stored) + lowest) as u8,
            };
        }
        for group in 0..shape.num_groups() {
            let from = group * shape.group_chunks * CHUNK_K / format.group_len;
            let scale = stored.scales[from];
            self.scales[group] = scale;
            self.minimums[group] = match stored.minimums.get(from) {
                Some(minimum) => *minimum,
                // Other lanes of the panel have minimums, so this one needs them too.
                None => -(lowest as f32) * scale,
            };
        }
    }

    /// Quantises whole groups: 8-bit ones by their largest magnitude, 4-bit ones with the least error.
    fn round(&mut self, row: &[f32], shape: GroupedShape, kernels: &Kernels) {
        let group_len = shape.group_chunks * CHUNK_K;
        if shape.bits == 4 {
            let (q, scales) = (self.q.as_mut_ptr(), self.scales.as_mut_ptr());
            // SAFETY: the row consists of whole groups with a scale each.
            unsafe {
                (kernels.quantise_groups)(row.as_ptr(), self.scales.len(), group_len, q, scales)
            };
            return;
        }
        let groups = row.chunks(group_len).zip(self.q.chunks_mut(group_len));
        for ((row, q), scale) in groups.zip(&mut self.scales) {
            // SAFETY: the numbers of weights and integers are equal.
            *scale = unsafe { round_to_bytes(row, kernels, q.as_mut_ptr().cast()) };
            for q in q {
                *q ^= 0x80;
            }
        }
    }

    /// Writes the lane into a panel. Returns the factor by which its stored scales and minimums were divided.
    fn write(&self, shape: GroupedShape, lane: usize, out: &mut [u8]) -> f32 {
        let eights = self.q.as_chunks::<8>().0.iter();
        for (i, eight) in eights.take(shape.num_chunks * CHUNK_K / 8).enumerate() {
            let eight = u64::from_le_bytes(*eight);
            let mut put = |k: usize, bytes: u32| {
                let (at, _) = shape.position(k, lane);
                out[at..at + 4].copy_from_slice(&bytes.to_le_bytes());
            };
            if shape.bits == 4 {
                put(i * 8, (eight | eight >> 28) as u32);
            } else {
                put(i * 8, eight as u32);
                put(i * 8 + 4, (eight >> 32) as u32);
            }
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

/// The code of 0 in a panel without minimums.
fn zero(shape: GroupedShape) -> u8 {
    match shape.is_fp4 {
        true => fp4_code(0),
        false => shape.middle() as u8,
    }
}

/// The code of a level.
fn fp4_code(level: i8) -> u8 {
    const LARGEST: i8 = 12;
    static CODES: [u8; 2 * LARGEST as usize + 1] = {
        let mut codes = [0; 2 * LARGEST as usize + 1];
        let mut code = FP4_LEVELS.len();
        // 0 has two codes, and gets the lower one.
        while code > 0 {
            code -= 1;
            codes[(FP4_LEVELS[code] + LARGEST) as usize] = code as u8;
        }
        codes
    };
    CODES[(level + LARGEST) as usize]
}

/// The power of two that brings `largest` to the upper end of f16's range.
fn factor(largest: f32) -> f32 {
    let power = f32::from_bits(largest.to_bits() & f32::INFINITY.to_bits());
    let factor = power / 16384.0;
    if factor > 0.0 && factor.is_finite() {
        factor
    } else {
        1.0
    }
}

/// Decodes the weights of one lane of a panel.
pub fn read_lane(panel: &[u8], shape: GroupedShape, lane: usize, factor: f32, out: &mut [f32]) {
    let scale_at = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32() * factor;
    let group_len = shape.group_chunks * CHUNK_K;
    for (group, out) in out.chunks_mut(group_len).enumerate() {
        let at = shape.scale_position(group, lane);
        let scale = scale_at(at);
        let minimum = shape.has_minimum.then(|| scale_at(at + LANE_F16_BYTES));
        for (i, value) in out.iter_mut().enumerate() {
            let (at, bit) = shape.position(group * group_len + i, lane);
            let q = i32::from(panel[at]) >> bit & ((1 << shape.bits) - 1);
            *value = match minimum {
                Some(minimum) => q as f32 * scale + minimum,
                None if shape.is_fp4 => f32::from(FP4_LEVELS[q as usize]) * scale,
                None => (q - shape.middle()) as f32 * scale,
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use corella_model::{Checkpoint, DType, LayerTensor, Tensor};

    use super::*;
    use crate::kernels::{Form, Isa, kernels};
    use crate::system::ThreadPool;
    use crate::weights::PackedMatrix;
    use crate::weights::panel::Packing;

    fn checkpoint(name: &str) -> Checkpoint {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        Checkpoint::open(golden.join(name)).unwrap()
    }

    /// Packs all rows of the parts, in their order, and reads them back.
    fn packed(parts: &[&Tensor], k: usize, packing: Option<GroupedPacking>) -> Vec<Vec<f32>> {
        let lanes = parts.iter().flat_map(|weight| {
            let rows = 0..weight.shape[0];
            rows.map(move |row| {
                let bias = None;
                Some(Lane { weight, bias, row })
            })
        });
        let lanes: Vec<_> = lanes.collect();
        let formats = || parts.iter().map(|weight| weight.group_format());
        let stored = |bits| GroupedPacking::stored(bits, formats(), k);
        let packing = packing.or_else(|| stored(4)).or_else(|| stored(8));
        let packing = Packing {
            k,
            dtype: DType::Bf16,
            form: Form::Int8,
            groups: Some(packing.expect("groups")),
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

    /// The weights of a row as its groups encode them. Each has a second number: the sum of the magnitudes of the
    /// weight's terms. The decoding of blocks is tested beside their formats.
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
    fn groups_are_not_rounded_again() {
        let weights = checkpoint("llama-q4-gguf/model.gguf").weights().unwrap();
        let layer = &weights.layers[0];
        let bytes = checkpoint("../quantized/int8-g32").weights().unwrap();
        // Lanes with and without minimums in one panel. The scales of Q4_K are products, which f16 cannot hold.
        let [q, k, v, o] = [
            LayerTensor::Q,
            LayerTensor::K,
            LayerTensor::V,
            LayerTensor::O,
        ]
        .map(|matrix| &layer[matrix]);
        let alone = [(vec![q], 0.0), (vec![o], 0.0)];
        let others = [
            (vec![q, k, v], 0.0),
            (vec![&layer[LayerTensor::DOWN]], 5e-4),
            // Scales in f32, which are rounded to f16.
            (vec![&bytes.layers[0][LayerTensor::Q]], 5e-4),
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

    /// Covers lengths that are not multiples of the group length, and magnitudes that f16 cannot hold.
    #[test]
    fn rounded_weights_are_within_a_step() {
        let weights = checkpoint("llama-mha-untied").weights().unwrap();
        let down = &weights.layers[0][LayerTensor::DOWN];
        let k = down.shape[1];
        assert_eq!((k, down.dtype), (96, DType::F32));
        for factor in [1.0, 1e-20, 1e20] {
            let values = down.bytes().as_chunks().0.iter();
            let values: Vec<f32> = values.map(|&x| f32::from_le_bytes(x) * factor).collect();
            let bytes = values.iter().flat_map(|x| x.to_le_bytes());
            let mut scaled = down.clone();
            scaled.range = 0..down.num_bytes();
            scaled.storage = std::sync::Arc::new(corella_model::Storage::Owned(bytes.collect()));
            for (bits, group_len) in [4, 8]
                .into_iter()
                .flat_map(|b| [32, 64, 128].map(|g| (b, g)))
            {
                let packing = Some(GroupedPacking::rounded(bits, k, group_len));
                let steps = ((1 << (bits - 1)) - 1) as f32;
                let rows = packed(&[&scaled], k, packing);
                for (actual, values) in rows.iter().zip(values.chunks(k)) {
                    for (actual, values) in actual.chunks(group_len).zip(values.chunks(group_len)) {
                        let most = values.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                        for (actual, value) in actual.iter().zip(values) {
                            assert!((actual - value).abs() <= most / steps, "{actual} {value}");
                        }
                    }
                }
            }
        }
    }
}
