//! Limits and policies of the scheduler, from arguments.

use corella_core::{PrefillAdmissionPolicy, SchedulingPolicy};

use crate::arguments::args::{
    AdmissionPolicyArg, ChunkSize, DeviceArg, DeviceArgs, SchedulerArgs, SchedulingPolicyArg,
    SpeculateArg, SpeculationArgs,
};
use crate::{LlmOptions, StepLimits};

/// Returns the options of a device, before all others are set.
pub fn options_of(device: &DeviceArgs, speculation: &SpeculationArgs) -> LlmOptions {
    let mut options = LlmOptions::default();
    let of_gpu = StepLimits {
        max_num_batched_tokens: 2048,
        max_prefill_tokens: 2048,
        // A GPU needs the next step queued before it finishes one, unless the next step waits for guesses.
        max_inflight_steps: match speculation.speculate {
            SpeculateArg::Off => 2,
            _ => 1,
        },
    };
    match device.device {
        DeviceArg::Cuda => of_gpu.set(&mut options.scheduler),
        DeviceArg::Auto => options.gpu_limits = Some(of_gpu),
        DeviceArg::Cpu | DeviceArg::Mock => {}
    }
    options
}

/// `options` has the device's values.
pub fn set_scheduler(options: &mut LlmOptions, args: &SchedulerArgs) {
    options.gpu_limits = options.gpu_limits.map(|default| step_limits(default, args));
    step_limits(StepLimits::of(&options.scheduler), args).set(&mut options.scheduler);
    let limits = &mut options.scheduler;
    limits.max_num_seqs = args.max_num_seqs;
    limits.long_prefill_token_threshold = args.long_prefill_token_threshold;
    limits.max_prefill_seqs = args.max_prefill_seqs.unwrap_or(u32::MAX);
    limits.max_decode_seqs = args.max_decode_seqs.unwrap_or(u32::MAX);
    limits.max_queued_requests = args.max_queued_requests;
    limits.max_queued_tokens = args.max_queued_tokens;
    limits.enable_slo_admission = args.slo_admission;
    limits.head_room = args.head_room;
    limits.enable_chunked_prefill =
        !args.no_chunked_prefill && args.chunked_prefill_size != Some(ChunkSize::Whole);
    if let Some(ChunkSize::AtMost(num_tokens)) = args.chunked_prefill_size {
        limits.max_chunk_tokens = num_tokens;
    }
    let lookahead = args.prefill_admission_lookahead;
    limits.scheduling_policy = match args.scheduling_policy {
        SchedulingPolicyArg::Fcfs => SchedulingPolicy::Fcfs,
        SchedulingPolicyArg::Priority => SchedulingPolicy::Priority,
        SchedulingPolicyArg::Lpm => SchedulingPolicy::LongestPrefix { lookahead },
        SchedulingPolicyArg::Sjf => SchedulingPolicy::ShortestFirst { lookahead },
    };
    limits.prefill_admission_policy = match args.prefill_admission_policy {
        AdmissionPolicyArg::Fifo => PrefillAdmissionPolicy::Fifo,
        AdmissionPolicyArg::Pack => PrefillAdmissionPolicy::Pack {
            lookahead,
            force_fifo_every: args.prefill_force_fifo_every,
        },
    };
    limits.max_passed_over = args.max_passed_over;
    limits.num_pipeline_stages = args.pipeline_parallel_size;
}

/// Returns the given limits, with the device's defaults for the rest.
fn step_limits(default: StepLimits, args: &SchedulerArgs) -> StepLimits {
    let batched = args.max_num_batched_tokens;
    // By default, a step of all decodes leaves tokens for prompts.
    let num_decodes = args
        .max_num_seqs
        .min(args.max_decode_seqs.unwrap_or(u32::MAX));
    let of_decodes = num_decodes.saturating_add(default.max_num_batched_tokens / 2);
    let max_num_batched_tokens = batched.unwrap_or(default.max_num_batched_tokens.max(of_decodes));
    // SGLang's prefill of a step is one chunk, so a chunk's size alone bounds the prompts of a step together.
    let max_prefill_tokens = args
        .max_prefill_tokens
        .unwrap_or(match args.chunked_prefill_size {
            Some(ChunkSize::AtMost(num_tokens)) => num_tokens.min(max_num_batched_tokens),
            Some(ChunkSize::Whole) | None => max_num_batched_tokens,
        });
    let inflight = args
        .max_inflight_steps
        .unwrap_or(default.max_inflight_steps);
    StepLimits {
        max_num_batched_tokens,
        max_prefill_tokens,
        max_inflight_steps: inflight.max(args.pipeline_parallel_size),
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
        let mut options = options_of(&args.device, &args.speculation);
        set_scheduler(&mut options, &args.scheduler);
        options
    }

    /// Returns the tokens of a step, its prompt tokens, and the steps in flight.
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
            // Many requests need longer steps, unless the operator limits them.
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

    /// Returns the tokens of a step, of its prompts, and of one prompt in it; `None` without chunks.
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
