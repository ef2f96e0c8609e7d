//! The CUDA executor.
//!
//! Most rooms have the names of rooms of `corella-cpu`. From bottom to top, a room uses only those above it in this
//! list:
//!
//! * `kernel_include`: files that the sources of kernels include.
//! * `device`: a GPU, opened at run time through the driver, or, for tests, an emulated device in host memory that runs
//!   the same kernel sources.
//! * `attention`: the rows and splits of contexts of each thread block.
//! * `kernels`: the kernels, and their launches.
//! * `weights`: uploaded matrices.
//! * `kv`: the memory of keys and values, in pages.
//! * `config`: the configuration of the executor.
//! * `step`: batches as kernels on a stream.
//! * `executor`: the interface to the engine.
//! * `factory`: the executor's properties before its construction.
//! * `kernel_table`: the registers and memory of the compiled kernels.
//! * `speed`: the executor's speed beside its device's limits.

mod attention;
mod config;
mod device;
mod executor;
mod factory;
mod kernel_include;
#[cfg(feature = "kernel-table")]
pub mod kernel_table;
mod kernels;
mod kv;
#[cfg(feature = "speed")]
pub mod speed;
mod step;
mod weights;

pub use config::CudaConfig;
pub use device::{Device, DeviceProperties, Element, GpuDevice, SharedDevice, find_gpu};
#[cfg(feature = "emulated-device")]
pub use device::{EmulatedDevice, test_device};
pub use executor::{CudaExecutor, unsupported};
pub use factory::{CudaFactory, CudaOptions};
