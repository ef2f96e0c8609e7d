//! What a checkpoint is and what an executor must do.

mod batch_builder;
mod block_format;
mod block_tensor;
mod checkpoint;
mod checkpoint_error;
pub mod conformance;
mod cost_model;
mod decoder_spec;
mod decoder_weights;
mod executor;
mod generator;
mod gguf;
mod group_format;
mod json_object;
mod mock_executor;
mod mock_model;
mod model_config;
mod safetensors_file;
mod sampler;
mod tensor;

pub use batch_builder::BatchBuilder;
pub use block_format::BlockFormat;
pub use block_tensor::{BlockTensor, RowOrder};
pub use checkpoint::Checkpoint;
pub use checkpoint_error::CheckpointError;
pub use cost_model::CostModel;
pub use decoder_spec::{
    Activation, AttentionSpec, DecoderSpec, MlpSpec, RotaryScaling, RotarySpec,
};
pub use executor::{Executor, ExecutorError, ExecutorInfo, KvLayout, TokenMask};
pub use group_format::{GroupFormat, GroupedRow};
pub use mock_executor::MockExecutor;
pub use mock_model::{Fault, MockConfig, MockEcho, MockEnd};
pub use model_config::{Architecture, GenerationDefaults, ModelConfig};
pub use sampler::{SampleError, SampleRequest, sample};
pub use tensor::{DType, DecoderWeights, LayerWeights, Storage, Tensor, WeightFormat};
