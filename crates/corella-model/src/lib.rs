//! The format of checkpoints and the contract of executors.

mod adapter;
mod arch;
mod batch_builder;
mod batch_check;
mod block_format;
mod block_tensor;
mod checkpoint;
mod checkpoint_error;
mod checkpoint_writer;
mod class_head;
pub mod conformance;
mod converted_tensor;
mod cost_model;
mod decoder_spec;
mod decoder_weights;
mod device_error;
mod device_memory;
mod element_order;
mod encoder_spec;
mod end_token;
mod executor;
mod executor_factory;
mod folder_config;
mod generator;
mod gguf;
pub mod golden;
mod group_format;
mod int8_row;
mod json_object;
mod kv_groups;
mod kv_layers;
mod kv_pages;
mod layer_counter;
mod layer_tensor;
mod mean_pool;
mod mock_adapters;
mod mock_executor;
mod mock_factory;
mod mock_kv;
mod mock_model;
mod mock_script;
mod model_config;
mod model_fingerprint;
mod model_part;
mod packed_matrix;
mod packed_tensor;
mod page_conversion;
mod page_table;
mod quantization;
mod recurrent_spec;
mod rotary_spec;
mod safetensors_file;
mod sampler;
mod sentence_config;
mod sentence_piece;
mod slot;
mod span_pool;
mod state_record;
mod step_output;
mod step_rows;
mod stored_matrix;
mod tensor;
mod tensor_part;
mod tokenizer_json;
mod transposed_tensor;
mod vector_head;

pub use adapter::{Adapter, AdapterLayer, Adapters, LowRankUpdate};
pub use arch::{Architecture, Layout, Outline, OutlineSizes, Stored};
pub use batch_builder::BatchBuilder;
pub use batch_check::BatchCheck;
pub use block_format::BlockFormat;
pub use block_tensor::{BlockTensor, RowOrder};
pub use checkpoint::{Checkpoint, TensorTotals};
pub use checkpoint_error::CheckpointError;
pub use checkpoint_writer::{CheckpointWriter, PlannedPart};
pub use class_head::ClassHead;
pub use cost_model::CostModel;
pub use decoder_spec::{
    Activation, AttentionSpec, BranchNorms, DecoderSpec, ExpertScoring, ExpertSpec, FeedForward,
    LayerSpec, MlpSpec, NormKind, NormSpec, PerLayerSpec, QkNorm, QueryGrowth, SharedExpert,
};
pub use device_error::DeviceError;
pub use device_memory::{DeviceMemory, host_bytes};
pub use element_order::ElementOrder;
pub use encoder_spec::{EncoderSpec, EncoderWeights};
pub use end_token::{EndToken, EndTokens};
pub use executor::{
    CallerWaker, DraftSlot, Executor, ExecutorError, ExecutorInfo, KvLayout, StepWaker, TokenMask,
};
pub use executor_factory::{
    BuiltExecutor, DeviceTraits, ExecutorFactory, ExecutorPlan, OnLayer, WeightImage,
};
pub use gguf::gguf_model_name;
pub use group_format::{FP4_LEVELS, GroupFormat, GroupedRow};
pub use int8_row::{int8_scale, quantise_int8_row};
pub use kv_groups::{KvGroups, KvLayer};
pub use kv_layers::KvLayers;
pub use kv_pages::{KvGeometry, KvPages, LayerProgress, PageForm};
pub use layer_counter::LayerCounter;
pub use layer_tensor::{LayerInput, LayerTensor, LayerWeights, Mlp, TensorRole, TensorSpec};
pub use mean_pool::MeanPool;
pub use mock_executor::{MockExecutor, StepGate};
pub use mock_factory::MockFactory;
pub use mock_model::{Fault, MockConfig, MockEcho, MockEnd};
pub use mock_script::{CuedReply, MockScript};
pub use model_config::{GenerationDefaults, ModelConfig};
pub use model_fingerprint::ModelFingerprint;
pub use model_part::{ByPart, ModelPart};
pub use packed_tensor::{PackedLayout, PackedParts, PackedTensor, RowView, StoredTensor};
pub use page_conversion::PageConversion;
pub use page_table::PageTable;
pub use quantization::{Quantization, Scheme};
pub use recurrent_spec::{GatedDeltaSpec, RecurrentSpec, ShortConvolutionSpec};
pub use rotary_spec::{RotaryFrequencies, RotaryScaling, RotarySpec};
pub use sampler::{SampleError, SampleRequest, Sampler, score};
pub use sentence_config::SentenceConfig;
pub use slot::{AdapterSource, Slot, SlotLimits, Slots};
pub use span_pool::SpanPool;
pub use state_record::{StateError, StateRecords};
pub use step_output::{NOTHING_DRAWN, StepOutput};
pub use step_rows::{StepPool, StepRow, StepRows, StepSample, StepScore};
pub use stored_matrix::{StoredMatrices, StoredMatrix};
pub use tensor::{
    DType, DecoderWeights, DraftHeadWeights, KvFormat, PerLayerWeights, Storage, Tensor,
    WeightFormat,
};
pub use vector_head::{HeadActivation, HeadStep, VectorHead};
