//! The executor's properties before its construction, for planning its memory.

use std::sync::Arc;

use corella_core::SchedulerConfig;
use corella_model::{
    BuiltExecutor, DecoderSpec, DecoderWeights, DeviceError, DeviceMemory, DeviceTraits,
    ExecutorFactory, ExecutorPlan, KvFormat, KvGroups, WeightFormat, WeightImage,
};

use crate::executor::{CpuConfig, CpuExecutor, kv_page_bytes};
use crate::kernels::{Isa, detect_isa};
use crate::recurrent::state_bytes;
use crate::step::{Profile, draft_page_bytes, draft_state_bytes};
use crate::system::StepTurns;
use crate::weights::PackedImage;

/// Makes executors on the cores of this machine.
pub struct CpuFactory {
    pub num_threads: usize,
    /// Whether each thread has a core of its own.
    pub pin_threads: bool,
    /// The instruction set; `None` takes the best one of this machine.
    pub isa: Option<Isa>,
    /// The profile that records the time of every step, if any.
    pub profile: Option<Arc<Profile>>,
    /// The turns of models that share cores.
    pub turns: Option<Arc<StepTurns>>,
}

impl ExecutorFactory for CpuFactory {
    fn device(&self) -> DeviceTraits {
        DeviceTraits {
            memory: DeviceMemory::of_host(),
            reads_weights: true,
            max_stages: None,
            takes_adapters: true,
            runs_draft_heads: true,
        }
    }

    fn weight_format(
        &self,
        asked: Option<WeightFormat>,
        weights: &DecoderWeights,
    ) -> Result<WeightFormat, DeviceError> {
        Ok(asked.unwrap_or_else(|| weights.stored_format()))
    }

    fn kv_page_bytes(
        &self,
        spec: &DecoderSpec,
        kv_groups: &KvGroups,
        limits: &SchedulerConfig,
        format: KvFormat,
    ) -> u64 {
        let num_stages = limits.num_pipeline_stages as usize;
        let of_draft_head = draft_page_bytes(spec, limits.page_size, format);
        let page_bytes = kv_page_bytes(spec, kv_groups, num_stages, limits.page_size, format);
        (page_bytes + of_draft_head) as u64
    }

    fn state_bytes(&self, spec: &DecoderSpec, limits: &SchedulerConfig) -> u64 {
        let config = CpuConfig::for_scheduler(limits, self.num_threads);
        let max_drafts = config.max_draft_tokens as usize;
        (state_bytes(spec, max_drafts) + draft_state_bytes(spec, max_drafts)) as u64
    }

    fn working_bytes(
        &self,
        spec: &DecoderSpec,
        limits: &SchedulerConfig,
        _weight_format: WeightFormat,
    ) -> u64 {
        self.state_bytes(spec, limits) * u64::from(limits.max_num_seqs)
    }

    fn image_layout(&self) -> Option<String> {
        Some(self.isa.unwrap_or_else(detect_isa).to_string())
    }

    fn build(&self, plan: ExecutorPlan<'_>) -> Result<BuiltExecutor, DeviceError> {
        let (profile, turns) = match plan.is_draft {
            true => (None, None),
            false => (self.profile.clone(), self.turns.clone()),
        };
        let config = CpuConfig {
            pin_threads: self.pin_threads,
            weight_format: plan.weight_format,
            kv_format: plan.kv_format,
            kv_groups: Some(plan.kv_groups),
            isa: self.isa,
            profile,
            turns,
            max_adapter_rank: plan.max_adapter_rank,
            ..CpuConfig::for_scheduler(plan.limits, self.num_threads)
        };
        let weights = plan.weights.expect("a CPU reads weights");
        let (spec, image, on_layer) = (plan.spec, plan.image, plan.on_layer);
        let (executor, image) = CpuExecutor::with_image(spec, weights, config, image, on_layer)?;
        Ok(BuiltExecutor {
            executor: Box::new(executor),
            image: Some(Box::new(image)),
        })
    }
}

impl WeightImage for PackedImage {
    fn is_read(&self) -> bool {
        self.is_read()
    }

    fn num_bytes(&self) -> u64 {
        self.num_bytes()
    }

    fn pieces(&self, max_len: usize) -> Box<dyn Iterator<Item = &[u8]> + '_> {
        Box::new(self.pieces(max_len))
    }
}
