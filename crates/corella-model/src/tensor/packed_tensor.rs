//! Matrices `[out, in]` that a folder stores as integers with group-wise scales, in the layouts of
//! compressed-tensors, GPTQ and AWQ, or in MXFP4.
//!
//! Such a matrix is read like any other tensor: as rows in bf16 for any kernel, or as integers and
//! scales for kernels that compute with them. `packed_matrix.rs` assembles it and checks its parts.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use safetensors::Dtype;

use crate::number::group_format::{FP4_LEVELS, fp4_scale};
use crate::tensor::block_tensor::RowOrder;
use crate::tensor::file_bytes::FileBytes;
use crate::{DType, GroupFormat, GroupedRow};

/// A tensor of any type in its stored form.
#[derive(Clone)]
pub struct StoredTensor {
    pub storage: Arc<dyn FileBytes>,
    pub range: Range<usize>,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl StoredTensor {
    pub fn bytes(&self) -> &[u8] {
        &self.storage.bytes()[self.range.clone()]
    }

    /// 32-bit word `index` of the tensor.
    pub(crate) fn word(&self, index: usize) -> u32 {
        let bytes = self.bytes()[index * 4..].first_chunk();
        u32::from_le_bytes(*bytes.expect("the index is beyond the tensor"))
    }

    fn number(&self, index: usize) -> f32 {
        let at = |size: usize| &self.bytes()[index * size..][..size];
        match self.dtype {
            Dtype::F32 => f32::from_bits(self.word(index)),
            Dtype::F16 => f16::from_le_bytes([at(2)[0], at(2)[1]]).to_f32(),
            Dtype::BF16 => bf16::from_le_bytes([at(2)[0], at(2)[1]]).to_f32(),
            Dtype::U8 => fp4_scale(self.bytes()[index]),
            other => unreachable!("scales cannot have type {other:?}"),
        }
    }
}

/// The layout of integers, zero points and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PackedLayout {
    /// compressed-tensors `int-quantized`: one byte per weight, row by row.
    Bytes,
    /// compressed-tensors `pack-quantized`: 32-bit words along a row, with the smallest integer
    /// stored as 0. Zero points are packed along the outputs, `[out / 8, groups]`; scales are
    /// `[out, groups]`.
    Rows,
    /// GPTQ: eight inputs of an output per word, `[in / 8, out]`. Zero points of eight outputs per
    /// word, `[groups, out / 8]`, are stored reduced by `zero_offset`; scales are `[groups, out]`.
    Gptq { zero_offset: u32 },
    /// AWQ: eight outputs of an input per word, `[in, out / 8]`, with the even outputs in the lower half of the word.
    /// Zero points are packed in the same way, `[groups, out / 8]`; scales are `[groups, out]`.
    Awq,
    /// gpt-oss: 4-bit floats along a row, the first of two in the lower half of a byte. Scales are
    /// powers of two, `[out, groups]`.
    Mxfp4,
}

/// A matrix of integers. Kernels that compute with integers read groups; all others read rows of
/// bf16.
pub struct PackedTensor {
    layout: PackedLayout,
    /// The number of stored rows. The tensor may have only some of them, in another order.
    num_rows: usize,
    view: RowView,
    num_columns: usize,
    num_bits: usize,
    group_len: usize,
    has_minimum: bool,
    integers: StoredTensor,
    scales: StoredTensor,
    zeros: Option<StoredTensor>,
    /// The group of each input, if groups are not contiguous and in order.
    group_of: Option<Vec<u32>>,
    values: OnceLock<Vec<u8>>,
}

/// The rows of a stored matrix that belong to a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowView {
    pub first: usize,
    pub num_rows: usize,
    pub order: RowOrder,
}

impl RowView {
    pub fn whole(num_rows: usize) -> Self {
        Self {
            first: 0,
            num_rows,
            order: RowOrder::AsStored,
        }
    }

    /// The stored position of a row.
    fn stored(self, row: usize) -> usize {
        self.first + self.order.stored(row)
    }
}

/// The input of `Tensor::of_integers`. `packed_matrix.rs` has checked that the shapes match.
pub struct PackedParts {
    pub layout: PackedLayout,
    /// The shape of the stored matrix.
    pub shape: [usize; 2],
    pub view: RowView,
    pub num_bits: usize,
    pub group_len: usize,
    pub integers: StoredTensor,
    pub scales: StoredTensor,
    pub zeros: Option<StoredTensor>,
    pub group_of: Option<Vec<u32>>,
}

/// The 4-bit integer that encodes 0 in symmetric weights.
const MIDDLE: u32 = 8;

