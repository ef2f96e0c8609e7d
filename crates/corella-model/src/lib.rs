//! What a checkpoint is and what an executor must do.

mod batch_builder;
mod cost_model;
mod decoder_spec;
mod executor;
mod generator;
mod mock_executor;
mod mock_model;
mod sampler;
mod tensor;

pub use batch_builder::BatchBuilder;
pub use cost_model::CostModel;
pub use decoder_spec::{
    Activation, AttentionSpec, DecoderSpec, MlpSpec, RotaryScaling, RotarySpec,
};
pub use executor::{Executor, ExecutorError, ExecutorInfo, KvLayout, TokenMask};
pub use mock_executor::MockExecutor;
pub use mock_model::{Fault, MockConfig, MockEnd};
pub use sampler::{SampleError, SampleRequest, sample};
pub use tensor::{DType, DecoderWeights, LayerWeights, Storage, Tensor};
