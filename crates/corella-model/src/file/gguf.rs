//! GGUF files: metadata, a list of tensors, and their bytes. One file, or all parts of a split file, are a whole
//! checkpoint.
//!
//! Every number in the file is checked against the file's length before it is used, so that a
//! damaged or hostile file causes one error and no large allocation.
//!
//! A file is presented as a folder: its metadata becomes the configuration and the two tokenizer files, and its tensors
//! are weights under their own names. Blocks are dequantised row by row where an executor packs them, or their integers
//! and scales are used unchanged (`group_format.rs`).

mod cursor;
mod metadata;
mod pre_tokenizer;
mod special_token;
mod split;
mod tokenizer;

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use self::cursor::Cursor;
use crate::file::file_tensor::{FileTensor, TensorSource};
use crate::{BlockFormat, CheckpointError, Storage};

pub use self::metadata::Metadata;
pub use self::special_token::{TOKENS, end_tokens};
pub use self::split::{gguf_model_name, name_of_first_part};
pub use self::tokenizer::{tokenizer_config_json, tokenizer_json};

/// An open GGUF file. If it is the first of several parts, it includes the tensors of the other parts.
pub struct GgufFile {
    /// The file's name in error messages.
    label: String,
    pub metadata: Metadata,
    tensors: HashMap<String, TensorInfo>,
    other_parts: Vec<PathBuf>,
}

struct TensorInfo {
    storage: Arc<Storage>,
    /// The shape as in safetensors: the last size is the length of a row.
    shape: Vec<usize>,
    format: BlockFormat,
    range: Range<usize>,
}

pub const MAGIC: [u8; 4] = *b"GGUF";
const DEFAULT_ALIGNMENT: usize = 32;
const MAX_DIMENSIONS: u32 = 4;
/// The largest number of tensors. A model with a thousand layers has fewer.
const MAX_TENSORS: u64 = 1 << 17;
/// The size of the smallest entry: the length of the name, a name of one byte, the number of dimensions, one dimension,
/// a type and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 1 + 4 + 8 + 4 + 8;

impl GgufFile {
    /// Reads everything except the tensors' bytes.
    pub fn open(label: String, storage: Storage) -> Result<Self, CheckpointError> {
        match Self::parse(&label, Arc::new(storage)) {
            Ok(file) => Ok(file),
            Err(problem) => Err(CheckpointError::new(label, problem)),
        }
    }

    fn parse(label: &str, storage: Arc<Storage>) -> Result<Self, String> {
        let mut cursor = Cursor::new(storage.bytes());
        if !storage.bytes().starts_with(&MAGIC) {
            return Err(match storage.bytes().len() {
                0..4 => format!("is not a GGUF file: it has {} bytes", storage.bytes().len()),
                _ => "is not a GGUF file: it does not begin with \"GGUF\"".into(),
            });
        }
        cursor.take(MAGIC.len() as u64, "the header")?;
        let version = cursor.u32("the header")?;
        match version {
            2 | 3 => {}
            _ if version.swap_bytes() < 1 << 16 => {
                return Err("is a big-endian GGUF file; little-endian ones are supported".into());
            }
            _ => return Err(format!("is GGUF version {version}; supported are 2 and 3")),
        }
        let num_tensors = cursor.u64("the header")?;
        let num_keys = cursor.u64("the header")?;
        let metadata = Metadata::parse(label, &storage, &mut cursor, num_keys)?;
        let tensors = parse_tensors(&storage, &metadata, &mut cursor, num_tensors)?;
        Ok(Self {
            label: label.to_owned(),
            metadata,
            tensors,
            other_parts: Vec::new(),
        })
    }

    pub fn label(&self) -> &str {
        &self.label
    }

    /// The files of the model.
    pub fn paths(&self) -> Vec<PathBuf> {
        let mut paths = vec![PathBuf::from(&self.label)];
        paths.extend(self.other_parts.iter().cloned());
        paths
    }

    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|info| &*info.shape)
    }

    /// The values of a small tensor of f32.
    pub fn numbers(&self, name: &str) -> Result<Option<Vec<f32>>, CheckpointError> {
        let Some(info) = self.tensors.get(name) else {
            return Ok(None);
        };
        if info.format != BlockFormat::F32 {
            let problem = format!("tensor {name} is {}; it should be F32", info.format.name());
            return Err(CheckpointError::new(&self.label, problem));
        }
        let numbers = info.storage.bytes()[info.range.clone()].as_chunks().0;
        Ok(Some(
            numbers.iter().map(|&n| f32::from_le_bytes(n)).collect(),
        ))
    }
}

impl TensorSource for GgufFile {
    fn file(&self) -> &str {
        &self.label
    }

    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn sizes(&self) -> Vec<(usize, usize)> {
        let tensors = self.tensors.values();
        tensors
            .map(|info| (info.shape.iter().product(), info.range.len()))
            .collect()
    }

    fn tensor(&self, name: &str) -> Result<Option<FileTensor>, CheckpointError> {
        let tensor = self.tensors.get(name).map(|info| FileTensor {
            storage: info.storage.clone(),
            range: info.range.clone(),
            format: info.format,
            shape: info.shape.clone(),
        });
        Ok(tensor)
    }
}

