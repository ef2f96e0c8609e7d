//! The options that bound the prompts of a step. A warning explains an option that another one leaves without effect.

use crate::server::corella;

/// Runs one request, and returns what the program says about its limits.
fn said(options: &[&str]) -> Vec<String> {
    let load = "bench offline --device mock --num-prompts 1 --input-lens 8 --max-tokens 1";
    let words: Vec<&str> = load.split(' ').chain(options.iter().copied()).collect();
    let output = corella(&words).output().expect("it runs");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    let sentences = text.lines().filter_map(|line| {
        let (_, sentence) = line.split_once(" WARN ")?;
        Some(sentence[sentence.find("--")?..].to_owned())
    });
    sentences.collect()
}

#[test]
fn an_option_without_effect_is_explained_at_start() {
    let (chunk, prefill) = ("--chunked-prefill-size", "--max-prefill-tokens");
    for (options, expected) in [
        (&[][..], &[][..]),
        (&[chunk, "-1"], &[]),
        (&[chunk, "400", prefill, "500"], &[]),
        (
            &[chunk, "1000"],
            &[
                "--chunked-prefill-size is 1000, but a prompt gets at most 512 tokens, because \
                 --max-num-batched-tokens is 512",
            ],
        ),
        (
            &[chunk, "400", prefill, "800", "--no-chunked-prefill"],
            &[
                "--max-prefill-tokens is 800, but the prompts of a step get at most 512 tokens, because \
                 --max-num-batched-tokens is 512",
                "--chunked-prefill-size is 400, and has no effect: every prompt is computed whole",
            ],
        ),
    ] {
        assert_eq!(said(options), expected, "{options:?}");
    }
}
