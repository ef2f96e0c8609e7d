//! The options of configuration fields, for errors of the scheduler.

/// Fields whose option has another name, or none that a program in another language could guess.
const OPTIONS: [(&str, &str); 23] = [
    ("num_pages", "--kv-cache-memory"),
    ("page_size", "--block-size"),
    ("max_num_seqs", "--max-num-seqs"),
    ("max_num_batched_tokens", "--max-num-batched-tokens"),
    ("max_prefill_tokens", "--max-prefill-tokens"),
    ("max_chunk_tokens", "--chunked-prefill-size"),
    ("max_prefill_seqs", "--max-prefill-seqs"),
    ("max_decode_seqs", "--max-decode-seqs"),
    ("max_queued_requests", "--max-queued-requests"),
    ("max_queued_tokens", "--max-queued-tokens"),
    ("max_passed_over", "--max-passed-over"),
    ("max_inflight_steps", "--max-inflight-steps"),
    ("num_pipeline_stages", "--pipeline-parallel-size"),
    ("max_draft_tokens", "--draft-tokens"),
    ("max_pinned_pages", "--max-pinned-share"),
    ("max_model_len", "--max-model-len"),
    ("head_room", "--head-room"),
    ("scheduling_policy", "--scheduling-policy"),
    ("prefill_admission_policy", "--prefill-admission-policy"),
    (
        "prefill_admission_lookahead",
        "--prefill-admission-lookahead",
    ),
    ("speculation", "--speculate"),
    (
        "long_prefill_token_threshold",
        "--long-prefill-token-threshold",
    ),
    ("enable_prefix_caching", "--enable-prefix-caching"),
];

/// Rewrites a configuration error in terms of options.
pub fn in_options(message: &str) -> String {
    let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let mut text = String::new();
    let mut rest = message;
    while !rest.is_empty() {
        let end = rest
            .find(|letter| !is_of_name(letter))
            .unwrap_or(rest.len());
        let (word, behind) = rest.split_at(end);
        let option = OPTIONS.iter().find(|(field, _)| *field == word);
        // A path or an option may already contain a field's name.
        let stands_alone = text
            .chars()
            .next_back()
            .is_none_or(|before| !"-./`".contains(before));
        text.push_str(
            option
                .filter(|_| stands_alone)
                .map_or(word, |(_, option)| option),
        );
        let next = behind.find(is_of_name).unwrap_or(behind.len());
        let (between, behind) = behind.split_at(next);
        text.push_str(between);
        rest = behind;
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;
    use crate::option_value::find;

    #[test]
    fn fields_become_options() {
        for (message, expected) in [
            (
                "num_pipeline_stages can be at most 16",
                "--pipeline-parallel-size can be at most 16",
            ),
            (
                "page_size must be at least 1",
                "--block-size must be at least 1",
            ),
            (
                "x.page_size, max_num_seqs_of",
                "x.page_size, max_num_seqs_of",
            ),
            ("--speculate (é)", "--speculate (é)"),
            ("", ""),
        ] {
            assert_eq!(in_options(message), expected);
        }
    }

    #[test]
    fn the_options_exist() {
        let program = Cli::command();
        let serve = program.find_subcommand("serve").expect("it is a command");
        for (_, option) in OPTIONS {
            assert!(find(serve, &option[2..]).is_some(), "{option}");
        }
    }
}
