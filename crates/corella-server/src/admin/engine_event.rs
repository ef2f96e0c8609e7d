//! The content of `/engine/events` as JSON. The page `engine-events.md` of the book describes each field.

use corella_core::{PageMap, PageState, RequestStatus, RequestView};
use corella_engine::{EngineSnapshot, EngineState, StepRecord};
use serde::{Serialize, Serializer};

use crate::call::recent_latency::LatencySummary;
use crate::state::cluster_status::ClusterStatus;
use crate::state::server_state::ServerState;

/// The first event of a stream: facts that do not change while the server runs.
#[derive(Serialize)]
pub struct ServerEvent<'a> {
    version: &'static str,
    model: &'a str,
    started_unix_s: u64,
    interval_ms: u64,
    page_size: u32,
    num_pages: u32,
    max_model_len: u32,
    max_num_seqs: u32,
    max_num_batched_tokens: u32,
    max_queued_requests: u32,
    max_logprobs: u32,
}

/// One snapshot.
#[derive(Serialize)]
pub struct SnapshotEvent {
    /// Counts the snapshots. A gap shows a reader that it was too slow for some.
    pub number: u64,
    /// Time since the engine started.
    time_ms: f64,
    state: StateName,
    requests: Requests,
    kv: Kv,
    steps: Vec<Step>,
    latency: Latency,
    totals: Totals,
    /// `None` for a node that serves alone.
    cluster: Option<ClusterStatus>,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum StateName {
    Ready,
    Draining,
    Lost,
}

#[derive(Serialize)]
struct Requests {
    running: usize,
    waiting: usize,
    receiving: usize,
    list: Vec<Request>,
}

#[derive(Serialize)]
struct Request {
    id: u64,
    status: &'static str,
    age_ms: u64,
    prompt_tokens: u32,
    cached_tokens: u32,
    computed_tokens: u32,
    output_tokens: u32,
    max_tokens: u32,
    pages: usize,
    preemptions: u32,
}

#[derive(Serialize)]
struct Kv {
    pages: usize,
    free: usize,
    cached: usize,
    in_use: usize,
    received: usize,
    held: usize,
    pinned: usize,
    spilled: usize,
    map: Map,
}

#[derive(Serialize)]
struct Map {
    pages_per_cell: u32,
    #[serde(serialize_with = "as_letters")]
    cells: Vec<PageState>,
}

#[derive(Serialize)]
struct Step {
    step: u64,
    steps: u32,
    /// Time from the return of the last step to the snapshot.
    ago_ms: f64,
    ms: f64,
    prefill_tokens: u64,
    decode_tokens: u64,
    draft_tokens: u64,
    requests: u32,
}

/// Latency since the previous snapshot. `None` where no token came.
#[derive(Serialize)]
pub struct Latency {
    pub time_to_first_token: Option<LatencySummary>,
    pub inter_token: Option<LatencySummary>,
}

/// Counts since the engine started.
#[derive(Serialize)]
struct Totals {
    steps: u64,
    failed_steps: u64,
    prompt_tokens: u64,
    generated_tokens: u64,
    prefix_query_tokens: u64,
    prefix_hit_tokens: u64,
    /// Cached blocks loaded from other nodes.
    fetched_blocks: u64,
    draft_tokens: u64,
    accepted_draft_tokens: u64,
    preemptions: u64,
    evicted_pages: u64,
    finished_requests: u64,
    failed_requests: u64,
    aborted_requests: u64,
    refused_requests: u64,
}

impl<'a> ServerEvent<'a> {
    pub fn of(state: &'a ServerState, interval_ms: u64) -> Self {
        let limits = state.engine.limits();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            model: state.config.model_name(),
            started_unix_s: state.started_unix_s,
            interval_ms,
            page_size: limits.page_size,
            num_pages: limits.num_pages,
            max_model_len: state.config.max_model_len,
            max_num_seqs: limits.max_num_seqs,
            max_num_batched_tokens: limits.max_num_batched_tokens,
            max_queued_requests: limits.max_queued_requests,
            max_logprobs: state.config.max_logprobs,
        }
    }
}

