//! Changes limits and options for an encoder, which reads a text whole, in one step, and keeps no state of it.

use corella_core::{SchedulerConfig, Speculation};
use corella_model::{DecoderSpec, ModelConfig, SentenceConfig};

use crate::memory::kv_plan::KvDemand;
use crate::{Error, LlmOptions};

/// Sets `max_model_len` to the longest text of the encoder, unless the options set it.
pub(crate) fn with_context(
    options: &LlmOptions,
    config: &ModelConfig,
    sentence: &SentenceConfig,
) -> LlmOptions {
    let mut options = options.clone();
    if config.spec.encoder.is_some()
        && let Some(max_len) = sentence.max_len
    {
        let max_len = max_len.min(config.spec.max_position);
        options.max_model_len = options.max_model_len.or(u32::try_from(max_len).ok());
    }
    options
}

/// Refuses options without a use for an encoder. The error names the option.
pub(crate) fn check_options(options: &LlmOptions) -> Result<(), Error> {
    let has_drafts =
        options.draft_model.is_some() || !matches!(options.scheduler.speculation, Speculation::Off);
    let refused = [
        (has_drafts, "nothing is drawn that could be guessed"),
        (
            !options.pinned_prefixes.is_empty(),
            "--pin-prefix keeps the KV of a text, and an encoder has none",
        ),
        (
            options.exchanges_kv,
            "nodes of a cluster exchange the KV of texts, and an encoder has none",
        ),
        (
            options.max_adapter_rank.is_some(),
            "LoRA adapters of encoders are not supported yet",
        ),
    ];
    match refused.into_iter().find(|(is_asked, _)| *is_asked) {
        Some((_, why)) => Err(Error::Config(format!("the model is an encoder: {why}"))),
        None => Ok(()),
    }
}

/// Sets limits so that one step computes each text. Texts share steps as far as their tokens fit into
/// `max_prefill_tokens`. A longer text has a step of its own.
pub(crate) fn set_limits(
    scheduler: &mut SchedulerConfig,
    spec: &DecoderSpec,
    options: &LlmOptions,
) {
    let max_position = u32::try_from(spec.max_position).unwrap_or(u32::MAX);
    let longest = options
        .max_model_len
        .unwrap_or(max_position)
        .min(max_position);
    scheduler.enable_prefix_caching = false;
    scheduler.enable_chunked_prefill = false;
    // An encoder never decodes, but the scheduler refuses a limit of 0, so a step needs a token for one decode.
    scheduler.max_decode_seqs = 1;
    scheduler.max_prefill_tokens = scheduler
        .max_prefill_tokens
        .min(scheduler.max_num_batched_tokens);
    scheduler.max_num_batched_tokens = scheduler
        .max_num_batched_tokens
        .max(longest)
        .saturating_add(1);
}

/// Sets pages for the tokens of the steps in flight. The pages hold the keys and values of one layer, and are free when
/// their step has returned.
pub(crate) fn set_demand(demand: &mut KvDemand) {
    let limits = &demand.limits;
    let num_step_pages = limits.max_num_batched_tokens.div_ceil(limits.page_size);
    // The last page of each text may be partly filled.
    let num_pages = u64::from(num_step_pages) + u64::from(limits.max_num_seqs);
    let num_bytes = num_pages * u64::from(limits.max_inflight_steps) * demand.page_bytes;
    let num_bytes = num_bytes.min(demand.default_bytes);
    demand.kv_cache_bytes.get_or_insert(num_bytes);
}
