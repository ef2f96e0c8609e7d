//! How an engine gets its executor: what a device has and can do, what a model takes of it, and the
//! loading itself. Every backend has a factory, so that whoever plans memory and loads models names
//! none of them.

use std::fs::File;

use corella_core::SchedulerConfig;

use crate::{
    DecoderSpec, DecoderWeights, DeviceError, DeviceMemory, Executor, KvFormat, KvGroups,
    WeightFormat,
};

/// Makes executors for one device.
pub trait ExecutorFactory: Send + Sync {
    fn device(&self) -> DeviceTraits;

    /// The format in which weights are held if `asked` is asked for, or if nothing is.
    fn weight_format(
        &self,
        asked: Option<WeightFormat>,
        weights: &DecoderWeights,
    ) -> Result<WeightFormat, DeviceError>;

    /// Bytes of one KV page: keys and values of the layers of a KV group. The limits give the size of a
    /// page and the number of pipeline stages.
    fn kv_page_bytes(
        &self,
        spec: &DecoderSpec,
        kv_groups: &KvGroups,
        limits: &SchedulerConfig,
        format: KvFormat,
    ) -> u64;

    /// Bytes that the recurrent layers of a model keep of each running request; 0 for other models, and
    /// on devices that keep none.
    fn state_bytes(&self, _spec: &DecoderSpec, _limits: &SchedulerConfig) -> u64 {
        0
    }

    /// About how many bytes of the device's memory an executor needs beside weights and KV pages, where
    /// that is worth planning for.
    fn working_bytes(
        &self,
        _spec: &DecoderSpec,
        _limits: &SchedulerConfig,
        _weight_format: WeightFormat,
    ) -> u64 {
        0
    }

    /// Names the layout of weights in this device's images; `None` if its executors give none.
    fn image_layout(&self) -> Option<String> {
        None
    }

    /// Loads the weights and allocates all memory.
    fn build(&self, plan: ExecutorPlan<'_>) -> Result<BuiltExecutor, DeviceError>;
}

/// What a device has and can do.
#[derive(Clone, Debug)]
pub struct DeviceTraits {
    pub memory: DeviceMemory,
    /// Whether executors read a checkpoint's weights. Those that do not make up tokens.
    pub reads_weights: bool,
    /// The most pipeline stages; `None` is one for each layer.
    pub max_stages: Option<usize>,
    pub takes_adapters: bool,
    /// Whether executors run the draft head of a model that has one.
    pub runs_draft_heads: bool,
}

/// What an executor is to run, and within which limits.
pub struct ExecutorPlan<'a> {
    pub spec: DecoderSpec,
    /// Given if [`DeviceTraits::reads_weights`].
    pub weights: Option<DecoderWeights>,
    pub limits: &'a SchedulerConfig,
    /// `None` keeps the checkpoint's.
    pub weight_format: Option<WeightFormat>,
    pub kv_format: KvFormat,
    pub kv_groups: KvGroups,
    /// The largest rank of the adapters that may be loaded; `None` leaves no room for adapters.
    pub max_adapter_rank: Option<usize>,
    /// Whether the model drafts for another. Its steps are not noted in profiles.
    pub is_draft: bool,
    /// An image that an executor of the same weights, layout and weight format gave.
    pub image: Option<File>,
    pub on_layer: OnLayer<'a>,
}

/// Learns how many layers' weights are on the device, so that whoever waits can be told.
pub type OnLayer<'a> = &'a (dyn Fn(usize) + Sync);

pub struct BuiltExecutor {
    pub executor: Box<dyn Executor>,
    /// The weights as they lie in memory, to be kept for the next start.
    pub image: Option<Box<dyn WeightImage>>,
}

/// The bytes of weights that took time to compute. It keeps their memory alive.
pub trait WeightImage: Send {
    /// Whether the weights were read from an image.
    fn is_read(&self) -> bool;

    /// The size in bytes; 0 if reading an image would be no faster than loading the checkpoint.
    fn num_bytes(&self) -> u64;

    /// The content in order, in pieces of at most `max_len` bytes.
    fn pieces(&self, max_len: usize) -> Box<dyn Iterator<Item = &[u8]> + '_>;
}