fn parse_tensors(
    storage: &Arc<Storage>,
    metadata: &Metadata,
    cursor: &mut Cursor<'_>,
    num_tensors: u64,
) -> Result<HashMap<String, TensorInfo>, String> {
    cursor.check_count(num_tensors, MIN_TENSOR_BYTES, "tensors")?;
    if num_tensors > MAX_TENSORS {
        return Err(format!(
            "has {num_tensors} tensors; no model has more than {MAX_TENSORS}"
        ));
    }
    let mut entries = Vec::new();
    for index in 0..num_tensors {
        entries.push(TensorEntry::parse(cursor, index)?);
    }
    let alignment = alignment(metadata)?;
    let data_start = cursor.position().next_multiple_of(alignment);
    let file_len = cursor.len();
    let mut file_end = data_start as u64;
    let mut tensors = HashMap::new();
    for entry in entries {
        let name = entry.name;
        if !entry.offset.is_multiple_of(alignment as u64) {
            return Err(format!(
                "tensor {name} is at offset {}, which is not a multiple of the alignment, {alignment}",
                entry.offset
            ));
        }
        let end = (data_start as u64)
            .checked_add(entry.offset)
            .and_then(|start| start.checked_add(entry.num_bytes as u64))
            .ok_or_else(|| format!("tensor {name} is at the impossible offset {}", entry.offset))?;
        file_end = file_end.max(end);
        let info = TensorInfo {
            storage: storage.clone(),
            shape: entry.shape,
            format: entry.format,
            // If the range ends past the end of the file, an error is returned below.
            range: (end as usize).saturating_sub(entry.num_bytes)..end as usize,
        };
        if tensors.insert(name.clone(), info).is_some() {
            return Err(format!("tensor {name} occurs twice"));
        }
    }
    if num_tensors > 0 && file_end > file_len as u64 {
        return Err(format!(
            "is truncated: {file_len} bytes, and its tensors end at {file_end}"
        ));
    }
    Ok(tensors)
}

fn alignment(metadata: &Metadata) -> Result<usize, String> {
    const KEY: &str = "general.alignment";
    let alignment = metadata.try_size(KEY).map_err(|error| error.problem)?;
    match alignment.unwrap_or(DEFAULT_ALIGNMENT) {
        alignment if alignment.is_power_of_two() && alignment <= 1 << 20 => Ok(alignment),
        alignment => Err(format!("{KEY} is {alignment}; must be a power of two")),
    }
}

struct TensorEntry {
    name: String,
    shape: Vec<usize>,
    format: BlockFormat,
    num_bytes: usize,
    offset: u64,
}

impl TensorEntry {
    fn parse(cursor: &mut Cursor<'_>, index: u64) -> Result<Self, String> {
        const WHAT: &str = "the list of tensors";
        let name = cursor.text(WHAT)?;
        let name = name.map_err(|_| format!("the name of tensor number {index} is not UTF-8"))?;
        let num_dimensions = cursor.u32(WHAT)?;
        if !(1..=MAX_DIMENSIONS).contains(&num_dimensions) {
            return Err(format!("tensor {name} has {num_dimensions} dimensions"));
        }
        let mut shape = Vec::new();
        for _ in 0..num_dimensions {
            let size = cursor.u64(WHAT)?;
            // Products of a few sizes must not overflow.
            if !(1..=1 << 31).contains(&size) {
                return Err(format!("tensor {name} has a dimension of size {size}"));
            }
            shape.push(size as usize);
        }
        let format_id = cursor.u32(WHAT)?;
        let format = BlockFormat::from_repr(format_id).ok_or_else(|| {
            let known: Vec<_> = BlockFormat::ALL.iter().map(|known| known.name()).collect();
            let known = known.join(", ");
            let is =
                type_name(format_id).map_or_else(|| format!("type {format_id}"), str::to_owned);
            format!("tensor {name} is {is}; supported are {known}")
        })?;
        if !shape[0].is_multiple_of(format.block_len()) {
            return Err(format!(
                "tensor {name} has rows of {}, which is not a whole number of {} blocks",
                shape[0],
                format.name()
            ));
        }
        let num_blocks = shape[1..]
            .iter()
            .try_fold(shape[0] / format.block_len(), |product, &size| {
                product.checked_mul(size)
            });
        let num_bytes = num_blocks.and_then(|number| number.checked_mul(format.block_bytes()));
        let Some(num_bytes) = num_bytes else {
            return Err(format!("tensor {name} is impossibly large"));
        };
        if shape.len() == 1 && format.block_len() > 1 {
            return Err(format!(
                "tensor {name} is a vector of {}; vectors are supported as F32, F16, BF16",
                format.name()
            ));
        }
        let offset = cursor.u64(WHAT)?;
        shape.reverse();
        Ok(Self {
            name: name.to_owned(),
            shape,
            format,
            num_bytes,
            offset,
        })
    }
}

/// The names of existing types that no kernel can read.
fn type_name(id: u32) -> Option<&'static str> {
    Some(match id {
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
