//! Tests of translated flags.

use clap::CommandFactory;

use super::*;
use crate::arguments::args::Cli;

fn typed(line: &str) -> Result<Translation, Vec<String>> {
    let mut program = Cli::command();
    program.build();
    translate(&program, line.split_whitespace().map(Into::into).collect())
}

fn words(line: &str) -> String {
    let words = typed(line).unwrap().words;
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    words.join(" ")
}

#[test]
fn an_alias_is_noted_once_and_is_no_warning() {
    let line = "corella serve --ctx-size 512 --ctx-size 1024 --mlock";
    let translation = typed(line).unwrap();
    assert_eq!(translation.notes, ["--ctx-size is --max-model-len"]);
    assert_eq!(translation.warnings.len(), 1, "{:?}", translation.warnings);
    let default = typed("corella serve --tensor-parallel-size 1 --load-format auto");
    assert_eq!(default.map(|translation| translation.warnings), Ok(vec![]));
    let notes = typed("corella ls").unwrap().notes;
    assert_eq!(notes, ["`corella ls` is `corella list`"]);
}

#[test]
fn flags_of_other_servers_become_options() {
    for (line, expected) in [
        (
            "corella serve x --num-ctx 8192 --num-parallel 4 --keep-alive 5m",
            "corella serve x --max-model-len=8192 --max-num-seqs=4 --keep-alive 5m",
        ),
        // A flag in the tables of two servers.
        (
            "corella serve meta/llama --trust-remote-code --tensor-parallel-size 1 --max_model_len 8k \
             --enable-auto-tool-choice --tool-call-parser hermes -O3 --disable-log-requests",
            "corella serve meta/llama --max-model-len 8k --tool-call-parser hermes --no-log-requests",
        ),
        (
            "corella serve -hf owner/model:Q4_K_M -c 8192 -ngl 99 -fa -t 4 -cb -np 2 --mlock --jinja",
            "corella serve --model=owner/model:Q4_K_M --max-model-len=8192 --threads=4 --max-num-seqs=2",
        ),
        ("corella serve -fa on x", "corella serve x"),
        ("corella serve -fa x", "corella serve x"),
        ("corella serve -dev cpu", "corella serve --device=cpu"),
        (
            "corella generate -n 9 -p x --temp 0.5",
            "corella generate --max-tokens=9 -p x --temperature=0.5",
        ),
        (
            "corella serve --cudagraph-capture-sizes 1 2 4",
            "corella serve",
        ),
        (
            "corella serve --compilation-config.level=3 --no-enable-expert-parallel",
            "corella serve",
        ),
        ("corella serve --threads -1", "corella serve --threads -1"),
        ("corella serve -- --mlock", "corella serve -- --mlock"),
        (
            "corella run some/model Tell me more --keepalive 5m",
            "corella run some/model Tell me more",
        ),
        ("corella show some/model", "corella inspect some/model"),
        ("corella serve --seed -1 -np -1", "corella serve"),
        (
            "corella serve -ctk q8_0 -ctv q8_0",
            "corella serve --kv-cache-dtype=int8 --kv-cache-dtype=int8",
        ),
        (
            "corella serve -ctk q8_0 -ctk f16 -ctv f16",
            "corella serve --kv-cache-dtype=int8 --kv-cache-dtype=f16 --kv-cache-dtype=f16",
        ),
        (
            "corella serve --seed 3 --seed=4 -np 2 --seed -1",
            "corella serve --max-num-seqs=2",
        ),
        (
            "corella serve --allowed-origins [\"*\"] --cors-origins https://a,https://b",
            "corella serve --cors-allow-origin=* --cors-allow-origin=https://a --cors-allow-origin=https://b",
        ),
        (
            "corella serve --speculative-config {\"method\":\"ngram\",\"num_speculative_tokens\":4}",
            "corella serve --speculate=ngram --draft-tokens=4",
        ),
        (
            "corella serve --speculative_config.method ngram --speculative_config.num_speculative_tokens=4",
            "corella serve --speculate=ngram --draft-tokens=4",
        ),
        ("corella generate -p x -n -1", "corella generate -p x"),
        (
            "corella chat -m x.gguf -cnv -b 512",
            "corella chat -m x.gguf",
        ),
        ("corella ls", "corella list"),
        ("corella serve -mx", "corella serve -mx"),
        (
            "corella bench serve --backend openai-chat --endpoint /v1/chat/completions --dataset-name random \
             --random-input-len 64 --random-output-len 8 --percentile-metrics ttft,tpot --save-result \
             --metric-percentiles 90,99 --result-filename a.json",
            "corella bench serve --endpoint=chat --endpoint /v1/chat/completions --random-input-len 64 \
             --max-tokens=8 --metric-percentiles 90,99 --output-json=a.json",
        ),
    ] {
        assert_eq!(words(line), expected, "{line}");
    }
}

