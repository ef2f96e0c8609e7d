//! Makes mock executors.

use corella_core::SchedulerConfig;

use crate::{
    BuiltExecutor, DType, DecoderSpec, DecoderWeights, DeviceError, DeviceMemory, DeviceTraits,
    ExecutorFactory, ExecutorPlan, KvFormat, KvGeometry, KvGroups, MockConfig, MockExecutor,
    MockScript, WeightFormat,
};

/// Makes executors that make up tokens.
pub struct MockFactory {
    /// The settings of the model. Its sizes come from the plan of each executor.
    config: MockConfig,
}

impl MockFactory {
    pub fn new(config: MockConfig) -> Self {
        Self { config }
    }
}

impl ExecutorFactory for MockFactory {
    fn device(&self) -> DeviceTraits {
        DeviceTraits {
            memory: DeviceMemory {
                // Memory is no limit: pages that are never written take no memory.
                total_bytes: u64::MAX,
                ..DeviceMemory::of_host()
            },
            reads_weights: false,
            max_stages: Some(usize::MAX),
            takes_adapters: true,
            runs_draft_heads: false,
        }
    }

    fn weight_format(
        &self,
        asked: Option<WeightFormat>,
        _weights: &DecoderWeights,
    ) -> Result<WeightFormat, DeviceError> {
        Ok(asked.unwrap_or(WeightFormat::Float(DType::F32)))
    }

    fn kv_page_bytes(
        &self,
        spec: &DecoderSpec,
        kv_groups: &KvGroups,
        limits: &SchedulerConfig,
        format: KvFormat,
    ) -> u64 {
        let page_size = limits.page_size;
        KvGeometry::of_rows(spec, kv_groups, 0, page_size, format).page_bytes() as u64
    }

    fn build(&self, plan: ExecutorPlan<'_>) -> Result<BuiltExecutor, DeviceError> {
        let limits = plan.limits;
        let mut config = MockConfig {
            vocab_size: plan.spec.vocab_size,
            num_pages: limits.num_pages,
            page_size: limits.page_size,
            num_snapshots: limits.recurrent_state.map(|state| state.num_snapshots),
            num_stages: limits.num_pipeline_stages,
            ..self.config.clone()
        };
        if plan.is_draft {
            config.cost = None;
            config.num_stages = 1;
            config.num_snapshots = None;
            config.script = MockScript::default();
        }
        Ok(BuiltExecutor {
            executor: Box::new(MockExecutor::new(config)),
            image: None,
        })
    }
}