impl PackedTensor {
    pub(crate) fn new(parts: PackedParts) -> Self {
        let [num_rows, num_columns] = parts.shape;
        let mut packed = Self {
            layout: parts.layout,
            num_rows,
            view: parts.view,
            num_columns,
            num_bits: parts.num_bits,
            group_len: parts.group_len,
            has_minimum: false,
            integers: parts.integers,
            scales: parts.scales,
            zeros: parts.zeros,
            group_of: parts.group_of,
            values: OnceLock::new(),
        };
        // GPTQ and AWQ store zero points for symmetric weights too, all of them equal to `MIDDLE`.
        packed.has_minimum = packed.zeros.is_some()
            && (0..num_rows).any(|row| {
                let mut groups = 0..packed.num_groups();
                groups.any(|group| packed.zero(row, group) != MIDDLE)
            });
        packed
    }

    /// The format of the groups; `None` if groups are not contiguous and in order.
    pub fn group_format(&self) -> Option<GroupFormat> {
        self.group_of.is_none().then_some(GroupFormat {
            bits: self.num_bits,
            group_len: self.group_len,
            has_minimum: self.has_minimum,
            is_fp4: self.layout == PackedLayout::Mxfp4,
        })
    }

    fn num_groups(&self) -> usize {
        self.num_columns / self.group_len
    }

    /// Reads the integers, scales and minimums of a row.
    pub fn read_groups(&self, row: usize, out: &mut GroupedRow) {
        let row = self.view.stored(row);
        out.quants.resize(self.num_columns, 0);
        self.read_integers(row, &mut out.quants);
        let groups = 0..self.num_groups();
        out.scales.clear();
        out.scales
            .extend(groups.clone().map(|group| self.scale(row, group)));
        out.minimums.clear();
        if self.has_minimum {
            // The product is exact if scales have 16 bits.
            out.minimums.extend(
                groups
                    .zip(&out.scales)
                    .map(|(group, scale)| -scale * self.zero(row, group) as f32),
            );
        }
    }

    /// Reads a row's integers. They are signed for symmetric weights, and unsigned otherwise.
    fn read_integers(&self, row: usize, out: &mut [i8]) {
        let middle = match (self.num_bits, self.has_minimum) {
            (4, true) => 0,
            (4, false) => MIDDLE as i8,
            // Flipping the highest bit of a byte subtracts 128.
            _ => i8::MIN,
        };
        let bytes = self.integers.bytes();
        match self.layout {
            PackedLayout::Bytes => {
                let row = &bytes[row * out.len()..][..out.len()];
                for (value, byte) in out.iter_mut().zip(row) {
                    *value = *byte as i8;
                }
            }
            PackedLayout::Rows => {
                let row_bytes = bytes.len() / self.num_rows;
                let row = &bytes[row * row_bytes..][..row_bytes];
                if self.num_bits == 8 {
                    for (value, byte) in out.iter_mut().zip(row) {
                        *value = *byte as i8 ^ middle;
                    }
                    return;
                }
                for (pair, byte) in out.chunks_mut(2).zip(row) {
                    pair[0] = (byte & 15) as i8 - middle;
                    if let Some(second) = pair.get_mut(1) {
                        *second = (byte >> 4) as i8 - middle;
                    }
                }
            }
            PackedLayout::Mxfp4 => {
                let row = &bytes[row * out.len() / 2..][..out.len() / 2];
                for (pair, byte) in out.as_chunks_mut().0.iter_mut().zip(row) {
                    *pair = [byte & 15, byte >> 4].map(|code| FP4_LEVELS[usize::from(code)]);
                }
            }
            PackedLayout::Gptq { .. } => {
                for (index, values) in out.chunks_mut(8).enumerate() {
                    let word = self.integers.word(index * self.num_rows + row);
                    for (i, value) in values.iter_mut().enumerate() {
                        *value = (word >> (4 * i) & 15) as i8 - middle;
                    }
                }
            }
            PackedLayout::Awq => {
                let shift = awq_shift(row);
                for (k, value) in out.iter_mut().enumerate() {
                    let word = self.integers.word(k * self.num_rows / 8 + row / 8);
                    *value = (word >> shift & 15) as i8 - middle;
                }
            }
        }
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        self.scales.number(match self.layout {
            PackedLayout::Bytes | PackedLayout::Rows | PackedLayout::Mxfp4 => {
                row * self.num_groups() + group
            }
            PackedLayout::Gptq { .. } | PackedLayout::Awq => group * self.num_rows + row,
        })
    }

    /// The integer that encodes 0, as a distance from the smallest integer.
    fn zero(&self, row: usize, group: usize) -> u32 {
        let Some(zeros) = &self.zeros else {
            return MIDDLE;
        };
        let beside = group * (self.num_rows / 8) + row / 8;
        match self.layout {
            PackedLayout::Bytes | PackedLayout::Mxfp4 => MIDDLE,
            PackedLayout::Rows => {
                let word = zeros.word(row / 8 * self.num_groups() + group);
                word >> (row % 8 * 4) & 15
            }
            PackedLayout::Gptq { zero_offset } => {
                let word = zeros.word(beside).wrapping_add(zero_offset * 0x1111_1111);
                word >> (row % 8 * 4) & 15
            }
            PackedLayout::Awq => zeros.word(beside) >> awq_shift(row) & 15,
        }
    }

