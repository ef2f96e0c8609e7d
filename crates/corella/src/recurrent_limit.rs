//! What a model with recurrent layers changes in the limits and options. It keeps a state for each running
//! request, which takes as much memory however long the request is.

use corella_core::SchedulerConfig;
use corella_model::DecoderSpec;

use crate::kv_plan::display_bytes;
use crate::{Error, KvSpill, LlmOptions};

/// The part of the memory that states of running requests may take.
const SHARE_OF_STATES: u64 = 2;

/// Refuses options that recurrent layers do not work with yet, by their names.
pub(crate) fn check_options(
    options: &LlmOptions,
    draft: Option<&DecoderSpec>,
) -> Result<(), Error> {
    let refused = [
        (
            options.exchanges_kv,
            "its states are not sent between the nodes of a cluster yet",
        ),
        (
            !matches!(options.kv_spill, KvSpill::Bytes(0)),
            "--kv-spill-memory does not keep its states yet: leave it out",
        ),
        (
            !options.pinned_prefixes.is_empty(),
            "--pin-prefix does not keep its states yet: leave it out",
        ),
        (
            options.max_adapter_rank.is_some(),
            "LoRA adapters of such models are not supported yet: start without --enable-lora",
        ),
    ];
    if let Some((_, why)) = refused.into_iter().find(|(is_asked, _)| *is_asked) {
        return Err(Error::Config(format!(
            "the model has recurrent layers: {why}"
        )));
    }
    match draft {
        Some(spec) if spec.is_recurrent() => Err(Error::Config(String::from(
            "the draft model has recurrent layers, which cannot draft yet: choose another one, or \
             `--speculate ngram`",
        ))),
        _ => Ok(()),
    }
}

/// Lets only as many requests run as have room for their states in half of the memory that weights leave.
pub(crate) fn set_limits(
    scheduler: &mut SchedulerConfig,
    state_bytes: u64,
    available_bytes: u64,
) -> Result<(), Error> {
    let room = available_bytes / SHARE_OF_STATES;
    let most = u32::try_from(room / state_bytes).unwrap_or(u32::MAX);
    if most == 0 {
        return Err(Error::Config(format!(
            "the recurrent state of a request takes {}, and half of the memory that the weights leave \
             is {}",
            display_bytes(state_bytes),
            display_bytes(room)
        )));
    }
    if most < scheduler.max_num_seqs {
        tracing::warn!(
            "up to {most} requests run at the same time, not --max-num-seqs {}: the recurrent state of \
             one takes {}",
            scheduler.max_num_seqs,
            display_bytes(state_bytes)
        );
        scheduler.max_num_seqs = most;
    }
    // Prefixes are reused where a state was kept, which the scheduler does not plan yet.
    scheduler.enable_prefix_caching = false;
    Ok(())
}