/// The last of several served names is taken as the model if no other word is the model and the name has the form of a
/// model.
#[test]
fn several_names_may_follow_one_option() {
    for (line, expected) in [
        ("x --served-model-name a b", "x NAME a NAME b"),
        (
            "--port 1 x --served-model-name a b",
            "--port 1 x NAME a NAME b",
        ),
        (
            "--model x --served-model-name a b c --port 1",
            "--model x NAME a NAME b NAME c --port 1",
        ),
        (
            "--served-model-name a b --model=x",
            "NAME a NAME b --model=x",
        ),
        (
            "--served-model-name a b -hf x/y",
            "NAME a NAME b --model=x/y",
        ),
        (
            "--served-model-name a b --port 1 x",
            "NAME a NAME b --port 1 x",
        ),
        (
            "x --served-model-name a --served-model-name b",
            "x NAME a NAME b",
        ),
        ("--served-model-name a b", "NAME a NAME b"),
        ("--served-model-name a o/x", "NAME a o/x"),
        ("--served-model-name a b x.gguf", "NAME a NAME b x.gguf"),
        ("--served-model-name a b qwen3", "NAME a NAME b qwen3"),
        ("--served-model-name a b -- x", "NAME a NAME b -- x"),
        ("--seed 3 --served-model-name a o/x --seed -1", "NAME a o/x"),
        (
            "--served-model-name a --lora-modules b=c d=e --port 1",
            "NAME a --lora-modules b=c d=e --port 1",
        ),
        ("--served-model-name=a x", "--served-model-name=a x"),
    ] {
        let expected = expected.replace("NAME", "--served-model-name");
        let found = words(&format!("corella serve {line}"));
        assert_eq!(found, format!("corella serve {expected}"), "{line}");
    }
    // In this command, a file of requests comes before the model.
    let batch = "corella batch in.jsonl -o out --served-model-name a";
    assert_eq!(words(&format!("{batch} o/x")), format!("{batch} o/x"));
    // Without a model, the built-in one or that of the configuration file is served.
    let notes = typed("corella serve --served-model-name a b")
        .unwrap()
        .notes;
    assert_eq!(
        notes,
        ["b is one more --served-model-name; a model stands before this option"]
    );
}

/// vLLM's `--api-key` takes several.
#[test]
fn several_keys_belong_in_a_file() {
    let refusal = ["--api-key takes one key; --api-keys FILE takes a file of several"];
    for line in [
        "x --api-key one two",
        "--api-key one two three",
        "--model x --api-key one two --port 1",
    ] {
        assert_eq!(
            typed(&format!("corella serve {line}")).unwrap_err(),
            refusal,
            "{line}"
        );
    }
    for line in [
        "--api-key one x",
        "x --api-key one --port 1",
        "x --api-key=one",
    ] {
        assert_eq!(
            words(&format!("corella serve {line}")),
            format!("corella serve {line}")
        );
    }
}

