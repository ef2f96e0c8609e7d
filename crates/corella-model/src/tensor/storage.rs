//! The places of tensors' bytes.

use std::ops::Range;

use crate::tensor::block_tensor::BlockTensor;
use crate::tensor::converted_tensor::ConvertedTensor;
use crate::tensor::file_bytes::FileBytes;
use crate::tensor::mapped_file::MappedFile;
use crate::tensor::packed_tensor::PackedTensor;
use crate::tensor::transposed_tensor::TransposedTensor;

/// The place of a tensor's bytes.
pub enum Storage {
    Mapped(MappedFile),
    Static(&'static [u8]),
    Owned(Vec<u8>),
    /// The values of a block-quantised tensor, dequantised on demand.
    Blocks(BlockTensor),
    /// The values of a tensor of integers and scales, dequantised on demand.
    Packed(Box<PackedTensor>),
    /// The values of a matrix that is stored column by column.
    Transposed(TransposedTensor),
    /// The values of a vector that is stored in another form.
    Converted(Box<ConvertedTensor>),
}

impl Storage {
    /// All bytes. Bytes of quantised tensors are computed on first use and then kept.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Mapped(map) => map,
            Self::Static(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Blocks(blocks) => blocks.values(),
            Self::Packed(packed) => packed.values(),
            Self::Transposed(transposed) => transposed.values(),
            Self::Converted(converted) => converted.values(),
        }
    }

    /// Releases the memory of mapped bytes, which are read from the file again when needed.
    pub fn release(&self, range: Range<usize>) {
        match self {
            #[cfg(unix)]
            Self::Mapped(map) => map.release(range),
            Self::Blocks(blocks) => blocks.release(),
            Self::Packed(packed) => packed.release(),
            Self::Transposed(transposed) => transposed.release(),
            _ => {}
        }
    }
}

impl FileBytes for Storage {
    fn bytes(&self) -> &[u8] {
        self.bytes()
    }

    fn release(&self, range: Range<usize>) {
        self.release(range);
    }
}
