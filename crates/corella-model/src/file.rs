//! Files of tensors.

pub(crate) mod file_tensor;
pub(crate) mod gguf;
pub(crate) mod safetensors_file;
