//! Finds the stored tensors of a quantised matrix, checks them against each other, and combines them.

use safetensors::Dtype;

use crate::json::quantization::Scheme;
use crate::tensor::packed_tensor::{PackedLayout, PackedParts, RowView, StoredTensor};
use crate::{Quantization, Tensor};

/// The tensors of one matrix. `suffix` follows the matrix's name and a dot, or an underscore where the matrix has no
/// module of its own.
pub trait Parts {
    /// Takes a tensor, which counts as used from then on.
    fn take(&mut self, suffix: &str) -> Option<StoredTensor>;
}

/// Combines the tensors of a stored matrix of shape `[out, in]` to a tensor with the rows of `view`, such as the rows
/// of one expert. `None` if the matrix is not stored as integers. `Err` names the wrong tensor and its defect.
pub fn find(
    quantization: &Quantization,
    num_experts: usize,
    shape: [usize; 2],
    view: RowView,
    parts: &mut impl Parts,
) -> Result<Option<Tensor>, String> {
    let parts = match quantization {
        Quantization::CompressedTensors(schemes) => compressed_tensors(schemes, shape, parts)?,
        Quantization::Gptq {
            group_len,
            zero_offset,
        } => {
            let layout = PackedLayout::Gptq {
                zero_offset: *zero_offset,
            };
            columns(layout, *group_len, shape, parts)?
        }
        Quantization::Awq { group_len } => columns(PackedLayout::Awq, *group_len, shape, parts)?,
        Quantization::Mxfp4 => mxfp4(num_experts, shape, parts)?,
    };
    Ok(parts.map(|parts| Tensor::of_integers(PackedParts { view, ..parts })))
}

fn compressed_tensors(
    schemes: &[Scheme],
    shape: [usize; 2],
    parts: &mut impl Parts,
) -> Result<Option<PackedParts>, String> {
    let [num_rows, num_columns] = shape;
    let Some((integers, num_bits)) = integers(shape, parts)? else {
        return Ok(None);
    };
    let is_packed = integers.dtype == Dtype::I32;
    let scales = expect("weight_scale", parts.take("weight_scale"))?;
    expect_type("weight_scale", &scales, FLOATS)?;
    let num_groups = num_groups(&scales, shape)?;
    let zeros = parts.take("weight_zero_point");
    let is_known = schemes.iter().any(|scheme| {
        let group_len = scheme.group_len.unwrap_or(num_columns);
        scheme.is_packed == is_packed
            && scheme.num_bits == num_bits
            && group_len * num_groups == num_columns
            && (scheme.symmetric || zeros.is_some())
    });
    if !is_known {
        return Err(format!(
            "{num_bits} bits and {num_groups} scales for the {num_columns} weights of an output{} \
             match no scheme of quantization_config.config_groups",
            match zeros {
                Some(_) => ", with zero points",
                None => "",
            }
        ));
    }
    let zeros = match zeros {
        Some(zeros) if num_bits == 8 && zeros.bytes().iter().all(|&byte| byte == 0) => None,
        Some(_) if num_bits == 8 => {
            return Err("weight_zero_point is not 0; with 8 bits it must be".into());
        }
        zeros => zeros,
    };
    if let Some(zeros) = &zeros {
        expect_type("weight_zero_point", zeros, &[Dtype::I32])?;
        expect_shape(
            "weight_zero_point",
            zeros,
            &[num_rows.div_ceil(8), num_groups],
        )?;
    }
    if let Some(stored) = parts.take("weight_shape") {
        check_stored_shape(&stored, shape)?;
    }
    let group_len = num_columns / num_groups;
    let group_of = match parts.take("weight_g_idx") {
        Some(indices) => group_indices("weight_g_idx", &indices, num_columns, group_len)?,
        None => None,
    };
    Ok(Some(PackedParts {
        layout: match is_packed {
            true => PackedLayout::Rows,
            false => PackedLayout::Bytes,
        },
        shape,
        view: RowView::whole(num_rows),
        num_bits,
        group_len,
        integers,
        scales,
        zeros,
        group_of,
    }))
}

