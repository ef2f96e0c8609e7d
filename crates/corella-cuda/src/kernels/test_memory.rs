//! A device for tests of kernels, and copies of vectors to and from it.

use half::bf16;

use crate::device::{
    DeviceBuffer, DevicePointer, Element, PinnedBuffer, SharedDevice, Stream, test_device,
};

pub fn device() -> SharedDevice {
    test_device()
}

/// A copy of the elements in the device's memory.
pub fn upload<T: Copy>(device: &SharedDevice, elements: &[T]) -> DeviceBuffer {
    let buffer = DeviceBuffer::new(device, size_of_val(elements)).unwrap();
    let mut pinned = PinnedBuffer::<T>::new(device, elements.len()).unwrap();
    // SAFETY: the device has no access to the memory yet.
    unsafe { pinned.as_mut_slice() }.copy_from_slice(elements);
    transfer(
        device,
        buffer.pointer(),
        pinned.pointer(),
        size_of_val(elements),
    );
    buffer
}

/// The first elements of a buffer, after all work on the compute stream.
pub fn download<T: Copy>(device: &SharedDevice, buffer: &DeviceBuffer, len: usize) -> Vec<T> {
    assert!(len * size_of::<T>() <= buffer.num_bytes());
    let pinned = PinnedBuffer::<T>::new(device, len).unwrap();
    transfer(
        device,
        pinned.pointer(),
        buffer.pointer(),
        len * size_of::<T>(),
    );
    // SAFETY: the copy is over.
    unsafe { pinned.as_slice() }.to_vec()
}

fn transfer(device: &SharedDevice, to: DevicePointer, from: DevicePointer, num_bytes: usize) {
    if num_bytes == 0 {
        return;
    }
    // SAFETY: both are memory of the device or pinned, and the copy is waited for.
    unsafe { device.copy(Stream::Compute, to, from, num_bytes) }.unwrap();
    let end = device.record(Stream::Compute).unwrap();
    device.synchronize(end).unwrap();
}

/// Numbers between -1 and 1 from a seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u32 {
        // The finaliser of SplitMix64.
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 32) as u32
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.bits() as usize % end
    }

    pub fn number(&mut self) -> f32 {
        (self.bits() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    pub fn numbers(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.number()).collect()
    }
}

/// Numbers in the device's memory, rounded to an element type.
pub fn upload_as(device: &SharedDevice, element: Element, numbers: &[f32]) -> DeviceBuffer {
    match element {
        Element::F32 => upload(device, numbers),
        Element::Bf16 => {
            let rounded: Vec<bf16> = numbers.iter().map(|x| bf16::from_f32(*x)).collect();
            upload(device, &rounded)
        }
    }
}

/// The first elements of a buffer, after all work on the compute stream.
pub fn download_as(
    device: &SharedDevice,
    element: Element,
    buffer: &DeviceBuffer,
    len: usize,
) -> Vec<f32> {
    match element {
        Element::F32 => download(device, buffer, len),
        Element::Bf16 => {
            let elements: Vec<bf16> = download(device, buffer, len);
            elements.into_iter().map(bf16::to_f32).collect()
        }
    }
}

/// Numbers as an element type holds them.
pub fn rounded(element: Element, numbers: Vec<f32>) -> Vec<f32> {
    match element {
        Element::F32 => numbers,
        Element::Bf16 => {
            let round = |x| bf16::from_f32(x).to_f32();
            numbers.into_iter().map(round).collect()
        }
    }
}

/// The permitted error of a number in an element type: a last digit, and for sums of f32 some of them.
pub fn is_near(element: Element, actual: f32, exact: f64) -> bool {
    let relative = match element {
        Element::F32 => 2e-6,
        Element::Bf16 => 1.0 / 256.0,
    };
    (f64::from(actual) - exact).abs() <= relative * exact.abs() + 2e-6
}
