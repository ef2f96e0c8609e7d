//! What a checkpoint is and what an executor must do.

mod decoder_spec;
mod executor;
mod generator;
mod sampler;
mod tensor;

pub use decoder_spec::{
    Activation, AttentionSpec, DecoderSpec, MlpSpec, RotaryScaling, RotarySpec,
};
pub use executor::{Executor, ExecutorError, ExecutorInfo, KvLayout, TokenMask};
pub use sampler::{SampleError, SampleRequest, sample};
pub use tensor::{DType, DecoderWeights, LayerWeights, Storage, Tensor};