impl SnapshotEvent {
    pub fn of(
        state: &ServerState,
        number: u64,
        snapshot: EngineSnapshot,
        latency: Latency,
    ) -> Self {
        let now_us = snapshot.time.as_micros() as u64;
        let stats = &snapshot.stats;
        let scheduler = &stats.scheduler;
        Self {
            number,
            time_ms: now_us as f64 / 1000.0,
            state: match state.engine.state() {
                EngineState::Ready if !state.is_draining() => StateName::Ready,
                EngineState::Ready | EngineState::Draining => StateName::Draining,
                EngineState::Lost(_) => StateName::Lost,
            },
            requests: Requests {
                running: scheduler.num_running,
                waiting: scheduler.num_waiting,
                receiving: scheduler.num_receiving + scheduler.num_arrived,
                list: { snapshot.requests.iter() }
                    .map(|view| Request::of(view, now_us))
                    .collect(),
            },
            steps: { snapshot.steps.iter() }
                .map(|step| Step::of(step, now_us))
                .collect(),
            latency,
            cluster: state.roles.as_ref().and_then(|roles| roles.cluster()),
            totals: Totals {
                steps: stats.num_steps,
                failed_steps: stats.num_failed_steps,
                prompt_tokens: scheduler.num_prompt_tokens,
                generated_tokens: scheduler.num_generated_tokens,
                prefix_query_tokens: scheduler.num_prefix_query_tokens,
                prefix_hit_tokens: scheduler.num_prefix_hit_tokens,
                fetched_blocks: scheduler.num_fetched_blocks,
                draft_tokens: scheduler.num_draft_tokens,
                accepted_draft_tokens: scheduler.num_accepted_draft_tokens,
                preemptions: scheduler.num_preemptions,
                evicted_pages: scheduler.num_evicted_pages,
                finished_requests: stats.num_finished_stop + stats.num_finished_length,
                failed_requests: stats.num_finished_error,
                aborted_requests: stats.num_finished_abort,
                refused_requests: stats.num_refused,
            },
            kv: Kv {
                pages: scheduler.num_pages,
                free: scheduler.num_free_pages,
                cached: scheduler.num_cached_pages,
                in_use: scheduler.num_in_use_pages,
                received: snapshot.page_map.num_received,
                held: scheduler.num_held_pages,
                pinned: scheduler.num_pinned_pages,
                spilled: scheduler.num_spilled_pages,
                map: Map::of(snapshot.page_map),
            },
        }
    }
}

impl Request {
    fn of(view: &RequestView, now_us: u64) -> Self {
        Self {
            id: view.id.0,
            status: match view.status {
                RequestStatus::Waiting => "waiting",
                RequestStatus::Preempted => "preempted",
                RequestStatus::Receiving => "receiving",
                RequestStatus::Prefill => "prefill",
                RequestStatus::Decode => "decode",
            },
            age_ms: now_us.saturating_sub(view.arrival_us) / 1000,
            prompt_tokens: view.num_prompt_tokens,
            cached_tokens: view.num_cached_tokens,
            computed_tokens: view.num_computed_tokens,
            output_tokens: view.num_output_tokens,
            max_tokens: view.max_tokens,
            pages: view.num_pages,
            preemptions: view.num_preemptions,
        }
    }
}

impl Step {
    fn of(record: &StepRecord, now_us: u64) -> Self {
        let ago_us = now_us.saturating_sub(record.ended.as_micros() as u64);
        Self {
            step: record.first.0,
            steps: record.num_steps,
            ago_ms: ago_us as f64 / 1000.0,
            ms: record.step_time.as_micros() as f64 / 1000.0,
            prefill_tokens: record.num_prefill_tokens,
            decode_tokens: record.num_decode_tokens,
            draft_tokens: record.num_draft_tokens,
            requests: record.max_requests,
        }
    }
}

impl Map {
    fn of(map: PageMap) -> Self {
        Self {
            pages_per_cell: map.num_pages_per_cell,
            cells: map.cells,
        }
    }
}

/// Writes a letter for each cell, so that two thousand of them take two kilobytes.
fn as_letters<S: Serializer>(cells: &[PageState], serializer: S) -> Result<S::Ok, S::Error> {
    let letters: String = cells
        .iter()
        .map(|state| match state {
            PageState::Free => '.',
            PageState::Cached => 'c',
            PageState::InUse => 'u',
            PageState::Received => 'r',
            PageState::Held => 'h',
        })
        .collect();
    serializer.serialize_str(&letters)
}
