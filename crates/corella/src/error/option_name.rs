//! The options of configuration fields, for errors of the scheduler.

use corella_core::ConfigError;

/// Fields whose option has another name.
const OPTIONS: [(&str, &str); 7] = [
    ("num_pages", "--kv-cache-memory"),
    ("page_size", "--block-size"),
    ("max_chunk_tokens", "--chunked-prefill-size"),
    ("num_pipeline_stages", "--pipeline-parallel-size"),
    ("max_draft_tokens", "--draft-tokens"),
    ("max_pinned_pages", "--max-pinned-share"),
    ("speculation", "--speculate"),
];

/// Returns a configuration error in terms of options.
pub fn in_options(error: &ConfigError) -> String {
    error.with_names(|field| {
        let option = OPTIONS.iter().find(|(known, _)| *known == field);
        option.map_or_else(
            || format!("--{}", field.replace('_', "-")),
            |(_, option)| (*option).to_owned(),
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::arguments::args::Cli;
    use crate::input::option_value::find;

    #[test]
    fn fields_become_options() {
        let error = ConfigError::new("page_size", " must be at least 1");
        assert_eq!(in_options(&error), "--block-size must be at least 1");
        let error = ConfigError::new("speculation", " requires ");
        let error = error.then("max_inflight_steps", " 1, or page_size");
        assert_eq!(
            in_options(&error),
            "--speculate requires --max-inflight-steps 1, or page_size"
        );
    }

    #[test]
    fn the_options_exist() {
        let program = Cli::command();
        let serve = program.find_subcommand("serve").expect("it is a command");
        let same = [
            "max_num_batched_tokens",
            "max_prefill_tokens",
            "max_prefill_seqs",
            "max_decode_seqs",
            "max_num_seqs",
            "max_queued_requests",
            "max_passed_over",
            "max_inflight_steps",
            "max_model_len",
            "head_room",
            "scheduling_policy",
            "prefill_admission_policy",
            "prefill_admission_lookahead",
            "long_prefill_token_threshold",
        ];
        for field in OPTIONS.iter().map(|(field, _)| *field).chain(same) {
            let option = in_options(&ConfigError::new(field, ""));
            assert!(find(serve, &option[2..]).is_some(), "{option}");
        }
    }
}
