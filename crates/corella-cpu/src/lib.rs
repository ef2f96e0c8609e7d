//! The CPU executor: kernels per instruction set, a worker pool, and paged KV memory.
//!
//! Its modules, from bottom to top. A module uses only those above it in this list:
//!
//! * `system`: memory, cores, threads that work on one job together, and turns of executors on the same cores.
//! * `kernels`: arithmetic by instruction set, as a table of functions, and their layouts.
//! * `weights`: a checkpoint's matrices, packed into panels for the kernels.
//! * `dense`: rows of activations, and their products with packed weights.
//! * `kv`: the memory of keys and values, in pages.
//! * `attention`: queries over the pages of their sequences, as tasks that workers share.
//! * `recurrent`: states of sequences, and their layers.
//! * `step`: one step of a pipeline stage: from a batch, over the layers, to drawn tokens.
//! * `measure`: the limits of the machine, and the speed of single kernels.
//! * `calibration`: runs a model layer by layer over a text, for quantisation.
//! * `executor`: the interface to the engine, which passes batches to the stages of the pipeline.
//! * `factory`: the executor's properties before its construction, for planning its memory.

mod attention;
mod calibration;
mod dense;
mod executor;
mod factory;
mod kernels;
mod kv;
mod measure;
mod recurrent;
mod step;
mod system;
mod weights;

pub use calibration::{Hessian, LayerCalibration};
pub use executor::{CpuConfig, CpuExecutor, kv_page_bytes};
pub use factory::CpuFactory;
pub use kernels::{Isa, detect_isa, is_supported};
pub use measure::{KernelSpeed, MachineLimits, measure_kernels, measure_limits};
pub use step::{Operation, OperationReport, Profile, ProfileReport};
pub use system::{StepTurns, num_cores};
pub use weights::{PackedImage, packed_bytes};
