//! The CPU executor: kernels by instruction set, worker pool, paged KV memory.

mod attention;
mod attention_plan;
mod buffer;
mod calibration;
mod claims;
mod core_affinity;
mod executor;
mod forward;
mod gemm;
mod grid;
mod head_groups;
mod int4_matrix;
mod kernel_speed;
mod kernels;
mod kv_fetch;
mod kv_memory;
mod machine;
mod profile;
mod queries;
mod region;
mod rotary;
mod slot;
mod stage;
mod step_plan;
mod thread_pool;
mod tile_attention;
mod weight_panel;
mod weights;

pub use calibration::LayerCalibration;
pub use core_affinity::num_cores;
pub use executor::{CpuConfig, CpuError, CpuExecutor};
pub use kernel_speed::{KernelSpeed, measure_kernels};
pub use kernels::{Isa, detect_isa, is_supported};
pub use kv_memory::kv_page_bytes;
pub use machine::{MachineLimits, measure_limits};
pub use profile::{Operation, OperationReport, Profile, ProfileReport};
