//! Options of the scheduler: its limits and policies.

use clap::{Args, ValueEnum};
use corella_core::{HeadRoom, PrefillAdmissionPolicy, SchedulerConfig, SchedulingPolicy};

use super::token_count::{ChunkSize, parse_chunk_size, parse_count, parse_large_count};
use crate::{LlmOptions, StepLimits};

#[derive(Args)]
#[command(next_help_heading = "Scheduler")]
pub struct SchedulerArgs {
    /// Maximum number of requests that run at once, each with a part of the KV cache
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = defaults().max_num_seqs)]
    pub max_num_seqs: u32,
    /// Maximum number of tokens in one step, prefill and decode together [default: 512, or more for more than 256
    /// requests at once; with --device cuda, 2048]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub max_num_batched_tokens: Option<u32>,
    /// Maximum number of prefill tokens in one step, all requests together [default: --chunked-prefill-size, but
    /// at most --max-num-batched-tokens]
    #[arg(long, value_name = "TOKENS", value_parser = parse_count)]
    pub max_prefill_tokens: Option<u32>,
    /// Maximum number of prefill tokens of one request in one step; -1 computes every prompt whole, as
    /// --no-chunked-prefill does [default: --max-prefill-tokens]
    #[arg(long, value_name = "TOKENS", value_parser = parse_chunk_size, allow_negative_numbers = true)]
    pub chunked_prefill_size: Option<ChunkSize>,
    /// Maximum number of prefill tokens of one request in a step while other requests have a prompt to
    /// read; 0 disables the limit
    #[arg(long, value_name = "TOKENS", value_parser = parse_count, default_value_t = defaults().long_prefill_token_threshold)]
    pub long_prefill_token_threshold: u32,
    /// Maximum number of requests that prefill in one step [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_prefill_seqs: Option<u32>,
    /// Maximum number of requests that decode in one step; if more are running they take turns
    /// [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_decode_seqs: Option<u32>,
    /// Maximum number of waiting requests, besides those for which a slot is free; further ones get 429
    #[arg(long, value_name = "N", value_parser = parse_count, default_value_t = defaults().max_queued_requests)]
    pub max_queued_requests: u32,
    /// Maximum number of waiting prompt tokens, all requests together; further requests get 429
    #[arg(long, value_name = "TOKENS", value_parser = parse_large_count, default_value_t = defaults().max_queued_tokens)]
    pub max_queued_tokens: u64,
    /// Answer a request with 429 as soon as it can no longer meet its own ttft_slo_ms or
    /// tpot_slo_ms
    #[arg(long)]
    pub slo_admission: bool,
    /// KV pages to keep free for the outputs of running requests: `estimate` expects outputs to be
    /// as long as recent ones were; `limit` keeps enough for the longest possible output, so that
    /// no request is preempted for lack of pages; a number from 0 to 1 keeps enough for that share
    /// of the longest possible output
    #[arg(long, value_name = "estimate|limit|SHARE", value_parser = parse_head_room, default_value = "estimate")]
    pub head_room: HeadRoom,
    /// Compute every prompt whole, in one step
    #[arg(long)]
    pub no_chunked_prefill: bool,
    /// Which waiting request starts next: the first to arrive (fcfs), the most urgent (priority), the
    /// one with the longest cached prefix (lpm), or the one with the least work left (sjf)
    #[arg(long, value_enum, default_value_t)]
    pub scheduling_policy: SchedulingPolicyArg,
    /// Which waiting requests join a step: the first ones (fifo), or the smallest that fit (pack)
    #[arg(long, value_enum, default_value_t)]
    pub prefill_admission_policy: AdmissionPolicyArg,
    /// Number of waiting requests that pack, lpm and sjf choose from
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub prefill_admission_lookahead: u32,
    /// With pack: serve every Nth round in order of arrival; 0 disables this
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub prefill_force_fifo_every: u32,
    /// Start a waiting request next once others have overtaken it in this many steps
    #[arg(long, value_name = "N", default_value_t = defaults().max_passed_over)]
    pub max_passed_over: u32,
    /// Maximum number of steps in flight, up to 16 [default: 1; with --device cuda and without
    /// --speculate, 2]
    #[arg(long, value_name = "N")]
    pub max_inflight_steps: Option<u32>,
    /// Number of pipeline stages; each has its share of the layers and threads, and they work on
    /// different steps
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pipeline_parallel_size: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicyArg {
    #[default]
    Fcfs,
    Priority,
    Lpm,
    Sjf,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum AdmissionPolicyArg {
    #[default]
    Fifo,
    Pack,
}

impl SchedulerArgs {
    /// Sets the limits and policies of `options`, which have the device's values.
    pub fn set(&self, options: &mut LlmOptions) {
        options.gpu_limits = options.gpu_limits.map(|default| self.step_limits(default));
        self.step_limits(StepLimits::of(&options.scheduler))
            .set(&mut options.scheduler);
        let limits = &mut options.scheduler;
        limits.max_num_seqs = self.max_num_seqs;
        limits.long_prefill_token_threshold = self.long_prefill_token_threshold;
        limits.max_prefill_seqs = self.max_prefill_seqs.unwrap_or(u32::MAX);
        limits.max_decode_seqs = self.max_decode_seqs.unwrap_or(u32::MAX);
        limits.max_queued_requests = self.max_queued_requests;
        limits.max_queued_tokens = self.max_queued_tokens;
        limits.enable_slo_admission = self.slo_admission;
        limits.head_room = self.head_room;
        limits.enable_chunked_prefill =
            !self.no_chunked_prefill && self.chunked_prefill_size != Some(ChunkSize::Whole);
        if let Some(ChunkSize::AtMost(num_tokens)) = self.chunked_prefill_size {
            limits.max_chunk_tokens = num_tokens;
        }
        let lookahead = self.prefill_admission_lookahead;
        limits.scheduling_policy = match self.scheduling_policy {
            SchedulingPolicyArg::Fcfs => SchedulingPolicy::Fcfs,
            SchedulingPolicyArg::Priority => SchedulingPolicy::Priority,
            SchedulingPolicyArg::Lpm => SchedulingPolicy::LongestPrefix { lookahead },
            SchedulingPolicyArg::Sjf => SchedulingPolicy::ShortestFirst { lookahead },
        };
        limits.prefill_admission_policy = match self.prefill_admission_policy {
            AdmissionPolicyArg::Fifo => PrefillAdmissionPolicy::Fifo,
            AdmissionPolicyArg::Pack => PrefillAdmissionPolicy::Pack {
                lookahead,
                force_fifo_every: self.prefill_force_fifo_every,
            },
        };
        limits.max_passed_over = self.max_passed_over;
        limits.num_pipeline_stages = self.pipeline_parallel_size;
    }

    /// Returns the given limits, with the device's defaults for the rest.
    fn step_limits(&self, default: StepLimits) -> StepLimits {
        let batched = self.max_num_batched_tokens;
        // By default, a step in which all requests decode still has tokens for prompts.
        let num_decodes = self
            .max_num_seqs
            .min(self.max_decode_seqs.unwrap_or(u32::MAX));
        let of_decodes = num_decodes.saturating_add(default.max_num_batched_tokens / 2);
        let max_num_batched_tokens =
            batched.unwrap_or(default.max_num_batched_tokens.max(of_decodes));
        // In SGLang, one chunk is the whole prefill of a step. So `--chunked-prefill-size` alone also limits the
        // prefill tokens of all prompts in a step.
        let max_prefill_tokens =
            self.max_prefill_tokens
                .unwrap_or(match self.chunked_prefill_size {
                    Some(ChunkSize::AtMost(num_tokens)) => num_tokens.min(max_num_batched_tokens),
                    Some(ChunkSize::Whole) | None => max_num_batched_tokens,
                });
        let inflight = self
            .max_inflight_steps
            .unwrap_or(default.max_inflight_steps);
        StepLimits {
            max_num_batched_tokens,
            max_prefill_tokens,
            max_inflight_steps: inflight.max(self.pipeline_parallel_size),
        }
    }
}

pub fn defaults() -> SchedulerConfig {
    LlmOptions::default().scheduler
}

fn parse_head_room(text: &str) -> Result<HeadRoom, String> {
    match (text, text.parse::<f64>()) {
        ("estimate", _) => Ok(HeadRoom::Estimate),
        ("limit", _) => Ok(HeadRoom::Limit),
        (_, Ok(share)) if (0.0..=1.0).contains(&share) => {
            let share = share * f64::from(HeadRoom::ONE);
            Ok(HeadRoom::fixed_share(share as u32))
        }
        _ => Err("must be `estimate`, `limit` or a number from 0 to 1".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::args::{Cli, Command};

    fn options(arguments: &[&str]) -> LlmOptions {
        let words = [&["corella", "serve"], arguments].concat();
        let Command::Serve(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("another command");
        };
        args.engine.options(&args.model).ok().unwrap()
    }

    /// Returns the limits of tokens in a step, of prefill tokens in a step, and of steps in flight.
    fn numbers(limits: StepLimits) -> [u32; 3] {
        [
            limits.max_num_batched_tokens,
            limits.max_prefill_tokens,
            limits.max_inflight_steps,
        ]
    }

    #[test]
    fn a_gpu_has_larger_steps_and_two_of_them_in_flight() {
        for (arguments, expected) in [
            (&[][..], [512, 512, 1]),
            (&["--device", "cuda"], [2048, 2048, 2]),
            (
                &["--device", "cuda", "--speculate", "ngram"],
                [2048, 2048, 1],
            ),
            (
                &["--device", "cuda", "--max-num-batched-tokens", "300"],
                [300, 300, 2],
            ),
            (
                &["--device", "cuda", "--max-prefill-tokens", "100"],
                [2048, 100, 2],
            ),
            (
                &["--device", "cuda", "--max-inflight-steps", "1"],
                [2048, 2048, 1],
            ),
            (&["--pipeline-parallel-size", "3"], [512, 512, 3]),
            // More than 256 running requests get longer steps, unless an option limits decodes or steps.
            (&["--max-num-seqs", "1000"], [1256, 1256, 1]),
            (
                &["--max-num-seqs", "1000", "--max-decode-seqs", "64"],
                [512, 512, 1],
            ),
            (
                &["--max-num-seqs", "1000", "--max-num-batched-tokens", "512"],
                [512, 512, 1],
            ),
        ] {
            let limits = StepLimits::of(&options(arguments).scheduler);
            assert_eq!(numbers(limits), expected, "{arguments:?}");
        }
    }

    /// Returns the limits of tokens in a step: of all tokens, of all prefill tokens, and of one prompt's prefill
    /// tokens. `None` without chunked prefill.
    fn sizes(arguments: &[&str]) -> Option<[u32; 3]> {
        let limits = options(arguments).scheduler;
        limits.enable_chunked_prefill.then(|| {
            [
                limits.max_num_batched_tokens,
                limits.max_prefill_tokens,
                limits.largest_chunk(),
            ]
        })
    }

    #[test]
    fn a_chunk_is_of_one_prompt_and_the_prefill_of_a_step_of_all() {
        let (chunk, prefill) = ("--chunked-prefill-size", "--max-prefill-tokens");
        for (arguments, expected) in [
            (&[chunk, "400"][..], Some([512, 400, 400])),
            (&[chunk, "400", prefill, "500"], Some([512, 500, 400])),
            (&[prefill, "500", chunk, "400"], Some([512, 500, 400])),
            (&[chunk, "400", prefill, "300"], Some([512, 300, 300])),
            (&[chunk, "1000"], Some([512, 512, 512])),
            (&[chunk, "-1"], None),
            (&[chunk, "-1", prefill, "300"], None),
            (&["--no-chunked-prefill", chunk, "400"], None),
        ] {
            assert_eq!(sizes(arguments), expected, "{arguments:?}");
        }
    }

    #[test]
    fn without_a_device_there_are_limits_for_both() {
        let options = options(&["--max-prefill-tokens", "100"]);
        let of_cpu = StepLimits::of(&options.scheduler);
        assert_eq!(numbers(of_cpu), [512, 100, 1]);
        assert_eq!(options.gpu_limits.map(numbers), Some([2048, 100, 2]));
    }
}
