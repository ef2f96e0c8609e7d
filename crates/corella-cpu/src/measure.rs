//! What the machine could do, and what single kernels make of it.

mod kernel_speed;
mod machine;

pub use self::kernel_speed::{KernelSpeed, measure_kernels};
pub use self::machine::{MachineLimits, measure_limits};
