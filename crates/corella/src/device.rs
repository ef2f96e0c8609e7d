//! From a checkpoint and options to an executor with its KV pages.

use corella_core::{SchedulerConfig, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, kv_page_bytes};
use corella_model::{
    Checkpoint, DType, DecoderWeights, Executor, ExecutorInfo, KvFormat, MockConfig, MockEnd,
    MockExecutor, WeightFormat,
};
use corella_text::Tokenizer;

use crate::kv_plan::{KvDemand, KvPlan, available_bytes};
use crate::{Device, Error, LlmOptions, TokenCost};

pub(crate) struct Loaded {
    pub executor: Box<dyn Executor>,
    pub scheduler: SchedulerConfig,
    pub hardware: Hardware,
}

/// What computes, and in which types.
#[derive(Clone, Debug)]
pub struct Hardware {
    pub executor: ExecutorInfo,
    pub num_stages: usize,
    pub weight_format: WeightFormat,
    pub kv_format: KvFormat,
    pub num_kv_pages: u32,
    pub page_size: u32,
    pub kv_bytes: u64,
}

impl Hardware {
    pub fn weight_format_name(&self) -> &'static str {
        match self.weight_format {
            WeightFormat::Float(dtype) => dtype_name(dtype),
            WeightFormat::Int8 => "int8",
            WeightFormat::Int4 { .. } => "int4",
        }
    }

    pub fn kv_format_name(&self) -> &'static str {
        match self.kv_format {
            KvFormat::Float(dtype) => dtype_name(dtype),
            KvFormat::Int8 => "int8",
        }
    }
}

pub(crate) fn load(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    options: &LlmOptions,
) -> Result<Loaded, Error> {
    let spec = &checkpoint.config().spec;
    let mut scheduler = options.scheduler.clone();
    scheduler
        .validate()
        .map_err(|error| Error::Config(error.0))?;
    let weights = match options.device {
        Device::Cpu => Some(checkpoint.weights()?),
        Device::Mock => None,
    };
    let stored = weights.as_ref().map(DecoderWeights::format);
    let weight_format = options
        .weight_format
        .or(stored)
        .unwrap_or(WeightFormat::Float(DType::F32));
    let kv_format = options
        .kv_format
        .unwrap_or(KvFormat::Float(match weight_format {
            WeightFormat::Float(DType::F32) => DType::F32,
            _ => DType::Bf16,
        }));
    let page_bytes = kv_page_bytes(spec, scheduler.page_size, kv_format) as u64;
    let packed_bytes = weight_format.num_bytes(TokenCost::num_weights(spec)) as u64;
    let plan = KvPlan::new(&KvDemand {
        page_size: scheduler.page_size,
        page_bytes,
        max_position: spec.max_position,
        max_num_seqs: scheduler.max_num_seqs,
        max_model_len: options.max_model_len,
        kv_cache_bytes: options.kv_cache_bytes,
        available_bytes: available_bytes().saturating_sub(packed_bytes),
    })?;
    scheduler.num_pages = plan.num_pages;
    scheduler.max_model_len = plan.max_model_len;
    if !options.pinned_prefixes.is_empty() {
        let share = u64::from(plan.num_pages) * u64::from(options.max_pinned_share);
        scheduler.max_pinned_pages = (share / u64::from(SchedulerConfig::RATIO_ONE)) as u32;
    }

    let num_stages = scheduler.num_pipeline_stages as usize;
    if options.device == Device::Cpu && num_stages > spec.num_layers {
        return Err(Error::Config(format!(
            "--pipeline-parallel-size is {num_stages}, and the model has {} layers",
            spec.num_layers
        )));
    }
    let executor: Box<dyn Executor> = match weights {
        Some(weights) => {
            let config = CpuConfig {
                num_threads: options.num_threads.unwrap_or_else(num_cores),
                pin_threads: options.pin_threads,
                weight_format: options.weight_format,
                kv_format,
                num_pages: scheduler.num_pages,
                page_size: scheduler.page_size,
                max_num_seqs: scheduler.max_num_seqs,
                max_num_batched_tokens: scheduler.max_num_batched_tokens,
                max_model_len: scheduler.max_model_len,
                isa: options.isa,
                num_stages,
                profile: options.profile.clone(),
            };
            Box::new(CpuExecutor::new(spec.clone(), weights, config)?)
        }
        None => {
            let mut mock = mock_config(checkpoint, tokenizer, &scheduler);
            mock.cost = options.mock_cost.clone();
            mock.num_stages = scheduler.num_pipeline_stages;
            Box::new(MockExecutor::new(mock))
        }
    };
    let hardware = Hardware {
        executor: executor.info(),
        num_stages,
        weight_format,
        kv_format,
        num_kv_pages: scheduler.num_pages,
        page_size: scheduler.page_size,
        kv_bytes: page_bytes * u64::from(scheduler.num_pages),
    };
    Ok(Loaded {
        executor,
        scheduler,
        hardware,
    })
}

fn num_cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Answers are words of the model's vocabulary, some fifty of them.
fn mock_config(
    checkpoint: &Checkpoint,
    tokenizer: &Tokenizer,
    limits: &SchedulerConfig,
) -> MockConfig {
    const END_PROBABILITY: f64 = 0.02;
    let config = checkpoint.config();
    let mut mock = MockConfig::new(config.spec.vocab_size, limits.num_pages, limits.page_size);
    mock.drawable = (0..config.spec.vocab_size as TokenId)
        .filter(|&id| {
            let Some([b' ', word @ ..]) = tokenizer.token_bytes(id) else {
                return false;
            };
            !word.is_empty() && word.iter().all(u8::is_ascii_lowercase)
        })
        .collect();
    mock.end = config.eos_token_ids.first().map(|&token| MockEnd {
        token,
        probability: END_PROBABILITY,
        at_output: None,
    });
    mock
}

fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
    }
}
