//! The properties of an executor that does not exist yet, for planning its memory.

use corella_core::SchedulerConfig;
use corella_model::{
    BuiltExecutor, DType, DecoderSpec, DecoderWeights, DeviceError, DeviceMemory, DeviceTraits,
    ExecutorFactory, ExecutorPlan, KvFormat, KvGeometry, KvGroups, WeightFormat, host_bytes,
};

use crate::config::CudaConfig;
use crate::device::{DeviceProperties, Element, GpuDevice, SharedDevice};
use crate::executor::{CudaExecutor, activation_bytes};

/// The operator's options of an executor.
#[derive(Clone, Copy, Debug)]
pub struct CudaOptions {
    /// The share of the GPU's memory that may be used, from 0 to 1.
    pub memory_utilization: f64,
    /// Whether the bits of a row depend only on the row's sequence.
    pub is_batch_invariant: bool,
    /// The largest number of alternatives whose log-probabilities a request may ask for.
    pub max_logprobs: u32,
}

/// Makes executors on one GPU.
pub struct CudaFactory {
    device: SharedDevice,
    options: CudaOptions,
}

impl CudaFactory {
    /// Opens the GPU with this index, in the driver's order.
    pub fn open(ordinal: usize, options: CudaOptions) -> Result<Self, DeviceError> {
        Ok(Self::new(GpuDevice::open(ordinal)?, options))
    }

    pub fn new(device: SharedDevice, options: CudaOptions) -> Self {
        Self { device, options }
    }
}

impl ExecutorFactory for CudaFactory {
    fn device(&self) -> DeviceTraits {
        let utilization = self.options.memory_utilization;
        DeviceTraits {
            memory: memory(self.device.properties(), utilization),
            reads_weights: true,
            max_stages: Some(1),
            takes_adapters: false,
            runs_draft_heads: false,
        }
    }

    /// The checkpoint's own format, with bf16 in place of f16.
    fn weight_format(
        &self,
        asked: Option<WeightFormat>,
        weights: &DecoderWeights,
    ) -> Result<WeightFormat, DeviceError> {
        match (asked, weights.stored_format()) {
            (Some(WeightFormat::Float(DType::F32)), _) => Ok(WeightFormat::Float(DType::F32)),
            (Some(WeightFormat::Float(_)), _) => Ok(WeightFormat::Float(DType::Bf16)),
            (Some(asked), stored) if asked != stored => Err(DeviceError(format!(
                "--device cuda takes quantised weights only as the checkpoint stores them, here \
                 {}: quantise it with `corella quantize`, or leave --dtype out",
                stored.name()
            ))),
            (_, WeightFormat::Float(DType::F16)) => Ok(WeightFormat::Float(DType::Bf16)),
            (_, stored) => Ok(stored),
        }
    }

    fn kv_page_bytes(
        &self,
        spec: &DecoderSpec,
        kv_groups: &KvGroups,
        limits: &SchedulerConfig,
        format: KvFormat,
    ) -> u64 {
        KvGeometry::of_rows(spec, kv_groups, 0, limits.page_size, format).page_bytes() as u64
    }

    fn working_bytes(
        &self,
        spec: &DecoderSpec,
        limits: &SchedulerConfig,
        weight_format: WeightFormat,
    ) -> u64 {
        let max_logprobs = self.options.max_logprobs;
        activation_bytes(spec, limits, element(weight_format), max_logprobs) as u64
    }

    fn build(&self, plan: ExecutorPlan<'_>) -> Result<BuiltExecutor, DeviceError> {
        let weights = plan.weights.expect("a GPU reads weights");
        let weight_format = self.weight_format(plan.weight_format, &weights)?;
        let config = CudaConfig {
            kv_groups: Some(plan.kv_groups),
            is_batch_invariant: self.options.is_batch_invariant,
            max_logprobs: self.options.max_logprobs,
            ..CudaConfig::for_scheduler(plan.limits, element(weight_format), plan.kv_format)
        };
        let executor = CudaExecutor::new(&self.device, plan.spec, weights, config, plan.on_layer)?;
        Ok(BuiltExecutor {
            executor: Box::new(executor),
            image: None,
        })
    }
}

/// The memory that an executor may use: the given share of all memory, or the free memory if that is less.
fn memory(properties: &DeviceProperties, utilization: f64) -> DeviceMemory {
    let usable = properties.total_bytes as f64 * utilization;
    DeviceMemory {
        available_bytes: (usable as u64).min(properties.free_bytes as u64),
        total_bytes: properties.total_bytes as u64,
        default_share: 1.0,
        host_bytes: Some(host_bytes()),
    }
}

/// The type of activations that goes with a format of weights.
fn element(weight_format: WeightFormat) -> Element {
    match weight_format {
        WeightFormat::Float(DType::F32) => Element::F32,
        _ => Element::Bf16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(total_bytes: usize, free_bytes: usize) -> DeviceProperties {
        DeviceProperties {
            name: String::new(),
            architecture: String::new(),
            num_multiprocessors: 1,
            max_shared_bytes: 0,
            total_bytes,
            free_bytes,
            uses_wgmma: false,
        }
    }

    #[test]
    fn the_share_of_all_memory_is_used_as_far_as_it_is_free() {
        let available = |free| memory(&properties(1000, free), 0.9).available_bytes;
        assert_eq!(available(990), 900);
        assert_eq!(available(700), 700);
        assert_eq!(memory(&properties(1000, 700), 0.9).total_bytes, 1000);
    }
}
