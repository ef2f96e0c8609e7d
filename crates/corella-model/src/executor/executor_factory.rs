//! The factory of an engine's executor: a device's memory and abilities, a model's use of them, and the loading. Every
//! backend has a factory, so that the code that plans memory and loads models names no backend.

use std::fs::File;

use corella_core::SchedulerConfig;

use crate::{
    DecoderSpec, DecoderWeights, DeviceError, DeviceMemory, Executor, KvFormat, KvGroups,
    WeightFormat,
};

/// Makes executors for one device.
pub trait ExecutorFactory: Send + Sync {
    fn device(&self) -> DeviceTraits;

    /// The format in which weights are kept if the operator asks for `asked`, or for no format.
    fn weight_format(
        &self,
        asked: Option<WeightFormat>,
        weights: &DecoderWeights,
    ) -> Result<WeightFormat, DeviceError>;

    /// The size of one KV page in bytes: keys and values of the layers of a KV group. `limits` has the number of
    /// positions in a page and the number of pipeline stages.
    fn kv_page_bytes(
        &self,
        spec: &DecoderSpec,
        kv_groups: &KvGroups,
        limits: &SchedulerConfig,
        format: KvFormat,
    ) -> u64;

    /// The size of a running request's state in the recurrent layers of a model, in bytes; 0 for models without such
    /// layers, and on devices without such states.
    fn state_bytes(&self, _spec: &DecoderSpec, _limits: &SchedulerConfig) -> u64 {
        0
    }

    /// The approximate bytes of the device's memory that an executor needs beside weights and KV pages, where relevant
    /// for planning.
    fn working_bytes(
        &self,
        _spec: &DecoderSpec,
        _limits: &SchedulerConfig,
        _weight_format: WeightFormat,
    ) -> u64 {
        0
    }

    /// The name of the memory layout of weights in this device's images ([`WeightImage`]). `None` if its executors
    /// give no images.
    fn image_layout(&self) -> Option<String> {
        None
    }

    /// Loads the weights and allocates all memory.
    fn build(&self, plan: ExecutorPlan<'_>) -> Result<BuiltExecutor, DeviceError>;
}

/// The memory and the abilities of a device.
#[derive(Clone, Debug)]
pub struct DeviceTraits {
    pub memory: DeviceMemory,
    /// Whether executors read a checkpoint's weights. Otherwise they make up tokens.
    pub reads_weights: bool,
    /// The largest number of pipeline stages; `None` stands for one stage for each layer.
    pub max_stages: Option<usize>,
    pub takes_adapters: bool,
    /// Whether executors run the draft head of a model.
    pub runs_draft_heads: bool,
}

/// The model and the limits of an executor.
pub struct ExecutorPlan<'a> {
    pub spec: DecoderSpec,
    /// The weights, given if [`DeviceTraits::reads_weights`].
    pub weights: Option<DecoderWeights>,
    pub limits: &'a SchedulerConfig,
    /// The format for weights; `None` keeps the checkpoint's format.
    pub weight_format: Option<WeightFormat>,
    pub kv_format: KvFormat,
    pub kv_groups: KvGroups,
    /// The largest rank of the adapters that may be loaded; `None` leaves no room for adapters.
    pub max_adapter_rank: Option<usize>,
    /// Whether the model drafts for another model. The steps of such a model are not recorded in profiles.
    pub is_draft: bool,
    /// An image from an executor of the same weights, layout and weight format.
    pub image: Option<File>,
    pub on_layer: OnLayer<'a>,
}

/// Receives the number of layers whose weights are on the device, for progress reports.
pub type OnLayer<'a> = &'a (dyn Fn(usize) + Sync);

pub struct BuiltExecutor {
    pub executor: Box<dyn Executor>,
    /// The weights in their memory layout, to be kept for the next start.
    pub image: Option<Box<dyn WeightImage>>,
}

/// The bytes of weights that were costly to compute. The image keeps the memory of these bytes alive.
pub trait WeightImage: Send {
    /// Whether the weights were read from an image.
    fn is_read(&self) -> bool;

    /// The size in bytes; 0 if reading an image would be no faster than loading the checkpoint.
    fn num_bytes(&self) -> u64;

    /// The content in order, in pieces of at most `max_len` bytes.
    fn pieces(&self, max_len: usize) -> Box<dyn Iterator<Item = &[u8]> + '_>;
}