/// Takes the integers of a matrix. Returns them with the number of bits of an integer.
fn integers(
    shape: [usize; 2],
    parts: &mut impl Parts,
) -> Result<Option<(StoredTensor, usize)>, String> {
    let [num_rows, num_columns] = shape;
    if let Some(words) = parts.take("weight_packed") {
        expect_type("weight_packed", &words, &[Dtype::I32])?;
        let bits_of = |bits: usize| [num_rows, (num_columns * bits).div_ceil(32)];
        let mut bits = [4, 8].into_iter();
        return match bits.find(|&bits| words.shape == bits_of(bits)) {
            Some(num_bits) => Ok(Some((words, num_bits))),
            None => Err(wrong_shape("weight_packed", &words, &bits_of(4))),
        };
    }
    let bytes = parts.take("weight");
    let Some(bytes) = bytes.filter(|bytes| bytes.dtype == Dtype::I8) else {
        return Ok(None);
    };
    expect_shape("weight", &bytes, &shape)?;
    Ok(Some((bytes, 8)))
}

/// The number of scales of one output.
fn num_groups(scales: &StoredTensor, [num_rows, num_columns]: [usize; 2]) -> Result<usize, String> {
    match scales.shape[..] {
        [rows] if rows == num_rows => Ok(1),
        [rows, groups] if rows == num_rows && groups > 0 && num_columns.is_multiple_of(groups) => {
            Ok(groups)
        }
        _ => {
            let should = "it should be [outputs] or [outputs, groups per output]";
            Err(format!(
                "weight_scale has shape {:?}; {should}",
                scales.shape
            ))
        }
    }
}

/// Combines the tensors of GPTQ and AWQ, whose columns are outputs.
fn columns(
    layout: PackedLayout,
    group_len: Option<usize>,
    shape: [usize; 2],
    parts: &mut impl Parts,
) -> Result<Option<PackedParts>, String> {
    const PER_WORD: usize = 8;
    let [num_rows, num_columns] = shape;
    let Some(integers) = parts.take("qweight") else {
        return Ok(None);
    };
    let group_len = group_len.unwrap_or(num_columns);
    for (what, len) in [("outputs", num_rows), ("inputs", num_columns)] {
        if !len.is_multiple_of(PER_WORD) {
            return Err(format!("{len} {what} are not a multiple of {PER_WORD}"));
        }
    }
    if !num_columns.is_multiple_of(group_len) {
        return Err(format!(
            "{num_columns} inputs are not a multiple of quantization_config.group_size, \
             {group_len}"
        ));
    }
    let num_groups = num_columns / group_len;
    expect_type("qweight", &integers, &[Dtype::I32])?;
    let words = match layout {
        PackedLayout::Awq => [num_columns, num_rows / PER_WORD],
        _ => [num_columns / PER_WORD, num_rows],
    };
    expect_shape("qweight", &integers, &words)?;
    let scales = expect("scales", parts.take("scales"))?;
    expect_type("scales", &scales, FLOATS)?;
    expect_shape("scales", &scales, &[num_groups, num_rows])?;
    let zeros = expect("qzeros", parts.take("qzeros"))?;
    expect_type("qzeros", &zeros, &[Dtype::I32])?;
    expect_shape("qzeros", &zeros, &[num_groups, num_rows / PER_WORD])?;
    let group_of = match parts.take("g_idx") {
        Some(indices) => group_indices("g_idx", &indices, num_columns, group_len)?,
        None => None,
    };
    Ok(Some(PackedParts {
        layout,
        shape,
        view: RowView::whole(num_rows),
        num_bits: 4,
        group_len,
        integers,
        scales,
        zeros: Some(zeros),
        group_of,
    }))
}