#[test]
fn a_member_that_would_change_answers_is_refused() {
    let of = |value| {
        typed(&format!(
            "corella serve --structured-outputs-config {value}"
        ))
    };
    let unchanged = of(r#"{"backend":"guidance","disable_any_whitespace":false}"#).unwrap();
    assert_eq!(unchanged.warnings.len(), 1, "{:?}", unchanged.warnings);
    for line in [
        r#"corella serve --structured-outputs-config {"disable_any_whitespace":true}"#,
        "corella serve --structured-outputs-config.disable_any_whitespace true",
    ] {
        let reasons = typed(line).unwrap_err();
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        let advice = "each request has the switch `disable_any_whitespace`";
        assert!(reasons[0].contains(advice), "{reasons:?}");
    }
}

#[test]
fn the_requests_of_a_batch_need_no_flag() {
    let reasons = typed("corella batch -i in.jsonl -o out.jsonl --model x").unwrap_err();
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert!(
        reasons[0].contains("`corella batch IN.jsonl MODEL -o OUT.jsonl`"),
        "{reasons:?}"
    );
}

/// Keys and values have one type.
#[test]
fn two_flags_for_one_option_must_agree() {
    let reasons = typed("corella serve -ctk q8_0 -ctv f16").unwrap_err();
    assert_eq!(
        reasons,
        ["-ctv f16: it is --kv-cache-dtype as --cache-type-k is, which has another value"]
    );
}

#[test]
fn all_bad_flags_are_reported_at_once() {
    let line = "corella serve --tensor-parallel-size 2 --max-num-seq 4 --middleware x -sm row -to 5 \
                --no-such-thing --mlock --hf-token y";
    let reasons = typed(line).unwrap_err();
    let expected = [
        "--tensor-parallel-size 2: matrices are not split",
        "there is no option --max-num-seq; did you mean --max-num-seqs? `corella serve --help`",
        "there is no option --middleware: code of others is not loaded",
        "there is no option --no-such-thing; `corella serve --help` names all",
        "there is no option --hf-token: set HF_TOKEN",
    ];
    assert_eq!(reasons.len(), expected.len(), "{reasons:?}");
    for (reason, expected) in reasons.iter().zip(expected) {
        assert!(reason.starts_with(expected), "{reason}");
    }
}

#[test]
fn advice_has_the_value_that_was_typed() {
    let reasons = typed("corella serve --temp 0.3").unwrap_err();
    assert!(
        reasons[0].ends_with("'{\"temperature\": 0.3}'"),
        "{reasons:?}"
    );
}

/// The reason of each refusal is true of its flag.
#[test]
fn reasons_are_about_their_flags() {
    for (flag, reason) in [
        (
            "--enable-expert-parallel",
            "all experts of a model are computed on one device",
        ),
        (
            "--mamba-cache-mode all",
            "states of recurrent layers are f32, and their sizes decide",
        ),
        (
            "--disable-fastapi-docs",
            "GET /openapi.json is always served",
        ),
        (
            "--enable-tokenizer-info-endpoint",
            "GET /props is always served, with the chat template",
        ),
        (
            "--fingerprint-mode none",
            "answers have no system_fingerprint",
        ),
    ] {
        let warnings = typed(&format!("corella serve {flag}")).unwrap().warnings;
        let name = flag.split(' ').next().unwrap();
        let expected = format!("{name} has no effect: {reason}");
        assert!(warnings[0].starts_with(&expected), "{warnings:?}");
    }
}

/// Following a suggestion must not lead to another refusal.
#[test]
fn suggestions_can_be_followed() {
    for (line, suggestion) in [
        ("corella serve --log-fromat json", Some("--log-format")),
        ("corella serve --log-fromat gguf", None),
        ("corella serve --prot 8080", Some("--port")),
        ("corella serve --prot=tcp", None),
        ("corella serve --temprature 0.5", None),
        ("corella chat --temprature 0.5", Some("--temperature")),
        ("corella serve --pin-thread", Some("--pin-threads")),
    ] {
        let reason = typed(line).unwrap_err().remove(0);
        let (_, rest) = reason.split_once("did you mean ").unzip();
        let found = rest.and_then(|rest| rest.split('?').next());
        assert_eq!(found, suggestion, "{line}: {reason}");
    }
}

/// clap would read these as `-h` and other letters.
#[test]
fn several_letters_behind_one_dash_are_one_name() {
    for name in ["-hx", "-xm", "-sm2"] {
        let reason = typed(&format!("corella serve {name}"))
            .unwrap_err()
            .remove(0);
        assert!(
            reason.starts_with(&format!("there is no option {name};")),
            "{reason}"
        );
    }
    let notes = typed("corella serve -md").map(|translation| translation.notes);
    assert_eq!(notes, Ok(vec!["-md is --draft-model".to_owned()]));
    assert_eq!(words("corella serve -hV"), "corella serve -hV");
}

#[test]
fn a_verb_without_a_counterpart_says_what_to_do() {
    for (line, advice) in [
        ("corella push x", "not uploaded"),
        (
            "corella run-batch -i in -o out --model x",
            "`corella batch IN.jsonl MODEL -o OUT.jsonl`",
        ),
        ("corella launch claude", "coding agents"),
        (
            "corella bench throughput --model x --input-len 8",
            "`corella bench offline`",
        ),
        ("corella version", "`corella --version`"),
        ("corella -m x.gguf -p hi", "`corella generate` first"),
        (
            "corella create mario -f Modelfile",
            "SYSTEM goes with each request",
        ),
        (
            "corella serve --system Fox",
            "send a system message with each request",
        ),
    ] {
        let reasons = typed(line).unwrap_err();
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(reasons[0].contains(advice), "{reasons:?}");
    }
    assert_eq!(words("corella -v"), "corella -V");
    // The parser of the command line refuses an unknown command by its name, whatever follows it.
    for line in [
        "corella bnech serve --model x",
        "corella bench sreve --prompts x",
    ] {
        assert_eq!(words(line), line);
    }
}
