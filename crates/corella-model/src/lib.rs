//! What a checkpoint is and what an executor must do.

mod arch;
mod batch_builder;
mod batch_check;
mod block_format;
mod block_tensor;
mod checkpoint;
mod checkpoint_error;
mod checkpoint_writer;
pub mod conformance;
mod cost_model;
mod decoder_spec;
mod decoder_weights;
mod element_order;
mod executor;
mod folder_config;
mod generator;
mod gguf;
mod group_format;
mod int8_row;
mod json_object;
mod kv_groups;
mod kv_pages;
mod layer_counter;
mod layer_tensor;
mod mock_executor;
mod mock_kv;
mod mock_model;
mod model_config;
mod model_fingerprint;
mod model_part;
mod packed_matrix;
mod packed_tensor;
mod page_conversion;
mod quantization;
mod quantize;
mod raised_tensor;
mod rotary_spec;
mod safetensors_file;
mod sampler;
mod sentence_piece;
mod tensor;
mod tokenizer_json;
mod transposed_tensor;

pub use arch::{Architecture, Outline, OutlineSizes};
pub use batch_builder::BatchBuilder;
pub use batch_check::BatchCheck;
pub use block_format::BlockFormat;
pub use block_tensor::{BlockTensor, RowOrder};
pub use checkpoint::{Checkpoint, TensorTotals};
pub use checkpoint_error::CheckpointError;
pub use checkpoint_writer::{CheckpointWriter, PlannedPart};
pub use cost_model::CostModel;
pub use decoder_spec::{
    Activation, AttentionSpec, BranchNorms, DecoderSpec, ExpertScoring, ExpertSpec, FeedForward,
    LayerSpec, MlpSpec, NormKind, NormSpec, QkNorm, SharedExpert,
};
pub use element_order::ElementOrder;
pub use executor::{Executor, ExecutorError, ExecutorInfo, KvLayout, StepWaker, TokenMask};
pub use gguf::gguf_model_name;
pub use group_format::{GroupFormat, GroupedRow};
pub use int8_row::{int8_scale, quantise_int8_row};
pub use kv_groups::{KvGroups, KvLayer};
pub use kv_pages::{KvGeometry, KvPages, LayerProgress, PageForm};
pub use layer_counter::LayerCounter;
pub use layer_tensor::{LayerInput, LayerTensor, LayerWeights, Mlp, TensorRole, TensorSpec};
pub use mock_executor::MockExecutor;
pub use mock_model::{Fault, MockConfig, MockEcho, MockEnd};
pub use model_config::{GenerationDefaults, ModelConfig};
pub use model_fingerprint::ModelFingerprint;
pub use model_part::{ByPart, ModelPart};
pub use packed_tensor::{PackedLayout, PackedTensor};
pub use page_conversion::PageConversion;
pub use quantization::{Quantization, Scheme};
pub use quantize::{
    Hessian, InverseFactor, Place, PlannedTensor, QuantizeFormat, QuantizePlan, QuantizedMatrix,
};
pub use rotary_spec::{RotaryFrequencies, RotaryScaling, RotarySpec};
pub use sampler::{SampleError, SampleRequest, Sampler, score};
pub use tensor::{DType, DecoderWeights, KvFormat, Storage, Tensor, WeightFormat};
