//! Memory of a device and of its host, freed when it is dropped.

use std::marker::PhantomData;
use std::ptr::NonNull;

use corella_model::DeviceError;

use super::{DevicePointer, SharedDevice};

/// Memory of a device.
#[derive(Debug)]
pub struct DeviceBuffer {
    device: SharedDevice,
    pointer: DevicePointer,
    num_bytes: usize,
}

impl DeviceBuffer {
    /// Zeroed memory. 0 bytes need no memory.
    pub fn new(device: &SharedDevice, num_bytes: usize) -> Result<Self, DeviceError> {
        let pointer = match num_bytes {
            0 => DevicePointer::NULL,
            _ => device.allocate(num_bytes)?,
        };
        Ok(Self {
            device: SharedDevice::clone(device),
            pointer,
            num_bytes,
        })
    }

    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

impl Drop for DeviceBuffer {
    fn drop(&mut self) {
        if self.num_bytes > 0 {
            // SAFETY: the memory belongs to this buffer; its owners drop it after the work that uses it.
            unsafe { self.device.free(self.pointer) };
        }
    }
}

/// Elements in the host's memory that the device reads and writes too. The host sees plain memory, so each of its
/// accesses must come after an event that follows the device's accesses.
#[derive(Debug)]
pub struct PinnedBuffer<T> {
    device: SharedDevice,
    pointer: NonNull<u8>,
    len: usize,
    elements: PhantomData<T>,
}

// SAFETY: the buffer owns its memory.
unsafe impl<T: Send> Send for PinnedBuffer<T> {}

impl<T: Copy> PinnedBuffer<T> {
    /// Memory for `len` elements, all bytes zero, which must be a value of `T`.
    pub fn new(device: &SharedDevice, len: usize) -> Result<Self, DeviceError> {
        let pointer = match len * size_of::<T>() {
            0 => NonNull::<T>::dangling().cast(),
            num_bytes => device.allocate_pinned(num_bytes)?,
        };
        Ok(Self {
            device: SharedDevice::clone(device),
            pointer,
            len,
            elements: PhantomData,
        })
    }

    /// The address by which the device reads and writes the elements.
    pub fn pointer(&self) -> DevicePointer {
        DevicePointer(self.pointer.as_ptr() as u64)
    }

    /// # Safety
    /// The device does not write the elements meanwhile.
    pub unsafe fn as_slice(&self) -> &[T] {
        // SAFETY: the memory belongs to this buffer, and by the caller's promise the device does not write it.
        unsafe { std::slice::from_raw_parts(self.pointer.cast().as_ptr(), self.len) }
    }

    /// # Safety
    /// The device neither reads nor writes the elements meanwhile.
    pub unsafe fn as_mut_slice(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.cast().as_ptr(), self.len) }
    }
}

impl<T> Drop for PinnedBuffer<T> {
    fn drop(&mut self) {
        let num_bytes = self.len * size_of::<T>();
        if num_bytes > 0 {
            // SAFETY: the memory belongs to this buffer; its owners drop it after the work that uses it.
            unsafe { self.device.free_pinned(self.pointer, num_bytes) };
        }
    }
}
