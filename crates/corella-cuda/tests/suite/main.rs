//! The CUDA executor on a device in host memory.

mod conformance;
mod golden;
