//! The content of `/engine/events` as JSON. The page `engine-events.md` of the book describes each field.

use corella_core::{PageMap, PageState, RequestStatus, RequestView};
use corella_engine::{EngineSnapshot, EngineState, KvDiskStats, StepRecord};
use serde_json::{Value, json};

use crate::call::recent_latency::RecentLatency;
use crate::state::server_state::ServerState;

/// Returns the first event of a stream: facts that do not change while the server runs.
pub fn server_event(state: &ServerState, interval_ms: u64) -> Value {
    let limits = state.engine.limits();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model": state.config.model_name(),
        "started_unix_s": state.parts.started_unix_s,
        "interval_ms": interval_ms,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "max_model_len": state.config.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_queued_requests": limits.max_queued_requests,
        "max_logprobs": state.config.max_logprobs,
    })
}

/// Returns the event of a snapshot, with the latency since the last snapshot. `number` counts the snapshots: a gap
/// shows that the reader was too slow and has missed some.
pub fn snapshot_event(
    state: &ServerState,
    number: u64,
    snapshot: &EngineSnapshot,
    recent: &RecentLatency,
) -> Value {
    let now_us = snapshot.time.as_micros() as u64;
    let scheduler = &snapshot.stats.scheduler;
    let requests = snapshot.requests.iter();
    let steps = snapshot.steps.iter();
    json!({
        "number": number,
        "time_ms": now_us as f64 / 1000.0,
        "state": match state.engine.state() {
            EngineState::Ready if !state.parts.is_draining() => "ready",
            EngineState::Ready | EngineState::Draining => "draining",
            EngineState::Lost(_) => "lost",
        },
        "requests": {
            "running": scheduler.num_running,
            "waiting": scheduler.num_waiting,
            "receiving": scheduler.num_receiving + scheduler.num_arrived,
            "list": requests.map(|view| request(view, now_us)).collect::<Vec<_>>(),
        },
        "kv": kv(snapshot),
        "steps": steps.map(|record| step(record, now_us)).collect::<Vec<_>>(),
        // `null` if no token came since the last snapshot.
        "latency": {
            "time_to_first_token": recent.time_to_first_token.take(),
            "inter_token": recent.inter_token.take(),
        },
        "totals": totals(snapshot),
        // `null` for a node that serves alone.
        "cluster": state.roles.as_ref().and_then(|roles| roles.cluster()),
    })
}

fn kv(snapshot: &EngineSnapshot) -> Value {
    let scheduler = &snapshot.stats.scheduler;
    json!({
        "pages": scheduler.num_pages,
        "free": scheduler.num_free_pages,
        "cached": scheduler.num_cached_pages,
        "in_use": scheduler.num_in_use_pages,
        "received": snapshot.page_map.num_received,
        "held": scheduler.num_held_pages,
        "pinned": scheduler.num_pinned_pages,
        "spilled": scheduler.num_spilled_pages,
        // `null` without a disk.
        "disk": snapshot.stats.kv_disk.as_ref().map(disk),
        "map": {
            "pages_per_cell": snapshot.page_map.num_pages_per_cell,
            "cells": letters(&snapshot.page_map),
        },
    })
}

fn disk(disk: &KvDiskStats) -> Value {
    json!({
        "on": disk.is_on(),
        // Whether the disk is host memory beside a GPU.
        "in_memory": disk.is_in_memory,
        "off_disks": disk.num_off,
        "pages": disk.num_pages,
        "max_pages": disk.max_pages,
        "hits": disk.num_read,
        "read_bytes": disk.bytes_read,
        "written_bytes": disk.bytes_written,
    })
}

/// Counts since the engine started.
fn totals(snapshot: &EngineSnapshot) -> Value {
    let stats = &snapshot.stats;
    let scheduler = &stats.scheduler;
    json!({
        "steps": stats.num_steps,
        "failed_steps": stats.num_failed_steps,
        "prompt_tokens": scheduler.num_prompt_tokens,
        "generated_tokens": scheduler.num_generated_tokens,
        "prefix_query_tokens": scheduler.num_prefix_query_tokens,
        "prefix_hit_tokens": scheduler.num_prefix_hit_tokens,
        "fetched_blocks": scheduler.num_fetched_blocks,
        "draft_tokens": scheduler.num_draft_tokens,
        "accepted_draft_tokens": scheduler.num_accepted_draft_tokens,
        "preemptions": scheduler.num_preemptions,
        "evicted_pages": scheduler.num_evicted_pages,
        "finished_requests": stats.num_finished_stop + stats.num_finished_length,
        "failed_requests": stats.num_finished_error,
        "aborted_requests": stats.num_finished_abort,
        "refused_requests": stats.num_refused,
    })
}

fn request(view: &RequestView, now_us: u64) -> Value {
    json!({
        "id": view.id.0,
        "status": match view.status {
            RequestStatus::Waiting => "waiting",
            RequestStatus::Preempted => "preempted",
            RequestStatus::Receiving => "receiving",
            RequestStatus::Prefill => "prefill",
            RequestStatus::Decode => "decode",
        },
        "age_ms": now_us.saturating_sub(view.arrival_us) / 1000,
        "prompt_tokens": view.num_prompt_tokens,
        "cached_tokens": view.num_cached_tokens,
        "computed_tokens": view.num_computed_tokens,
        "output_tokens": view.num_output_tokens,
        "max_tokens": view.max_tokens,
        "pages": view.num_pages,
        "preemptions": view.num_preemptions,
    })
}

fn step(record: &StepRecord, now_us: u64) -> Value {
    let ago_us = now_us.saturating_sub(record.ended.as_micros() as u64);
    json!({
        "step": record.first.0,
        "steps": record.num_steps,
        // The time from the return of the record's last step to the snapshot.
        "ago_ms": ago_us as f64 / 1000.0,
        "ms": record.step_time.as_micros() as f64 / 1000.0,
        "prefill_tokens": record.num_prefill_tokens,
        "decode_tokens": record.num_decode_tokens,
        "draft_tokens": record.num_draft_tokens,
        "requests": record.max_requests,
    })
}

/// Writes a letter for each cell, so that two thousand cells take two kilobytes.
fn letters(map: &PageMap) -> String {
    let letter = |state: &PageState| match state {
        PageState::Free => '.',
        PageState::Cached => 'c',
        PageState::InUse => 'u',
        PageState::Received => 'r',
        PageState::Held => 'h',
    };
    map.cells.iter().map(letter).collect()
}
