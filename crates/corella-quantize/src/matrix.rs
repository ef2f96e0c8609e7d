//! The quantisation of one matrix, in the tensors of the compressed-tensors format.

use std::sync::Arc;

use corella_model::{
    DType, PackedLayout, PackedParts, RowView, Scheme, Storage, StoredTensor, Tensor,
};
use half::{bf16, f16};
use safetensors::Dtype;

use crate::compensation::InverseFactor;
use crate::rounding::{Codes, Scale, value};

/// A matrix as integers.
pub struct QuantizedMatrix {
    scheme: Scheme,
    shape: [usize; 2],
    scale_dtype: DType,
    integers: Vec<u8>,
    scales: Vec<u8>,
    zeros: Option<Vec<u8>>,
}

/// The tensors that a matrix is stored as: the suffix after the matrix's name and a dot, the type and the shape, in the
/// order of `QuantizedMatrix::parts`.
pub fn part_shapes(
    scheme: Scheme,
    shape: [usize; 2],
    scale_dtype: DType,
) -> Vec<(&'static str, Dtype, Vec<usize>)> {
    let [num_rows, num_columns] = shape;
    let num_groups = num_groups(scheme, num_columns);
    let scales = (
        "weight_scale",
        stored_dtype(scale_dtype),
        vec![num_rows, num_groups],
    );
    if !scheme.is_packed {
        return vec![("weight", Dtype::I8, shape.to_vec()), scales];
    }
    let words = (num_columns * scheme.num_bits).div_ceil(32);
    let mut parts = vec![("weight_packed", Dtype::I32, vec![num_rows, words]), scales];
    if !scheme.symmetric {
        let shape = vec![num_rows.div_ceil(8), num_groups];
        parts.push(("weight_zero_point", Dtype::I32, shape));
    }
    parts.push(("weight_shape", Dtype::I64, vec![2]));
    parts
}

impl QuantizedMatrix {
    /// Rounds each weight of a matrix to the nearest integer. With `factor`, the weights that are rounded later
    /// compensate the error of the outputs. `Err` names a weight that is not finite.
    pub fn new(
        weight: &Tensor,
        scheme: Scheme,
        factor: Option<&InverseFactor>,
        num_threads: usize,
    ) -> Result<Self, String> {
        let [num_rows, num_columns] = [weight.shape[0], weight.shape[1]];
        let num_groups = num_groups(scheme, num_columns);
        let row_bytes = row_bytes(scheme, num_columns);
        let mut integers = vec![0; num_rows * row_bytes];
        let mut scales = vec![Scale::default(); num_rows * num_groups];
        let rows_each = num_rows.div_ceil(num_threads.max(1));
        std::thread::scope(|scope| {
            let parts = integers
                .chunks_mut(rows_each * row_bytes)
                .zip(scales.chunks_mut(rows_each * num_groups));
            let threads: Vec<_> = parts
                .enumerate()
                .map(|(part, (integers, scales))| {
                    let first = part * rows_each;
                    scope.spawn(move || {
                        quantize_rows(weight, first, scheme, factor, integers, scales)
                    })
                })
                .collect();
            let results = threads.into_iter().map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            results.collect::<Result<(), String>>()
        })?;
        Ok(Self {
            scheme,
            shape: [num_rows, num_columns],
            scale_dtype: weight.dtype,
            integers,
            zeros: (!scheme.symmetric).then(|| pack_zeros(&scales, num_rows, num_groups)),
            scales: encode(scales.iter().map(|scale| scale.scale), weight.dtype),
        })
    }

    /// For each tensor of the matrix, its suffix and its bytes. The tensor's name is the matrix's name, a dot and the
    /// suffix.
    pub fn parts(&self) -> Vec<(&'static str, Vec<u8>)> {
        let names = part_shapes(self.scheme, self.shape, self.scale_dtype);
        let parts = names.into_iter().map(|(name, ..)| {
            let bytes = match name {
                "weight_scale" => self.scales.clone(),
                "weight_zero_point" => self.zeros.clone().unwrap_or_default(),
                "weight_shape" => self.shape.map(|size| (size as i64).to_le_bytes()).concat(),
                _ => self.integers.clone(),
            };
            (name, bytes)
        });
        parts.collect()
    }

    /// The tensor that a reader of the folder gets.
    pub fn into_tensor(self) -> Tensor {
        let shapes = part_shapes(self.scheme, self.shape, self.scale_dtype);
        let stored = |index: usize, bytes: Vec<u8>| {
            let (_, dtype, shape) = shapes[index].clone();
            StoredTensor {
                range: 0..bytes.len(),
                storage: Arc::new(Storage::Owned(bytes)),
                dtype,
                shape,
            }
        };
        Tensor::of_integers(PackedParts {
            layout: match self.scheme.is_packed {
                true => PackedLayout::Rows,
                false => PackedLayout::Bytes,
            },
            shape: self.shape,
            view: RowView::whole(self.shape[0]),
            num_bits: self.scheme.num_bits,
            group_len: self.scheme.group_len.unwrap_or(self.shape[1]),
            integers: stored(0, self.integers),
            scales: stored(1, self.scales),
            zeros: self.zeros.map(|zeros| stored(2, zeros)),
            group_of: None,
        })
    }
}

