//! Explains an unknown option. For options of other servers, it says what to use instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Options of other servers, and what to use instead.
const ELSEWHERE: [(&[&str], &str); 29] = [
    // vLLM and SGLang.
    (
        &["--tensor-parallel-size", "-tp", "--tp", "--tp-size"],
        "matrices are not split over devices; all --threads work on each of them, and \
         --pipeline-parallel-size splits the layers over groups of threads",
    ),
    (
        &["--data-parallel-size", "-dp", "--dp", "--dp-size"],
        "one process serves one copy of a model; start another server for another copy",
    ),
    (
        &["--pipeline-parallel", "-pp", "--pp", "--pp-size"],
        "use --pipeline-parallel-size",
    ),
    (
        &["--mem-fraction-static"],
        "use --gpu-memory-utilization, or --kv-cache-memory to say how much memory the KV cache takes",
    ),
    (
        &["--quantization", "-q"],
        "quantised checkpoints are recognised by themselves; --dtype int8, int8-grouped or int4 \
         quantises others at load",
    ),
    (
        &["--trust-remote-code"],
        "code in a model folder is never run; leave it out",
    ),
    (
        &["--tokenizer", "--tokenizer-path"],
        "the tokenizer comes from the model's tokenizer.json or GGUF file",
    ),
    (
        &["--chat-template"],
        "the chat template comes from the model's chat_template.jinja, tokenizer_config.json or \
         GGUF file",
    ),
    (
        &["--enforce-eager", "--swap-space", "--cpu-offload-gb"],
        "Corella has no such setting; leave it out",
    ),
    (
        &["--enable-chunked-prefill"],
        "chunked prefill is on; --no-chunked-prefill turns it off",
    ),
    (
        &["--disable-radix-cache", "--disable-prefix-caching"],
        "use --no-enable-prefix-caching",
    ),
    (
        &["--max-running-requests", "--parallel", "-np"],
        "use --max-num-seqs",
    ),
    (&["--schedule-policy"], "use --scheduling-policy"),
    (
        &["--speculative-config", "--num-speculative-tokens"],
        "use --speculate, with --draft-tokens and --draft-model",
    ),
    (
        &["--model-path", "--model-id"],
        "use --model, or give the path alone",
    ),
    // llama.cpp and text-generation-inference.
    (
        &["--ctx-size", "-c", "--context-length", "--max-total-tokens"],
        "use --max-model-len",
    ),
    (&["-t"], "use --threads"),
    (&["-n", "--n-predict", "--predict"], "use --max-tokens"),
    (
        &["-ngl", "--n-gpu-layers", "--gpu-layers"],
        "all layers are computed on the CPU; leave it out",
    ),
    (
        &["-hf", "-hfr", "--hf-repo"],
        "give the name as the model: corella serve OWNER/MODEL:Q4_K_M",
    ),
    (&["--alias", "-a"], "use --served-model-name"),
    (
        &["--batch-size", "-b", "--ubatch-size", "-ub"],
        "use --max-num-batched-tokens",
    ),
    (
        &["--cache-type-k", "-ctk", "--cache-type-v", "-ctv"],
        "use --kv-cache-dtype, for keys and values together",
    ),
    (
        &["-fa", "--flash-attn"],
        "attention has one implementation; leave it out",
    ),
    (
        &["--mlock", "--no-mmap"],
        "weights are mapped, and packed at start; leave it out",
    ),
    (&["--temp"], "use --temperature"),
    (&["-s"], "use --seed"),
    (&["-f", "--file"], "use --prompt \"$(cat FILE)\""),
    (
        &["-v", "--verbose", "--log-level"],
        "set RUST_LOG=debug in the environment for a longer log",
    ),
];

/// Explains a refused option; `None` if clap's own message is better. `arguments` are those of the
/// process.
pub fn explain(error: &clap::Error, arguments: &[String]) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let refused = context(ContextKind::InvalidArg).filter(|name| name.starts_with('-'))?;
    // clap names only the first letter of `-ngl` in its error.
    let written = match refused.starts_with("--") {
        true => refused,
        false => arguments.iter().find(|word| word.starts_with(refused))?,
    };
    let names = [written, refused];
    names.into_iter().find_map(advice).or_else(|| {
        let near = context(ContextKind::SuggestedArg).filter(|near| is_near(refused, near));
        let meant = match near {
            Some(near) => format!("did you mean {near}? "),
            None => String::new(),
        };
        let words = arguments.iter().take(2);
        let command: Vec<&str> = words
            .map(String::as_str)
            .take_while(|word| word.bytes().all(|byte| byte.is_ascii_lowercase()))
            .collect();
        Some(format!(
            "there is no option {refused}; {meant}`corella {} --help` names all",
            command.join(" ")
        ))
    })
}

/// What to use instead of an option of another server, which is written with its dashes.
pub fn advice(name: &str) -> Option<String> {
    let (_, advice) = ELSEWHERE.iter().find(|(names, _)| names.contains(&name))?;
    Some(format!("there is no option {name}: {advice}"))
}

/// Whether two names mostly consist of a common prefix and a common suffix.
fn is_near(a: &str, b: &str) -> bool {
    let common =
        |pairs: &mut dyn Iterator<Item = (u8, u8)>| pairs.take_while(|(a, b)| a == b).count();
    let beginning = common(&mut a.bytes().zip(b.bytes()));
    let end = common(&mut a.bytes().rev().zip(b.bytes().rev()));
    3 * (beginning + end) >= 2 * a.len().max(b.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_fingers_is_near_and_another_word_is_not() {
        assert!(is_near("--max-num-seq", "--max-num-seqs"));
        assert!(is_near("--temprature", "--temperature"));
        assert!(!is_near("--tensor-parallel-size", "--step-deadline"));
        assert!(!is_near("--model", "--max-model-len"));
    }

    #[test]
    fn no_option_has_two_answers() {
        let mut names: Vec<_> = ELSEWHERE.iter().flat_map(|(names, _)| *names).collect();
        names.sort();
        let num_names = names.len();
        names.dedup();
        assert_eq!(names.len(), num_names);
    }
}
