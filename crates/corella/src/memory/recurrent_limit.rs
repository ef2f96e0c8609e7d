//! Changes limits and options for a recurrent model, which keeps a state of constant size for each running request.

use corella_core::{RecurrentState, SchedulerConfig};
use corella_model::DecoderSpec;

use crate::error::display_bytes::display_bytes;
use crate::memory::kv_plan::KvDemand;
use crate::{Error, KvSpill, LlmOptions};

/// States of running requests take at most the memory that the weights leave, divided by this.
const SHARE_OF_STATES: u64 = 2;
/// Snapshots take at most the KV cache's memory, divided by this.
const SHARE_OF_SNAPSHOTS: u64 = 4;
/// Limits the snapshots for each running request, besides those along its prompt.
const SNAPSHOTS_OF_REQUEST: u64 = 8;
/// Snapshots along a prompt take the memory of its keys and values divided by this, unless their distance would exceed
/// `MAX_DISTANCE` or fall below `MIN_DISTANCE`.
const SHARE_OF_ROWS: u64 = 8;
/// Limits the tokens between two snapshots of a long prompt, for states of any size. A further snapshot is at the
/// prompt's end.
const MAX_DISTANCE: u32 = 2048;
/// The least number of tokens between two snapshots of a long prompt. A lone prompt's steps are no longer than this
/// distance, and each step reads all weights.
const MIN_DISTANCE: u32 = 256;
/// A snapshot after a branch or an answer must save at least this many tokens.
const LEAST_DISTANCE: u32 = 64;

/// Refuses options that recurrent layers do not support yet. The error names the option.
pub(crate) fn check_options(
    options: &LlmOptions,
    draft: Option<&DecoderSpec>,
) -> Result<(), Error> {
    let refused = [
        (
            // The default, which spills nothing with recurrent layers, is not refused.
            !matches!(
                options.kv_spill,
                KvSpill::Bytes(0) | KvSpill::QuarterOfCache
            ),
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

/// Limits the running requests to the states that fit into half of the memory left by the weights.
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
        snapshot_interval: { MAX_DISTANCE / scheduler.page_size }.max(1),
        least_distance: { LEAST_DISTANCE / scheduler.page_size }.max(1),
    });
    Ok(())
}

/// Takes a part of the KV cache's memory for snapshots: copies of states, from which requests with the same beginning
/// continue. A block's keys and values take `block_bytes`.
///
/// A cluster node also sends and receives states in snapshots, and has at least enough for two requests.
pub(crate) fn set_snapshots(
    scheduler: &mut SchedulerConfig,
    demand: &mut KvDemand,
    (state_bytes, block_bytes): (u64, u64),
    exchanges_kv: bool,
) {
    let page_size = scheduler.page_size;
    let Some(state) = scheduler.recurrent_state.as_mut() else {
        return;
    };
    if !scheduler.enable_prefix_caching && !exchanges_kv {
        return;
    }
    state.snapshot_interval = snapshot_interval(state_bytes, block_bytes, page_size);
    state.least_distance = state.least_distance.min(state.snapshot_interval);
    let cache_bytes = demand.kv_cache_bytes.unwrap_or(demand.default_bytes);
    // A running request has about one snapshot after its prompt and one after its answer, for the next turn.
    let of_requests = u64::from(scheduler.max_num_seqs).saturating_mul(SNAPSHOTS_OF_REQUEST);
    let of_rows = cache_bytes / block_bytes.max(1) / u64::from(state.snapshot_interval);
    let useful = of_requests.saturating_add(of_rows);
    let least = if exchanges_kv { 2 } else { 0 };
    let num_snapshots = (cache_bytes / SHARE_OF_SNAPSHOTS / state_bytes).min(useful);
    let num_snapshots = num_snapshots.max(least);
    state.num_snapshots = u32::try_from(num_snapshots).unwrap_or(u32::MAX);
    let taken = u64::from(state.num_snapshots) * state_bytes;
    demand.default_bytes = demand.default_bytes.saturating_sub(taken);
    demand.kv_cache_bytes = demand
        .kv_cache_bytes
        .map(|bytes| bytes.saturating_sub(taken));
    demand.limits.recurrent_state = scheduler.recurrent_state;
}

/// Returns the number of blocks between two snapshots along a prompt. A state of short convolutions is as large as the
/// keys and values of a few tokens. A state of gated delta networks is as large as the keys and values of thousands of
/// tokens.
fn snapshot_interval(state_bytes: u64, block_bytes: u64, page_size: u32) -> u32 {
    let least = (MIN_DISTANCE / page_size).max(1);
    let most = (MAX_DISTANCE / page_size).max(1);
    let num_blocks = state_bytes
        .saturating_mul(SHARE_OF_ROWS)
        .div_ceil(block_bytes.max(1));
    u32::try_from(num_blocks).unwrap_or(most).clamp(least, most)
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

    /// The distance follows from the bytes of states and rows, between 256 and 2,048 tokens. LFM2 1.2B has 10
    /// convolutions of 2,048 channels that keep two inputs in f32, and 6 layers with 8 heads of 64 in bf16; Qwen3.5 4B
    /// has 24 gated delta networks of 32 matrices of 128 x 128, and 8 layers with 4 heads of 256.
    #[test]
    fn small_states_are_kept_more_often() {
        let row = |num_layers: u64, num_heads: u64, dim: u64| num_layers * 2 * num_heads * dim * 2;
        let convolutions = 10 * 2 * 2048 * 4;
        assert_eq!(snapshot_interval(convolutions, 16 * row(6, 8, 64), 16), 16);
        assert_eq!(snapshot_interval(convolutions, 32 * row(6, 8, 64), 32), 8);
        let matrices = 24 * 32 * 128 * 128 * 4;
        assert_eq!(snapshot_interval(matrices, 16 * row(8, 4, 256), 16), 128);
        // A snapshot of 5,001 bytes is at most an eighth of 41 blocks of 1,000 bytes.
        assert_eq!(snapshot_interval(5001, 1000, 16), 41);
        // If a page is longer than the distance, there is a snapshot after each block.
        assert_eq!(snapshot_interval(1, 1000, 512), 1);
        assert_eq!(snapshot_interval(u64::MAX, 1, 4096), 1);
    }

    #[test]
    fn what_states_do_not_work_with_is_refused_by_name() {
        let mut options = LlmOptions::default();
        assert!(check_options(&options, None).is_ok());
        options.kv_spill = KvSpill::Bytes(1);
        let refusal = check_options(&options, None).unwrap_err().to_string();
        assert!(refusal.contains("--kv-spill-memory"), "{refusal}");
        options = LlmOptions::default();
        // The default of a cluster node.
        options.exchanges_kv = true;
        options.kv_spill = KvSpill::QuarterOfCache;
        assert!(check_options(&options, None).is_ok());
        options.max_adapter_rank = Some(8);
        let refusal = check_options(&options, None).unwrap_err().to_string();
        assert!(refusal.contains("--enable-lora"), "{refusal}");
    }
}
