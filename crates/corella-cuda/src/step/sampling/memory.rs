//! Memory whose size is known only when a request arrives: uploads to the device, and token rules on the device.

use corella_model::DeviceError;

use crate::device::{DeviceBuffer, DevicePointer, PinnedBuffer, SharedDevice};

/// The words of a plain structure of numbers of four and eight bytes.
pub fn words_of<T: Copy>(value: &T) -> Vec<u32> {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>() >= 4) };
    // SAFETY: it is aligned, and structures of such numbers that fill it have no padding.
    let words = unsafe {
        std::slice::from_raw_parts((&raw const *value).cast::<u32>(), size_of::<T>() / 4)
    };
    words.to_vec()
}

/// The words of plain structures of numbers of four bytes.
pub fn words_of_slice<T: Copy>(values: &[T]) -> &[u32] {
    const { assert!(size_of::<T>().is_multiple_of(4) && align_of::<T>() >= 4) };
    // SAFETY: they are aligned, and structures of such numbers have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values) / 4) }
}

/// Words in pinned memory. Their addresses stay valid until `clear`.
#[derive(Debug)]
pub struct Staging {
    device: SharedDevice,
    /// The buffers. Only the last one has room, after `num_used` words.
    buffers: Vec<PinnedBuffer<u32>>,
    len: usize,
    num_used: usize,
}

/// The least number of words in a buffer.
const MIN_STAGED: usize = 1 << 14;

impl Staging {
    pub fn new(device: &SharedDevice) -> Self {
        Self {
            device: SharedDevice::clone(device),
            buffers: Vec::new(),
            len: 0,
            num_used: 0,
        }
    }

    /// Copies words to memory that the device can read.
    pub fn stage(&mut self, words: &[u32]) -> Result<DevicePointer, DeviceError> {
        if self.len - self.num_used < words.len() {
            let len = (2 * self.len).max(words.len()).max(MIN_STAGED);
            self.buffers.push(PinnedBuffer::new(&self.device, len)?);
            (self.len, self.num_used) = (len, 0);
        }
        let Some(buffer) = self.buffers.last_mut() else {
            return Ok(DevicePointer::NULL);
        };
        let first = self.num_used;
        // SAFETY: the device reads only the words before these.
        unsafe { buffer.as_mut_slice()[first..first + words.len()].copy_from_slice(words) };
        self.num_used += words.len();
        Ok(buffer.pointer().add(first * size_of::<u32>()))
    }

    /// Gives up all words. The largest buffer stays for the next ones.
    pub fn clear(&mut self) {
        let num_buffers = self.buffers.len();
        self.buffers.drain(..num_buffers.saturating_sub(1));
        self.num_used = 0;
    }
}

/// A part of the rule memory.
#[derive(Clone, Copy, Debug)]
pub struct RuleBlock {
    pub pointer: DevicePointer,
    /// The binary logarithm of the block's number of words.
    log_words: u32,
}

/// Blocks for token rules, in sizes that are powers of two. A freed block may be reused at once: on the stream, copies
/// into the block come after the kernels that read it.
#[derive(Debug)]
pub struct RuleMemory {
    device: SharedDevice,
    buffers: Vec<DeviceBuffer>,
    free: Vec<RuleBlock>,
}

impl RuleMemory {
    pub fn new(device: &SharedDevice) -> Self {
        Self {
            device: SharedDevice::clone(device),
            buffers: Vec::new(),
            free: Vec::new(),
        }
    }

    pub fn allocate(&mut self, num_words: usize) -> Result<RuleBlock, DeviceError> {
        let log_words = num_words.next_power_of_two().trailing_zeros().max(8);
        if let Some(at) = self
            .free
            .iter()
            .position(|block| block.log_words == log_words)
        {
            return Ok(self.free.swap_remove(at));
        }
        let buffer = DeviceBuffer::new(&self.device, size_of::<u32>() << log_words)?;
        let pointer = buffer.pointer();
        self.buffers.push(buffer);
        Ok(RuleBlock { pointer, log_words })
    }

    pub fn free(&mut self, block: RuleBlock) {
        self.free.push(block);
    }
}
