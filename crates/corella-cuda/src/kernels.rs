//! The kernels: their sources, their parameters, and their launches.
//!
//! Every kernel takes one structure, `NAMEArgs`, which exists twice: `#[repr(C)]` here and as a
//! `struct` in the source, fields in the same order.
//!
//! Long sums are cut at points that depend only on the model and on positions, so that the bits of a row do not depend
//! on the batch.

use corella_model::{DType, DeviceError, KvFormat};

use crate::device::{Element, Kernel, ModuleSource, SharedDevice};

pub mod activation;
pub mod attention;
pub mod embed;
pub mod linear;
pub mod norm;
pub mod packed_weight;
pub mod page;
pub mod progress;
pub mod rotary;
pub mod sample;

#[cfg(all(test, feature = "emulated-device"))]
mod test_memory;

/// Loads the only kernel of a source in this folder.
fn load_kernel(
    device: &SharedDevice,
    name: &'static str,
    text: &'static str,
    kernel: &str,
    defines: Vec<(&'static str, String)>,
) -> Result<Kernel, DeviceError> {
    let source = ModuleSource {
        name,
        text,
        defines,
    };
    Ok(device.load(&source, &[kernel])?[0])
}

/// The bytes of a kernel's parameters, which have no padding between fields.
fn args_bytes<T>(args: &T) -> &[u8] {
    // SAFETY: the structures of parameters fill themselves with fields, so that all bytes are initialised.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(args).cast(), size_of::<T>()) }
}

/// The macro `ELEMENT`: the type of activations.
fn element_macro(element: Element) -> String {
    String::from(match element {
        Element::F32 => "float",
        Element::Bf16 => "bf16",
    })
}

/// The macro `KV_ELEMENT`: the type of keys and values in pages.
fn kv_element_macro(format: KvFormat) -> String {
    String::from(match format {
        KvFormat::Float(DType::F32) => "float",
        KvFormat::Float(DType::F16) => "f16",
        KvFormat::Float(DType::Bf16) => "bf16",
        KvFormat::Int8 => "i8",
    })
}