fn num_groups(scheme: Scheme, num_columns: usize) -> usize {
    num_columns / scheme.group_len.unwrap_or(num_columns)
}

/// The size of one output's integers, in bytes.
fn row_bytes(scheme: Scheme, num_columns: usize) -> usize {
    match scheme.is_packed {
        true => (num_columns * scheme.num_bits).div_ceil(32) * 4,
        false => num_columns,
    }
}

/// The number of rows that are rounded together, and share the memory reads.
const ROWS_AT_ONCE: usize = 16;

/// Rounds rows from row `first` of the matrix on.
fn quantize_rows(
    weight: &Tensor,
    first: usize,
    scheme: Scheme,
    factor: Option<&InverseFactor>,
    integers: &mut [u8],
    scales: &mut [Scale],
) -> Result<(), String> {
    let num_columns = weight.shape[1];
    let group_len = scheme.group_len.unwrap_or(num_columns);
    let codes = Codes::of(scheme);
    let mut scratch = Vec::new();
    let mut rows = vec![0.0; ROWS_AT_ONCE * num_columns];
    let num_groups = num_columns / group_len;
    let row_bytes = row_bytes(scheme, num_columns);
    let batches = integers
        .chunks_mut(ROWS_AT_ONCE * row_bytes)
        .zip(scales.chunks_mut(ROWS_AT_ONCE * num_groups));
    for (batch, (integers, scales)) in batches.enumerate() {
        let first = first + batch * ROWS_AT_ONCE;
        let rows = &mut rows[..scales.len() / num_groups * num_columns];
        for (index, row) in rows.chunks_mut(num_columns).enumerate() {
            weight.read_row(first + index, &mut scratch, row);
            if let Some(at) = row.iter().position(|weight| !weight.is_finite()) {
                let output = first + index;
                return Err(format!("weight [{output}, {at}] is {}", row[at]));
            }
        }
        match factor {
            Some(factor) => factor.round_rows(&codes, group_len, weight.dtype, rows, scales),
            None => {
                for (group, scale) in rows.chunks_mut(group_len).zip(&mut *scales) {
                    *scale = codes.fit(group, weight.dtype);
                    for weight in group {
                        *weight = codes.code(*weight, *scale);
                    }
                }
            }
        }
        for (row, integers) in rows.chunks(num_columns).zip(integers.chunks_mut(row_bytes)) {
            if scheme.is_packed {
                pack_codes(row, scheme.num_bits, integers);
            } else {
                for (integer, code) in integers.iter_mut().zip(row) {
                    *integer = *code as u8 ^ 0x80;
                }
            }
        }
    }
    Ok(())
}

fn pack_codes(codes: &[f32], num_bits: usize, out: &mut [u8]) {
    if num_bits == 8 {
        for (byte, code) in out.iter_mut().zip(codes) {
            *byte = *code as u8;
        }
        return;
    }
    for (byte, pair) in out.iter_mut().zip(codes.chunks(2)) {
        let second = pair.get(1).map_or(0, |code| *code as u8);
        *byte = pair[0] as u8 | second << 4;
    }
}

/// Packs the zero points of eight outputs into a word, `[out / 8, groups]`.
fn pack_zeros(scales: &[Scale], num_rows: usize, num_groups: usize) -> Vec<u8> {
    let mut words = vec![0u32; num_rows.div_ceil(8) * num_groups];
    for (row, scales) in scales.chunks(num_groups).enumerate() {
        for (group, scale) in scales.iter().enumerate() {
            words[row / 8 * num_groups + group] |= (scale.zero as u32) << (row % 8 * 4);
        }
    }
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

fn encode(values: impl Iterator<Item = f32>, dtype: DType) -> Vec<u8> {
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::F16 => values
            .flat_map(|x| f16::from_f32(x).to_le_bytes())
            .collect(),
        DType::Bf16 => values
            .flat_map(|x| bf16::from_f32(x).to_le_bytes())
            .collect(),
    }
}

pub fn stored_dtype(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
    }
}

impl Default for Scale {
    fn default() -> Self {
        Self {
            scale: 1.0,
            zero: 0.0,
        }
    }
}

impl Scale {
    /// Replaces a weight by its code, and returns the rounding error.
    pub(crate) fn round(self, codes: &Codes, weight: &mut f32) -> f32 {
        let code = codes.code(*weight, self);
        let lost = *weight - value(code, self);
        *weight = code;
        lost
    }
}
