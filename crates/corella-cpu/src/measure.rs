//! The limits of the machine, and the speed of single kernels.

mod kernel_speed;
mod machine;

pub use self::kernel_speed::{KernelSpeed, measure_kernels};
pub use self::machine::{MachineLimits, measure_limits};
