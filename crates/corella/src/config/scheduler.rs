//! Limits and policies of the scheduler, from arguments.

use corella_core::{PrefillAdmissionPolicy, SchedulingPolicy};

use crate::LlmOptions;
use crate::args::{
    AdmissionPolicyArg, DeviceArg, DeviceArgs, SchedulerArgs, SchedulingPolicyArg, SpeculateArg,
    SpeculationArgs,
};

/// The options of a device, before anything else is asked for.
pub fn options_of(device: &DeviceArgs, speculation: &SpeculationArgs) -> LlmOptions {
    let mut options = LlmOptions::default();
    if device.device == DeviceArg::Cuda {
        let limits = &mut options.scheduler;
        limits.max_num_batched_tokens = 2048;
        limits.max_prefill_tokens = 2048;
        // A GPU should have the next step before it is through with one, unless that waits for guesses.
        limits.max_inflight_steps = match speculation.speculate {
            SpeculateArg::Off => 2,
            _ => 1,
        };
    }
    options
}

/// `options` are those of the device.
pub fn set_scheduler(options: &mut LlmOptions, args: &SchedulerArgs) {
    let limits = &mut options.scheduler;
    limits.max_num_seqs = args.max_num_seqs;
    let max_num_batched_tokens = args.max_num_batched_tokens;
    limits.max_num_batched_tokens = max_num_batched_tokens.unwrap_or(limits.max_num_batched_tokens);
    limits.max_prefill_tokens = args
        .max_prefill_tokens
        .unwrap_or(limits.max_num_batched_tokens);
    limits.long_prefill_token_threshold = args.long_prefill_token_threshold;
    limits.max_prefill_seqs = args.max_prefill_seqs.unwrap_or(u32::MAX);
    limits.max_decode_seqs = args.max_decode_seqs.unwrap_or(u32::MAX);
    limits.max_queued_requests = args.max_queued_requests;
    limits.max_queued_tokens = args.max_queued_tokens;
    limits.enable_slo_admission = args.slo_admission;
    limits.head_room = args.head_room;
    limits.enable_chunked_prefill = !args.no_chunked_prefill;
    limits.scheduling_policy = match args.scheduling_policy {
        SchedulingPolicyArg::Fcfs => SchedulingPolicy::Fcfs,
        SchedulingPolicyArg::Priority => SchedulingPolicy::Priority,
        SchedulingPolicyArg::Lpm => SchedulingPolicy::LongestPrefix {
            lookahead: args.prefill_admission_lookahead,
        },
        SchedulingPolicyArg::Sjf => SchedulingPolicy::ShortestFirst {
            lookahead: args.prefill_admission_lookahead,
        },
    };
    limits.prefill_admission_policy = match args.prefill_admission_policy {
        AdmissionPolicyArg::Fifo => PrefillAdmissionPolicy::Fifo,
        AdmissionPolicyArg::Pack => PrefillAdmissionPolicy::Pack {
            lookahead: args.prefill_admission_lookahead,
            force_fifo_every: args.prefill_force_fifo_every,
        },
    };
    limits.max_passed_over = args.max_passed_over;
    let max_inflight_steps = args.max_inflight_steps;
    limits.max_inflight_steps = max_inflight_steps
        .unwrap_or(limits.max_inflight_steps)
        .max(args.pipeline_parallel_size);
    limits.num_pipeline_stages = args.pipeline_parallel_size;
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// The tokens of a step, those of prompts, and the steps in flight.
    fn limits(arguments: &[&str]) -> [u32; 3] {
        let words = [&["corella", "serve"], arguments].concat();
        let Command::Serve(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("another command");
        };
        let mut options = options_of(&args.device, &args.speculation);
        set_scheduler(&mut options, &args.scheduler);
        let limits = options.scheduler;
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
        ] {
            assert_eq!(limits(arguments), expected, "{arguments:?}");
        }
    }
}
