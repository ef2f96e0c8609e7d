//! safetensors files: a JSON header with the place of each tensor, and then the tensors' bytes.

use std::collections::HashMap;
use std::sync::Arc;

use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};

use crate::file::file_tensor::{FileTensor, TensorSource};
use crate::tensor::packed_tensor::StoredTensor;
use crate::{BlockFormat, CheckpointError, Storage};

/// An open safetensors file.
pub struct SafetensorsFile {
    file: String,
    storage: Arc<Storage>,
    metadata: Metadata,
    data_start: usize,
}

impl SafetensorsFile {
    pub fn open(file: String, storage: Storage) -> Result<Self, CheckpointError> {
        match SafeTensors::read_metadata(storage.bytes()) {
            Ok((header_len, metadata)) => Ok(Self {
                file,
                storage: Arc::new(storage),
                metadata,
                data_start: LENGTH_BYTES + header_len,
            }),
            Err(error) => {
                let problem = truncation(storage.bytes())
                    .unwrap_or_else(|| format!("is not a safetensors file: {error}"));
                Err(CheckpointError::new(file, problem))
            }
        }
    }
}

impl TensorSource for SafetensorsFile {
    fn file(&self) -> &str {
        &self.file
    }

    fn names(&self) -> Vec<String> {
        self.metadata.offset_keys()
    }

    fn sizes(&self) -> Vec<(usize, usize)> {
        let tensors = self.metadata.tensors();
        let tensors = tensors.values().map(|info| {
            let (start, end) = info.data_offsets;
            (info.shape.iter().product(), end - start)
        });
        tensors.collect()
    }

    fn tensor(&self, name: &str) -> Result<Option<FileTensor>, CheckpointError> {
        let Some(info) = self.metadata.info(name) else {
            return Ok(None);
        };
        let format = match info.dtype {
            Dtype::F32 => BlockFormat::F32,
            Dtype::F16 => BlockFormat::F16,
            Dtype::BF16 => BlockFormat::Bf16,
            other => {
                let problem =
                    format!("tensor {name} is {other:?}; supported are F32, F16 and BF16");
                return Err(CheckpointError::new(&self.file, problem));
            }
        };
        let (start, end) = info.data_offsets;
        Ok(Some(FileTensor {
            storage: self.storage.clone(),
            range: self.data_start + start..self.data_start + end,
            format,
            shape: info.shape.clone(),
        }))
    }

    fn stored(&self, name: &str) -> Option<StoredTensor> {
        let info = self.metadata.info(name)?;
        let (start, end) = info.data_offsets;
        Some(StoredTensor {
            storage: self.storage.clone(),
            range: self.data_start + start..self.data_start + end,
            dtype: info.dtype,
            shape: info.shape.clone(),
        })
    }
}

const LENGTH_BYTES: usize = 8;

/// Describes a truncated file. An interrupted download is by far the most common damage, so it gets
/// a message of its own.
fn truncation(bytes: &[u8]) -> Option<String> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Some(format!("is truncated: {} bytes", bytes.len()));
    };
    let header_len = usize::try_from(u64::from_le_bytes(*length)).ok()?;
    // If the file is a text, its first bytes, read as a length, give an absurdly large number.
    if header_len > rest.len() && header_len <= 100_000_000 {
        return Some(format!(
            "is truncated: {} bytes, but its header alone has {header_len}",
            bytes.len()
        ));
    }
    let tensors: HashMap<String, serde_json::Value> =
        serde_json::from_slice(rest.get(..header_len)?).ok()?;
    let data_end = tensors
        .values()
        .filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64())
        .max()?;
    let expected = data_end.saturating_add((LENGTH_BYTES + header_len) as u64);
    (expected > bytes.len() as u64)
        .then(|| format!("is truncated: {} bytes of {expected}", bytes.len()))
}
