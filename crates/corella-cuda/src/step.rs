//! One step: from a batch, over the layers, to drawn tokens.

mod activation_memory;
mod arrays;
mod completion;
mod forward;
mod graph;
mod layer_kernels;
mod sampling;
mod stage;

pub use self::completion::{CompletionThread, StepInFlight};
pub use self::forward::{Forward, ForwardParts};
pub use self::sampling::{DeviceSampler, SamplingLimits, Staging};
pub use self::stage::{Command, Stage};
