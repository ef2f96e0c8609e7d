//! The limits of a device: the speed of copies in its memory, and the speed of products with the vendor's library.

use std::time::Instant;

use corella_model::DeviceError;

use crate::device::{DeviceBuffer, Element, PinnedBuffer, Product, SharedDevice, Stream};

use super::{median, random_bytes};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bytes read and bytes written, together.
    pub copied_bytes_per_s: f64,
    /// Operations of a product in bf16, a multiply-add being two.
    pub flops_per_s: f64,
}

#[derive(Clone, Copy, Debug)]
pub struct LimitSizes {
    /// The number of bytes per copy, far more than the caches hold.
    pub copied_bytes: usize,
    /// The number of rows, and of columns, of each matrix.
    pub product_len: usize,
}

/// The number of repetitions in one measurement, so that the host's time does not count.
const AT_ONCE: usize = 8;
const NUM_TIMES: usize = 7;

impl Limits {
    pub fn measure(device: &SharedDevice, sizes: LimitSizes) -> Result<Self, DeviceError> {
        let copied_bytes = sizes.copied_bytes;
        let from = random_buffer(device, copied_bytes)?;
        let to = DeviceBuffer::new(device, copied_bytes)?;
        let copy_s = time(device, || {
            // SAFETY: both buffers have this many bytes, and the work is waited for.
            unsafe { device.copy(Stream::Compute, to.pointer(), from.pointer(), copied_bytes) }
        })?;
        drop((from, to));
        let len = sizes.product_len;
        let matrix_bytes = len * len * Element::Bf16.num_bytes();
        let input = random_buffer(device, matrix_bytes)?;
        let weight = random_buffer(device, matrix_bytes)?;
        let out = DeviceBuffer::new(device, matrix_bytes)?;
        let product = Product {
            m: len,
            n: len,
            k: len,
            input: input.pointer(),
            weight: weight.pointer(),
            out: out.pointer(),
            out_stride: len,
            ..Product::EMPTY
        };
        let product_s = time(device, || {
            // SAFETY: the matrices have the product's sizes, and the work is waited for.
            unsafe { device.multiply(&product) }
        })?;
        Ok(Self {
            copied_bytes_per_s: 2.0 * copied_bytes as f64 / copy_s,
            flops_per_s: 2.0 * (len as f64).powi(3) / product_s,
        })
    }
}

/// The seconds of work on the compute stream.
fn time(
    device: &SharedDevice,
    work: impl Fn() -> Result<(), DeviceError>,
) -> Result<f64, DeviceError> {
    let mut times = Vec::new();
    for _ in 0..=NUM_TIMES {
        let begin = Instant::now();
        for _ in 0..AT_ONCE {
            work()?;
        }
        device.synchronize(device.record(Stream::Compute)?)?;
        times.push(begin.elapsed().as_secs_f64() / AT_ONCE as f64);
    }
    // In the first run, libraries and clocks are still cold.
    Ok(median(times.split_off(1)))
}

/// A buffer of random numbers, because zeros are multiplied faster.
fn random_buffer(device: &SharedDevice, num_bytes: usize) -> Result<DeviceBuffer, DeviceError> {
    const STAGED_BYTES: usize = 8 << 20;
    let buffer = DeviceBuffer::new(device, num_bytes)?;
    let mut num_filled = num_bytes.min(STAGED_BYTES);
    let mut staged = PinnedBuffer::<u8>::new(device, num_filled)?;
    // SAFETY: the device has no access to the memory yet.
    unsafe { staged.as_mut_slice() }.copy_from_slice(&random_bytes(num_filled, 1));
    let (first, from) = (buffer.pointer(), staged.pointer());
    // SAFETY: the ranges lie within the buffer, and both buffers live until the stream is done.
    unsafe {
        device.copy(Stream::Compute, first, from, num_filled)?;
        while num_filled < num_bytes {
            let len = num_filled.min(num_bytes - num_filled);
            device.copy(Stream::Compute, first.add(num_filled), first, len)?;
            num_filled += len;
        }
    }
    device.synchronize(device.record(Stream::Compute)?)?;
    Ok(buffer)
}