    /// The size of the integers, scales and zero points of the tensor's rows, in bytes.
    pub fn stored_bytes(&self) -> usize {
        let parts = [
            Some(&self.integers),
            Some(&self.scales),
            self.zeros.as_ref(),
        ];
        let whole: usize = parts
            .into_iter()
            .flatten()
            .map(|part| part.range.len())
            .sum();
        whole * self.view.num_rows / self.num_rows
    }

    /// The size of a row in bf16, in bytes.
    pub fn row_bytes(&self) -> usize {
        self.num_columns * DType::Bf16.size()
    }

    /// Writes some rows in bf16, one after the other.
    pub fn write_rows(&self, rows: Range<usize>, out: &mut [u8]) {
        let mut groups = GroupedRow::default();
        for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes())) {
            self.read_groups(row, &mut groups);
            let out = out.as_chunks_mut::<2>().0;
            if let Some(group_of) = &self.group_of {
                for ((value, quant), &group) in out.iter_mut().zip(&groups.quants).zip(group_of) {
                    *value = groups.value(*quant, group as usize);
                }
                continue;
            }
            let quants = groups.quants.chunks(self.group_len);
            for (group, (out, quants)) in out.chunks_mut(self.group_len).zip(quants).enumerate() {
                for (value, quant) in out.iter_mut().zip(quants) {
                    *value = groups.value(*quant, group);
                }
            }
        }
    }

    pub(crate) fn values(&self) -> &[u8] {
        self.values.get_or_init(|| {
            let mut values = vec![0; self.view.num_rows * self.row_bytes()];
            self.write_rows(0..self.view.num_rows, &mut values);
            values
        })
    }

    pub(crate) fn release(&self) {
        for part in [&self.integers, &self.scales] {
            part.storage.release(part.range.clone());
        }
    }
}

impl GroupedRow {
    fn value(&self, quant: i8, group: usize) -> [u8; 2] {
        let minimum = self.minimums.get(group).copied().unwrap_or(0.0);
        let value = f32::from(quant) * self.scales[group] + minimum;
        bf16::from_f32(value).to_le_bytes()
    }
}

/// The bit position of an output within its word: AWQ stores outputs 0, 2, 4, 6, 1, 3, 5, 7 from
/// the lowest bits on.
fn awq_shift(row: usize) -> usize {
    4 * (row % 8 / 2 + row % 2 * 4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Storage, Tensor};

    fn stored(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> StoredTensor {
        StoredTensor {
            range: 0..bytes.len(),
            storage: Arc::new(Storage::Owned(bytes)),
            dtype,
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn a_tensor_may_be_some_rows_of_a_matrix() {
        // Row r has weights of r, times a scale of 2.
        let integers: Vec<u8> = (0..6).flat_map(|row| [row, row]).collect();
        let scales = [2f32; 6].into_iter().flat_map(f32::to_le_bytes).collect();
        let tensor = |view| {
            Tensor::of_integers(PackedParts {
                layout: PackedLayout::Bytes,
                shape: [6, 2],
                view,
                num_bits: 8,
                group_len: 2,
                integers: stored(Dtype::I8, &[6, 2], integers.clone()),
                scales: stored(Dtype::F32, &[6, 1], Vec::clone(&scales)),
                zeros: None,
                group_of: None,
            })
        };
        let rows = |tensor: &Tensor| -> Vec<f32> {
            let read = |row| {
                let mut values = [0.0; 2];
                tensor.read_row(row, &mut Vec::new(), &mut values);
                assert_eq!(values[0], values[1]);
                values[0]
            };
            (0..tensor.shape[0]).map(read).collect()
        };
        let part = tensor(RowView {
            first: 1,
            num_rows: 3,
            order: RowOrder::AsStored,
        });
        assert_eq!(part.shape, [3, 2]);
        assert_eq!(rows(&part), [2.0, 4.0, 6.0]);
        let values = part.bytes().as_chunks().0.iter();
        let values: Vec<f32> = values.map(|&x| bf16::from_le_bytes(x).to_f32()).collect();
        assert_eq!(values, [2.0, 2.0, 4.0, 4.0, 6.0, 6.0]);
        let turned = tensor(RowView {
            first: 2,
            num_rows: 4,
            order: RowOrder::Heads {
                head_dim: 4,
                num_dims: 4,
                are_neighbours: true,
            },
        });
        assert_eq!(rows(&turned), [4.0, 8.0, 6.0, 10.0]);
    }
}
