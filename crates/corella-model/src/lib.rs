//! The format of checkpoints and the contract of executors.
//!
//! The rooms of the crate, from bottom to top. A room uses only those above it in this list:
//!
//! * `generator`: the counter-based random number generator.
//! * `number`: number formats of weights and rows: floats, integers with scales, and blocks.
//! * `tensor`: views of a checkpoint's bytes, and the forms in which files store them.
//! * `spec`: a decoder or an encoder as data, with its tensors and weights.
//! * `json`: JSON files of a model's folder: fields, errors, tokens and integers.
//! * `file`: files of tensors.
//! * `arch`: the supported families of models.
//! * `checkpoint`: a model's files and its configuration, and heads and adapters beside its decoder.
//! * `kv`: KV pages and recurrent states: their groups, forms, and other threads' access to them.
//! * `step`: a step as executors see it: its slots, rows, draws and outputs, and rules of batches.
//! * `executor`: the contract of an executor, its device and its factory.
//! * `mock`: the mock executor.
//! * `conformance`: the suite that every executor passes.
//! * `golden`: golden results of other programs.

mod arch;
mod checkpoint;
pub mod conformance;
mod executor;
mod file;
mod generator;
pub mod golden;
mod json;
mod kv;
mod mock;
mod number;
mod spec;
mod step;
mod tensor;

pub use arch::{Architecture, Layout, Stored};
pub use checkpoint::adapter::{Adapter, AdapterLayer, Adapters, LowRankUpdate};
pub use checkpoint::checkpoint_writer::{CheckpointWriter, PlannedPart};
pub use checkpoint::class_head::ClassHead;
pub use checkpoint::model_config::{GenerationDefaults, ModelConfig};
pub use checkpoint::outline::{Outline, OutlineSizes};
pub use checkpoint::sentence_config::SentenceConfig;
pub use checkpoint::vector_head::{HeadStep, VectorHead};
pub use checkpoint::{Checkpoint, TensorTotals};
pub use executor::cost_model::CostModel;
pub use executor::device_error::DeviceError;
pub use executor::device_memory::{DeviceMemory, host_bytes};
pub use executor::executor_factory::{
    BuiltExecutor, DeviceTraits, ExecutorFactory, ExecutorPlan, OnLayer, WeightImage,
};
pub use executor::model_fingerprint::ModelFingerprint;
pub use executor::step_threads::{STEP_QUEUE_LEN, StepCommand, StepResult, StepThreads};
pub use executor::{
    CallerWaker, DraftSlot, Executor, ExecutorError, ExecutorInfo, KvLayout, StepWaker, TokenMask,
};
pub use file::gguf::gguf_model_name;
pub use json::checkpoint_error::CheckpointError;
pub use json::end_token::{EndToken, EndTokens};
pub use json::quantization::{Quantization, Scheme};
pub use kv::element_order::ElementOrder;
pub use kv::kv_groups::{KvGroups, KvLayer};
pub use kv::kv_layers::KvLayers;
pub use kv::kv_pages::{KvGeometry, KvPages, LayerProgress, PageForm};
pub use kv::layer_counter::LayerCounter;
pub use kv::page_conversion::PageConversion;
pub use kv::page_table::PageTable;
pub use kv::state_record::{StateError, StateRecords};
pub use mock::mock_executor::{MockExecutor, StepGate};
pub use mock::mock_factory::MockFactory;
pub use mock::mock_model::{Fault, MockConfig, MockEcho, MockEnd};
pub use mock::mock_script::{CuedReply, MockScript};
pub use number::block_format::BlockFormat;
pub use number::dtype::{DType, KvFormat, WeightFormat};
pub use number::group_format::{FP4_LEVELS, GroupFormat, GroupedRow};
pub use number::int8_row::{int8_scale, quantise_int8_row};
pub use spec::decoder_spec::{
    Activation, AttentionSpec, BranchNorms, DecoderSpec, ExpertScoring, ExpertSpec, FeedForward,
    LayerSpec, MlpSpec, NormKind, NormSpec, PerLayerSpec, QkNorm, QueryGrowth, SharedExpert,
};
pub use spec::decoder_weights::{DecoderWeights, DraftHeadWeights, PerLayerWeights};
pub use spec::encoder_spec::{EncoderSpec, EncoderWeights};
pub use spec::head_activation::HeadActivation;
pub use spec::layer_tensor::{LayerInput, LayerTensor, LayerWeights, Mlp, TensorRole, TensorSpec};
pub use spec::model_part::{ByPart, ModelPart};
pub use spec::recurrent_spec::{GatedDeltaSpec, RecurrentSpec, ShortConvolutionSpec};
pub use spec::rotary_spec::{RotaryFrequencies, RotaryScaling, RotarySpec};
pub use spec::stored_matrix::{StoredMatrices, StoredMatrix};
pub use step::batch_builder::BatchBuilder;
pub use step::batch_check::BatchCheck;
pub use step::mean_pool::MeanPool;
pub use step::sampler::{SampleError, SampleRequest, Sampler, score};
pub use step::slot::{AdapterSource, Slot, SlotLimits, Slots};
pub use step::span_pool::SpanPool;
pub use step::step_output::{NOTHING_DRAWN, StepOutput};
pub use step::step_rows::{StepPool, StepRow, StepRows, StepSample, StepScore};
pub use tensor::Tensor;
pub use tensor::block_tensor::{BlockTensor, RowOrder};
pub use tensor::file_bytes::FileBytes;
pub use tensor::mapped_file::{FileWatch, MappedFile};
pub use tensor::packed_tensor::{PackedLayout, PackedParts, PackedTensor, RowView, StoredTensor};
pub use tensor::storage::Storage;
