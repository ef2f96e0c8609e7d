//! The command `config` of a scenario: the limits of its scheduler.

use corella_core::{
    HeadRoom, KvGroup, PrefillAdmissionPolicy, RecurrentState, SchedulerConfig, SchedulingPolicy,
    Speculation,
};

pub struct ConfigLine {
    pub config: SchedulerConfig,
    /// Whether changes of pages are printed.
    pub show_pages: bool,
}

impl ConfigLine {
    /// Reads the words after `config`.
    pub fn read(words: &[&str]) -> Self {
        let mut config = SchedulerConfig::new(64, 4, 1 << 20);
        config.max_num_seqs = 4;
        config.max_preemptions = 100;
        let mut show_pages = false;
        let (mut pack, mut lookahead, mut force) = (false, 64, 0);
        let mut policy = "fcfs";
        let (mut share, mut min_share, mut num_decay_steps) = (None, None, 0);
        for (key, value) in words.iter().map(|word| word.split_once('=').unwrap()) {
            let number = || value.parse::<u32>().unwrap();
            match key {
                "pages" => config.num_pages = number(),
                "page" => config.page_size = number(),
                "groups" => {
                    let group = |word: &str| KvGroup {
                        window: word.strip_prefix('w').map(|window| window.parse().unwrap()),
                    };
                    config.kv_groups = value.split(',').map(group).collect();
                }
                "snapshots" => config.set_recurrent_state(RecurrentState {
                    num_snapshots: number(),
                    snapshot_interval: u32::MAX,
                    least_distance: u32::MAX,
                }),
                "interval" | "distance" => {
                    let state = config.recurrent_state.as_mut().expect("snapshots");
                    match key {
                        "interval" => state.snapshot_interval = number(),
                        _ => state.least_distance = number(),
                    }
                }
                "context" => config.max_model_len = number(),
                "seqs" => config.max_num_seqs = number(),
                "budget" => config.max_num_batched_tokens = number(),
                "prefill" => config.max_prefill_tokens = number(),
                "chunk" => config.max_chunk_tokens = number(),
                "threshold" => config.long_prefill_token_threshold = number(),
                "prefill_seqs" => config.max_prefill_seqs = number(),
                "decode_seqs" => config.max_decode_seqs = number(),
                "fetched" => config.max_fetched_pages = number(),
                "served" => config.max_served_pages = number(),
                "held" => config.max_held_pages = number(),
                "spill" => config.max_spilled_pages = number(),
                "lease" => config.hold_lease_us = number().into(),
                "pinned" => config.max_pinned_pages = number(),
                "retained" => config.max_retained_pages = number(),
                "queue" => config.max_queued_requests = number(),
                "cache" => config.enable_prefix_caching = value == "on",
                "chunked" => config.enable_chunked_prefill = value == "on",
                "policy" => policy = value,
                "pack" => pack = value == "on",
                "lookahead" => lookahead = number(),
                "force_fifo" => force = number(),
                "passed_over" => config.max_passed_over = number(),
                "head_room" => match value {
                    "estimate" => config.head_room = HeadRoom::Estimate,
                    "limit" => config.head_room = HeadRoom::Limit,
                    _ => share = Some(number() * HeadRoom::ONE / 100),
                },
                "min_share" => min_share = Some(number() * HeadRoom::ONE / 100),
                "decay_steps" => num_decay_steps = number(),
                "queue_tokens" => config.max_queued_tokens = number().into(),
                "slo" => config.enable_slo_admission = value == "on",
                "preemptions" => config.max_preemptions = number(),
                "depth" => config.max_inflight_steps = number(),
                "stages" => config.num_pipeline_stages = number(),
                "drafts" => {
                    config.speculation = Speculation::Ngram;
                    config.max_draft_tokens = number();
                }
                "draw_cost" => {
                    let draw_cost = number();
                    config.speculation = Speculation::Draft { draw_cost };
                }
                "show" => show_pages = value == "pages",
                _ => panic!("unknown limit {key}"),
            }
        }
        if let Some(share) = share {
            config.head_room = HeadRoom::Share {
                share,
                min_share: min_share.unwrap_or(share),
                num_decay_steps,
            };
        }
        config.scheduling_policy = match policy {
            "fcfs" => SchedulingPolicy::Fcfs,
            "priority" => SchedulingPolicy::Priority,
            "lpm" => SchedulingPolicy::LongestPrefix { lookahead },
            "sjf" => SchedulingPolicy::ShortestFirst { lookahead },
            _ => panic!("unknown policy {policy}"),
        };
        if pack {
            config.prefill_admission_policy = PrefillAdmissionPolicy::Pack {
                lookahead,
                force_fifo_every: force,
            };
        }
        Self { config, show_pages }
    }
}
