//! What a model with recurrent layers changes in the limits and options. It keeps a state for each running
//! request, which takes as much memory however long the request is.

use corella_core::{RecurrentState, SchedulerConfig};
use corella_model::DecoderSpec;

use crate::kv_plan::{KvDemand, display_bytes};
use crate::{Error, KvSpill, LlmOptions};

/// The part of the memory that states of running requests may take.
const SHARE_OF_STATES: u64 = 2;
/// The part of the KV cache's memory that snapshots take.
const SHARE_OF_SNAPSHOTS: u64 = 4;
/// The most snapshots for each request that may run.
const SNAPSHOTS_OF_REQUEST: u64 = 8;
/// A long prompt has a snapshot behind so many tokens, beside the one at its end.
const SNAPSHOT_DISTANCE: u32 = 2048;
/// The tokens that a snapshot behind a branch or an answer has to save, at least.
const LEAST_DISTANCE: u32 = 64;

/// Refuses options that recurrent layers do not work with yet, by their names.
pub(crate) fn check_options(
    options: &LlmOptions,
    draft: Option<&DecoderSpec>,
) -> Result<(), Error> {
    let refused = [
        (
            options.exchanges_kv,
            "its states are not sent between the nodes of a cluster yet: start it without \
             --role, --registry and --cluster-listen",
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
    scheduler.set_recurrent_state(RecurrentState {
        num_snapshots: 0,
        snapshot_interval: { SNAPSHOT_DISTANCE / scheduler.page_size }.max(1),
        least_distance: { LEAST_DISTANCE / scheduler.page_size }.max(1),
    });
    Ok(())
}

/// Takes a part of the memory of the KV cache for snapshots: copies of states, from which requests that begin
/// alike go on.
pub(crate) fn set_snapshots(
    scheduler: &mut SchedulerConfig,
    demand: &mut KvDemand,
    state_bytes: u64,
) {
    let Some(state) = scheduler.recurrent_state.as_mut() else {
        return;
    };
    if !scheduler.enable_prefix_caching {
        return;
    }
    let cache_bytes = demand.kv_cache_bytes.unwrap_or(demand.default_bytes);
    // A running request has about one behind its prompt, and its next turn finds it.
    let useful = u64::from(scheduler.max_num_seqs).saturating_mul(SNAPSHOTS_OF_REQUEST);
    let num_snapshots = (cache_bytes / SHARE_OF_SNAPSHOTS / state_bytes).min(useful);
    state.num_snapshots = u32::try_from(num_snapshots).unwrap_or(u32::MAX);
    let taken = u64::from(state.num_snapshots) * state_bytes;
    demand.default_bytes = demand.default_bytes.saturating_sub(taken);
    demand.kv_cache_bytes = demand
        .kv_cache_bytes
        .map(|bytes| bytes.saturating_sub(taken));
    demand.limits.recurrent_state = scheduler.recurrent_state;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_take_half_of_the_memory_at_most() {
        let mut scheduler = SchedulerConfig::new(1, 16, 2);
        scheduler.max_num_seqs = 8;
        set_limits(&mut scheduler, 10, 160).unwrap();
        assert_eq!(scheduler.max_num_seqs, 8);
        set_limits(&mut scheduler, 10, 75).unwrap();
        assert_eq!(scheduler.max_num_seqs, 3);
        let state = scheduler.recurrent_state.unwrap();
        assert_eq!((state.num_snapshots, state.snapshot_interval), (0, 128));
        let refusal = set_limits(&mut scheduler, 10 << 20, 19 << 20).unwrap_err();
        assert!(refusal.to_string().contains("10.0 MiB"), "{refusal}");
    }

    #[test]
    fn what_states_do_not_work_with_is_refused_by_name() {
        let mut options = LlmOptions::default();
        assert!(check_options(&options, None).is_ok());
        options.kv_spill = KvSpill::Bytes(1);
        let refusal = check_options(&options, None).unwrap_err().to_string();
        assert!(refusal.contains("--kv-spill-memory"), "{refusal}");
        options = LlmOptions::default();
        options.exchanges_kv = true;
        let refusal = check_options(&options, None).unwrap_err().to_string();
        assert!(refusal.contains("nodes of a cluster"), "{refusal}");
        options = LlmOptions::default();
        options.max_adapter_rank = Some(8);
        let refusal = check_options(&options, None).unwrap_err().to_string();
        assert!(refusal.contains("--enable-lora"), "{refusal}");
    }
}