/// Combines the blocks and scales of experts' matrices.
fn mxfp4(
    num_experts: usize,
    [num_rows, num_columns]: [usize; 2],
    parts: &mut impl Parts,
) -> Result<Option<PackedParts>, String> {
    const GROUP_LEN: usize = 32;
    let Some(blocks) = parts.take("blocks") else {
        return Ok(None);
    };
    if !num_columns.is_multiple_of(GROUP_LEN) {
        return Err(format!(
            "{num_columns} inputs are not a multiple of {GROUP_LEN}"
        ));
    }
    let num_groups = num_columns / GROUP_LEN;
    expect_type("blocks", &blocks, &[Dtype::U8])?;
    let shape = [num_experts, num_rows, num_groups, GROUP_LEN / 2];
    expect_shape("blocks", &blocks, &shape)?;
    let scales = expect("scales", parts.take("scales"))?;
    expect_type("scales", &scales, &[Dtype::U8])?;
    expect_shape("scales", &scales, &shape[..3])?;
    let num_rows = num_experts * num_rows;
    Ok(Some(PackedParts {
        layout: PackedLayout::Mxfp4,
        shape: [num_rows, num_columns],
        view: RowView::whole(num_rows),
        num_bits: 4,
        group_len: GROUP_LEN,
        integers: blocks,
        scales,
        zeros: None,
        group_of: None,
    }))
}

const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

/// Reads the group of each input; `None` if groups are contiguous and in order.
fn group_indices(
    suffix: &str,
    indices: &StoredTensor,
    num_columns: usize,
    group_len: usize,
) -> Result<Option<Vec<u32>>, String> {
    expect_type(suffix, indices, &[Dtype::I32])?;
    expect_shape(suffix, indices, &[num_columns])?;
    let num_groups = num_columns / group_len;
    let group_of: Vec<u32> = (0..num_columns).map(|k| indices.word(k)).collect();
    if let Some(wrong) = group_of.iter().find(|&&group| group as usize >= num_groups) {
        let wrong = *wrong as i32;
        return Err(format!("{suffix} names group {wrong} of {num_groups}"));
    }
    let mut in_order = group_of.iter().enumerate();
    let is_in_order = in_order.all(|(k, &group)| group as usize == k / group_len);
    Ok((!is_in_order).then_some(group_of))
}

fn check_stored_shape(stored: &StoredTensor, shape: [usize; 2]) -> Result<(), String> {
    expect_type("weight_shape", stored, &[Dtype::I32, Dtype::I64])?;
    expect_shape("weight_shape", stored, &[2])?;
    let words = match stored.dtype {
        Dtype::I32 => [stored.word(0), stored.word(1)],
        // The upper halves can be ignored: sizes are below 2^31, see `JsonObject::size`.
        _ => [stored.word(0), stored.word(2)],
    };
    let found = words.map(|word| word as usize);
    match found == shape {
        true => Ok(()),
        false => Err(format!(
            "weight_shape says {found:?}; it should be {shape:?}"
        )),
    }
}

fn expect(suffix: &str, tensor: Option<StoredTensor>) -> Result<StoredTensor, String> {
    tensor.ok_or_else(|| format!("{suffix} is missing"))
}

fn expect_type(suffix: &str, tensor: &StoredTensor, supported: &[Dtype]) -> Result<(), String> {
    if supported.contains(&tensor.dtype) {
        return Ok(());
    }
    let names: Vec<_> = supported.iter().map(|dtype| format!("{dtype:?}")).collect();
    Err(format!(
        "{suffix} is {:?}; supported are {}",
        tensor.dtype,
        names.join(", ")
    ))
}

fn expect_shape(suffix: &str, tensor: &StoredTensor, shape: &[usize]) -> Result<(), String> {
    match tensor.shape == shape {
        true => Ok(()),
        false => Err(wrong_shape(suffix, tensor, shape)),
    }
}

fn wrong_shape(suffix: &str, tensor: &StoredTensor, shape: &[usize]) -> String {
    format!(
        "{suffix} has shape {:?}; it should be {shape:?}",
        tensor.shape
    )
}

#[cfg(test)]
mod tests;
