//! The CUDA executor.
//!
//! Its modules have the names of `corella-cpu`'s: `weights` uploads matrices, `kv` holds the pages, `step` turns
//! batches into kernels on a stream, `kernels` has the kernels. Below them, `device` is either a GPU, opened at run
//! time through the driver, or, for tests, an emulated device in host memory that runs the same kernel sources.

mod attention;
mod device;
mod executor;
mod factory;
#[cfg(feature = "kernel-table")]
pub mod kernel_table;
mod kernels;
mod kv;
#[cfg(feature = "speed")]
pub mod speed;
mod step;
mod weights;

pub use device::{Device, DeviceProperties, Element, GpuDevice, SharedDevice, find_gpu};
#[cfg(feature = "emulated-device")]
pub use device::{EmulatedDevice, test_device};
pub use executor::{CudaConfig, CudaExecutor, unsupported};
pub use factory::{CudaFactory, CudaOptions};
