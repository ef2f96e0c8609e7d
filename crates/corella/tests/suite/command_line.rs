//! The built program: its start, and its messages when it cannot start.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use crate::held_isa::held_isa;
use crate::server::{Server, corella};
use corella_cpu::{Isa, detect_isa};

fn run(arguments: &[&str]) -> Output {
    corella(arguments).output().expect("it runs")
}

/// Runs a command that must fail, and returns the one line that it prints.
#[track_caller]
fn refusal(arguments: &[&str]) -> String {
    let output = run(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(output.stdout, b"");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    assert!(text.starts_with("error: "), "{text}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// A copy of the built-in model that a test may change.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("corella-{}-{name}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let nano = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano");
        for file in [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "model.safetensors",
        ] {
            fs::copy(nano.join(file), folder.join(file)).unwrap();
        }
        Self(folder)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn change_config(&self, field: &str, value: serde_json::Value) {
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(self.file("config.json")).unwrap()).unwrap();
        assert!(config.get(field).is_some(), "{field}");
        config[field] = value;
        fs::write(self.file("config.json"), config.to_string()).unwrap();
    }

    #[track_caller]
    fn refusal(&self) -> String {
        let folder = self.0.to_str().unwrap();
        let line = refusal(&["serve", folder, "--port", "0"]);
        assert_eq!(
            refusal(&["generate", folder, "-p", "x"]),
            line,
            "both commands say the same"
        );
        line
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_missing_folder() {
    let line = refusal(&["serve", "/no/such-model", "--port", "0"]);
    assert!(line.contains("/no/such-model"), "{line}");
}

#[test]
fn a_file_instead_of_a_folder() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let line = refusal(&["generate", file.to_str().unwrap(), "-p", "x"]);
    assert!(line.contains("Cargo.toml"), "{line}");
}

#[test]
fn missing_files() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = Folder::new(&format!("missing-{file}"));
        fs::remove_file(folder.file(file)).unwrap();
        let line = folder.refusal();
        assert!(line.contains(file), "{line}");
    }
}

#[test]
fn truncated_files() {
    for file in ["config.json", "tokenizer.json", "model.safetensors"] {
        let folder = Folder::new(&format!("truncated-{file}"));
        let bytes = fs::read(folder.file(file)).unwrap();
        fs::write(folder.file(file), &bytes[..bytes.len() / 2]).unwrap();
        let line = folder.refusal();
        assert!(line.contains(file), "{line}");
    }
}

/// The file is complete, truncated, or not a GGUF file at all.
#[test]
fn gguf_files() {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf/llama-f32.gguf");
    let arguments = "generate -p x --max-tokens 2 --no-limits --ignore-eos".split(' ');
    let output = run(&arguments
        .chain([whole.to_str().unwrap()])
        .collect::<Vec<_>>());
    assert!(output.status.success());
    // The Hugging Face cache keeps files by their hash, behind links.
    let link = std::env::temp_dir().join(format!("corella-{}.gguf", std::process::id()));
    std::os::unix::fs::symlink(&whole, &link).unwrap();
    let server = Server::start(&[link.to_str().unwrap(), "--threads", "1"]);
    let name = link.file_stem().unwrap().to_str().unwrap();
    assert!(server.summary.contains(name), "{}", server.summary);
    let body = format!(r#"{{"model":"{name}","prompt":"Once","max_tokens":3,"ignore_eos":true}}"#);
    assert_eq!(server.complete(&body)["usage"]["completion_tokens"], 3);
    fs::remove_file(&link).unwrap();
    drop(server);

    let bytes = fs::read(&whole).unwrap();
    let file = std::env::temp_dir().join(format!("corella-{}-x.gguf", std::process::id()));
    let name = file.to_str().unwrap();
    for len in [0, 3, 4, 20, 100, 5_000, bytes.len() - 1] {
        fs::write(&file, &bytes[..len]).unwrap();
        let line = refusal(&["serve", name, "--port", "0"]);
        assert!(line.contains("x.gguf: is "), "{line}");
        assert_eq!(refusal(&["generate", name, "-p", "x"]), line);
    }
    let mut other = bytes.clone();
    let at = other
        .windows(5)
        .position(|window| window == b"llama")
        .unwrap();
    other[at..at + 5].copy_from_slice(b"mamba");
    fs::write(&file, &other).unwrap();
    let line = refusal(&["serve", name, "--port", "0"]);
    assert!(
        line.contains("\"mamba\"; it is not supported; supported are ")
            && line.contains(" llama, "),
        "{line}"
    );
    fs::remove_file(&file).unwrap();
}

#[test]
fn an_unknown_architecture() {
    let folder = Folder::new("architecture");
    folder.change_config("architectures", serde_json::json!(["MambaForCausalLM"]));
    let line = folder.refusal();
    assert!(line.contains("MambaForCausalLM"), "{line}");
    assert!(line.contains(" qwen3, "), "{line}");
    folder.change_config("architectures", serde_json::json!(["Qwen4ForCausalLM"]));
    let line = folder.refusal();
    assert!(
        line.trim_end()
            .ends_with("; the closest that is supported is Qwen2ForCausalLM"),
        "{line}"
    );
}

#[test]
fn a_wrong_shape() {
    let folder = Folder::new("shape");
    folder.change_config("intermediate_size", serde_json::json!(97));
    let line = folder.refusal();
    assert!(line.contains("mlp") && line.contains("97"), "{line}");
}

#[test]
fn options_that_cannot_work_are_named() {
    for (arguments, words) in [
        (
            &["--max-model-len", "100000"][..],
            ["max-model-len", "100000"],
        ),
        (
            &["--kv-cache-memory", "1"][..],
            ["kv-cache-memory", "context"],
        ),
        (&["--threads", "0"][..], ["--threads", "at least 1"]),
        (
            &["--threads", "10000"][..],
            ["--threads 10000 is too many", "more threads than cores"],
        ),
        (
            &["--kv-cache-memory", "1000T"][..],
            ["--kv-cache-memory asks for 1000.0 TiB", "this machine"],
        ),
        (
            &["--host", "no-such-host.invalid"][..],
            ["--host no-such-host.invalid", "0.0.0.0"],
        ),
        (&["--block-size", "0"][..], ["--block-size", "at least 1"]),
        (
            &["--pipeline-parallel-size", "7"][..],
            ["--pipeline-parallel-size", "6 layers"],
        ),
        (
            &["--max-num-seqs", "5000", "--max-num-batched-tokens", "512"][..],
            ["--max-num-batched-tokens", "--max-num-seqs"],
        ),
        (
            &["--kv-cache-dtype", "fp8_e5m2"][..],
            ["--kv-cache-dtype fp8: use int8", ""],
        ),
        (
            &["--draft-tokens", "4"][..],
            ["--draft-tokens", "--speculate ngram"],
        ),
        (
            &["--speculate", "ngram", "--max-inflight-steps", "2"][..],
            ["--speculate requires", "--max-inflight-steps 1"],
        ),
        (
            &["--pipeline-parallel-size", "90"][..],
            ["--pipeline-parallel-size", "can be at most 16"],
        ),
        (
            &["--chat-template", "chatml"][..],
            [
                "--chat-template cannot read chatml",
                "no templates are built in",
            ],
        ),
        (
            &["--generation-config", "/no/such"][..],
            ["--generation-config cannot read /no/such", ""],
        ),
        (
            &["--override-generation-config", r#"{"temperature": -1}"#][..],
            [
                "--override-generation-config: temperature must be at least 0",
                "not -1",
            ],
        ),
        (
            &["--revision", "main"][..],
            ["--revision main needs a model of the hub", ""],
        ),
        (
            &["--root-path", "llm"][..],
            ["--root-path llm must be a path", ""],
        ),
    ] {
        let line = refusal(&[&["serve", "--port", "0"], arguments].concat());
        for word in words {
            assert!(line.contains(word), "{line}");
        }
    }
    let line = refusal(&["generate", "-p", "x", "--top-p", "1.5"]);
    assert!(line.contains("--top-p"), "{line}");
    let line = refusal(&["generate", "--prompt-tokens", "1000000"]);
    assert!(line.contains("1000000 prompt tokens"), "{line}");
}

/// Both requests of 4 + 3 tokens fit side by side, so three steps suffice.
#[test]
fn rules_of_admission_are_compared() {
    let load = [
        "bench",
        "admission",
        "--prompt-len",
        "4",
        "--output-len",
        "3",
    ];
    let path = std::env::temp_dir().join(format!("corella-admission-{}.json", std::process::id()));
    let options = [
        "--num-requests",
        "2",
        "--kv-cache-tokens",
        "4096",
        "--rules",
    ];
    let json = ["oracle,vllm", "--output-json", path.to_str().unwrap()];
    let output = run(&[&load[..], &options, &json].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("2 requests, pool of 4096 tokens"), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    fs::remove_file(&path).unwrap();
    for (row, name) in ["oracle", "vllm"].into_iter().enumerate() {
        let rule = &report["rules"][row];
        assert_eq!(rule["rule"], name);
        assert_eq!(
            (&rule["num_finished"], &rule["num_steps"]),
            (&2.into(), &3.into())
        );
    }

    for (arguments, word) in [
        (&["--kv-cache-tokens", "8"][..], "--kv-cache-tokens"),
        (
            &["--kv-cache-tokens", "99", "--request-rate", "0"][..],
            "--request-rate",
        ),
        (
            &["--kv-cache-tokens", "99", "--num-requests", "0"][..],
            "--num-requests",
        ),
        (
            &["--kv-cache-tokens", "99", "--max-num-batched-tokens", "9"][..],
            "--max-num-seqs",
        ),
    ] {
        let line = refusal(&[&load[..], arguments].concat());
        assert!(line.contains(word), "{line}");
    }
}

/// Options in the form that users of other servers know.
#[test]
fn options_of_other_servers_are_answered_with_ours() {
    for (arguments, words) in [
        (
            &["serve", "--tensor-parallel-size", "2"][..],
            ["--tensor-parallel-size", "--pipeline-parallel-size"],
        ),
        (
            &["serve", "-tp", "2"][..],
            ["-tp", "--pipeline-parallel-size"],
        ),
        (
            &["serve", "--mem-fraction-static=0.9"][..],
            ["--mem-fraction-static", "--gpu-memory-utilization"],
        ),
        (
            &["serve", "--temp", "0.5"][..],
            ["--temp", "--override-generation-config"],
        ),
        (&["serve", "-mmu", "x"][..], ["-mmu", "text only"]),
        (&["push"][..], ["`push`", "not uploaded"]),
        (&["help", "cp"][..], ["`cp`", "--served-model-name"]),
        (
            &["run", "--url", "http://x"][..],
            ["--url", "`corella chat --url"],
        ),
        (
            &["serve", "--max-num-seq", "4"][..],
            ["did you mean --max-num-seqs?", "`corella serve --help`"],
        ),
        (
            &["bench", "serve", "--no-such-thing"][..],
            ["--no-such-thing", "`corella bench serve --help`"],
        ),
    ] {
        let line = refusal(arguments);
        assert!(!line.contains("--step-deadline"), "{line}");
        for word in words {
            assert!(line.contains(word), "{line}");
        }
    }
    let output = run(&[
        "serve",
        "--middleware",
        "x",
        "--no-such-thing",
        "--jinja",
        "--hf-token",
        "y",
    ]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(
        text.lines()
            .filter(|line| line.starts_with("error: "))
            .count(),
        3,
        "{text}"
    );
}

/// A command line of llama.cpp works, and reports its interpretation.
#[test]
fn a_command_line_of_another_server_runs() {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf/llama-f32.gguf");
    let fixed = "generate -ngl 99 -fa on --mlock -n 3 --temp 0 -p x --no-limits --ignore-eos -m";
    let output = run(&fixed
        .split(' ')
        .chain([whole.to_str().unwrap()])
        .collect::<Vec<_>>());
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    for words in [
        "-ngl has no effect",
        "-n is --max-tokens",
        "--temp is --temperature",
    ] {
        assert!(text.contains(words), "{text}");
    }
    assert!(text.contains("decode        2 tokens"), "{text}");
}

#[test]
fn a_share_of_a_gpus_memory_has_no_effect_on_a_cpu() {
    let mut command = corella(&["generate", "-p", "x", "--max-tokens", "1", "--no-limits"]);
    command.args(["--gpu-memory-utilization", "0.5"]);
    let output = command
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .expect("it runs");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        text.contains("has no effect on a CPU: --kv-cache-memory"),
        "{text}"
    );
}

#[test]
fn a_variable_is_an_option() {
    let mut command = corella(&["generate", "-p", "x", "--no-limits"]);
    command
        .env("CORELLA_MAX_TOKENS", "3")
        .env("CORELLA_DEVICE", "mock");
    command
        .env("CORELLA_IGNORE_EOS", "1")
        .env("CORELLA_PORT", "tcp://10.0.0.1:80");
    let output = command.output().expect("it runs");
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("decode        2 tokens"), "{text}");
    let mut command = corella(&["serve"]);
    let output = command
        .env("CORELLA_MAX_NUM_SEQS", "many")
        .output()
        .expect("it runs");
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("CORELLA_MAX_NUM_SEQS: invalid value 'many'"),
        "{text}"
    );
}

/// The file is checked before the model is loaded: the path has no model.
#[test]
fn a_batch_with_a_wrong_url_is_refused_before_the_model_is_loaded() {
    let folder = std::env::temp_dir().join(format!("corella-batch-url-{}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    let input = folder.join("in.jsonl");
    let output = folder.join("out.jsonl");
    let line = |id: &str, url: &str| {
        format!(r#"{{"custom_id":"{id}","method":"POST","url":"{url}","body":{{"prompt":"x"}}}}"#)
    };
    let lines = [line("a", "/v1/completions"), line("b", "/v1/completion")].join("\n");
    fs::write(&input, lines).unwrap();
    let refused = refusal(&[
        "batch",
        input.to_str().unwrap(),
        "-o",
        output.to_str().unwrap(),
        "--model",
        "/no/such/model",
    ]);
    assert!(
        refused.contains("in.jsonl, line 2: `url` must be one of"),
        "{refused}"
    );
    assert!(refused.contains("not `/v1/completion`"), "{refused}");
    assert!(!output.exists());
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_name_is_not_looked_up_offline() {
    let line = refusal(&["serve", "no-such-owner/model", "--port", "0", "--offline"]);
    for word in [
        "no-such-owner/model is not a local file or folder",
        "not in the cache",
        "--offline",
    ] {
        assert!(line.contains(word), "{line}");
    }
}

#[test]
fn a_model_may_be_named_by_an_option() {
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf/llama-f32.gguf");
    let model = whole.to_str().unwrap();
    let answer = |how: &[&str]| {
        let fixed = ["generate", "-p", "x", "--max-tokens", "4", "--no-limits"];
        let output = run(&[&fixed, how, &["--ignore-eos", "--temperature", "0"]].concat());
        assert!(output.status.success(), "{how:?}");
        output.stdout
    };
    let expected = answer(&[model]);
    assert_eq!(answer(&["-m", model]), expected);
    assert_eq!(answer(&["--model", model]), expected);
    let both = run(&["generate", model, "--model", model, "-p", "x"]);
    assert_eq!(both.status.code(), Some(2));
}

#[test]
fn a_server_may_listen_on_a_name() {
    let server = Server::start(&["--host", "localhost", "--device", "mock"]);
    assert!(
        server.address.starts_with("127.0.0.1:"),
        "{}",
        server.address
    );
    let body = r#"{"prompt":"Once","max_tokens":3,"ignore_eos":true}"#;
    assert_eq!(server.complete(body)["usage"]["completion_tokens"], 3);
}

/// The server prints the limits by which requests wait or are refused.
#[test]
fn limits_are_printed_at_start() {
    let options = "--device mock --max-num-seqs 17 --max-queued-requests 33 \
                   --max-num-batched-tokens 190 --max-queued-tokens 7700";
    let server = Server::start(&options.split_whitespace().collect::<Vec<_>>());
    for word in [
        "running requests 17,",
        "waiting requests 33, waiting prompt tokens 7700,",
        "tokens per step 190,",
    ] {
        assert!(server.limits.contains(word), "{}", server.limits);
    }
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let line = refusal(&["serve", "--port", &port]);
    assert!(
        line.contains(&port) && line.contains("--port PORT chooses another"),
        "{line}"
    );
    // The model and the port are wrong, and the model is reported.
    let line = refusal(&["serve", "/no/such-model", "--port", &port]);
    assert!(line.contains("/no/such-model"), "{line}");
}

#[test]
fn the_built_in_model_has_no_files() {
    let line = refusal(&["quantize", "corella-nano", "out", "--format", "int8"]);
    assert!(
        line.contains("a part of the program") && line.contains("--dtype int8"),
        "{line}"
    );
    let draft = [
        "serve",
        "--speculate",
        "draft",
        "--draft-model",
        "corella-nano:latest",
    ];
    let line = refusal(&draft);
    assert!(line.contains("a part of the program"), "{line}");
}

/// A folder of Ollama's, with one model.
#[test]
fn a_model_of_ollama_is_found_by_its_name() {
    let folder = std::env::temp_dir().join(format!("corella-ollama-{}", std::process::id()));
    let manifests = folder.join("manifests");
    let library = manifests.join("registry.ollama.ai/library");
    let fox = manifests.join("hf.co/acme/Fox-1B-GGUF");
    let mario = manifests.join("registry.ollama.ai/me/mario");
    let manifest = concat!(
        r#"{"schemaVersion": 2, "layers": ["#,
        r#"{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a1b", "size": 1}, "#,
        r#"{"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:0c", "size": 1}]}"#
    );
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gguf/llama-f32.gguf");
    fs::create_dir_all(folder.join("blobs")).unwrap();
    for (name, tag) in [
        (library.join("tiny"), "latest"),
        (library.join("qwen3"), "0.6b"),
        (mario, "latest"),
        (fox, "Q4_K_M"),
    ] {
        fs::create_dir_all(&name).unwrap();
        fs::write(name.join(tag), manifest).unwrap();
    }
    std::os::unix::fs::symlink(&whole, folder.join("blobs/sha256-0a1b")).unwrap();
    let shown = |words: &[&str]| {
        let output = corella(words).env("OLLAMA_MODELS", &folder).output();
        let output = output.expect("it runs");
        let log = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{words:?}: {log}");
        String::from_utf8(output.stdout).unwrap()
    };
    for (typed, name) in [
        ("tiny", "tiny"),
        ("tiny:latest", "tiny"),
        // The hub may have models of these names, too, and is not asked.
        ("qwen3:0.6b", "qwen3:0.6b"),
        ("me/mario", "me/mario"),
        (
            "hf.co/acme/Fox-1B-GGUF:Q4_K_M",
            "hf.co/acme/Fox-1B-GGUF:Q4_K_M",
        ),
    ] {
        let about = shown(&["inspect", typed]);
        let model = about.lines().next().unwrap();
        assert!(model.ends_with(&format!(" {name} (GGUF)")), "{about}");
    }
    let list = shown(&["list"]);
    for name in [
        "tiny:latest ",
        "qwen3:0.6b ",
        "me/mario:latest ",
        "hf.co/acme/Fox-1B-GGUF:Q4_K_M ",
    ] {
        let mut lines = list.lines().filter(|line| line.starts_with(name));
        let line = lines.next().expect(&list);
        assert!(line.ends_with("Ollama's"), "{line}");
    }
    for (typed, name) in [
        ("qwen3:0.6b", "qwen3:0.6b"),
        ("tiny", "tiny:latest"),
        ("tiny:latest", "tiny:latest"),
    ] {
        let removal = corella(&["rm", typed])
            .env("OLLAMA_MODELS", &folder)
            .output();
        let log = String::from_utf8(removal.unwrap().stderr).unwrap();
        let advice = format!("{name} is Ollama's: `ollama rm {name}` deletes it");
        assert!(log.contains(&advice), "{log}");
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_report_whose_reader_has_left_is_no_defect() {
    let arguments = "bench admission --prompt-len 200 --output-len 300 --num-requests 30 --kv-cache-tokens 110400";
    let arguments: Vec<_> = arguments.split(' ').collect();
    let mut command = corella(&arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    drop(process.stdout.take());
    let output = process.wait_with_output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{log}");
}

#[test]
fn generate_writes_the_answer_and_its_speed() {
    let arguments = |threads| {
        let fixed = "generate -p Hello! --temperature 0 --max-tokens 20 --ignore-eos --no-limits";
        let mut list: Vec<_> = fixed.split(' ').collect();
        list.extend(["--threads", threads]);
        list
    };
    let one = run(&arguments("1"));
    let text = String::from_utf8(one.stderr).unwrap();
    assert!(one.status.success(), "{text}");
    assert!(!one.stdout.trim_ascii().is_empty());
    for word in ["prefill", "decode", "tokens/s"] {
        assert!(text.contains(word), "{text}");
    }
    assert_eq!(run(&arguments("2")).stdout, one.stdout);
}

/// The whole prompt is written out by hand, in the marks of the built-in model.
#[test]
fn a_system_message_stands_before_the_prompt() {
    let system = "You tell stories for children.";
    let whole = format!(
        "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
    );
    let answer = |words: &[&str]| {
        let output = run(&[words, &["--temperature", "0", "--max-tokens", "20"]].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{text}");
        let is_prefill = |line: &&str| line.starts_with("prefill");
        let line = text.lines().find(is_prefill).expect(&text).to_owned();
        let num_tokens = line.split_whitespace().nth(1).map(str::to_owned);
        (output.stdout, num_tokens)
    };
    let by_hand = answer(&["generate", "--no-limits", "--raw", "-p", &whole]);
    for command in ["generate --no-limits -p", "run --verbose corella-nano"] {
        let mut words: Vec<_> = command.split(' ').collect();
        words.extend(["Tell me a story.", "--system", system]);
        assert_eq!(answer(&words), by_hand, "{command}");
    }
}

/// A model that fits the processor's caches may decode faster than memory bandwidth allows.
#[test]
fn no_share_of_a_limit_is_above_100_without_a_word() {
    for dtype in ["bf16", "int8", "int4"] {
        let fixed = "generate --prompt-tokens 100 --max-tokens 40 --ignore-eos --profile --dtype";
        let output = run(&fixed.split(' ').chain([dtype]).collect::<Vec<_>>());
        let text = String::from_utf8(output.stderr).unwrap();
        let lines: Vec<_> = text.lines().filter(|line| line.contains(" of ")).collect();
        assert!(output.status.success() && lines.len() >= 2, "{text}");
        for line in lines.iter().filter(|line| line.contains("tokens/s")) {
            let (_, share) = line.rsplit_once('(').unwrap();
            let (percent, rest) = share.split_once(" %").unwrap();
            let percent: u64 = percent.parse().unwrap();
            assert_eq!(percent > 100, rest.contains("slower while"), "{line}");
        }
        // Integer weights have a separate peak, because other instructions multiply them.
        let is_int8 = lines[0].contains("int8 peak");
        let has_int8_products = held_isa().unwrap_or_else(detect_isa) != Isa::Portable;
        assert_eq!(is_int8, dtype != "bf16" && has_int8_products, "{text}");
    }
}

#[test]
fn equal_seeds_give_equal_answers() {
    let answer = |seed| {
        let fixed = "generate -p Hello! --device mock --temperature 1 --max-tokens 20 --seed";
        let mut list: Vec<_> = fixed.split(' ').collect();
        list.push(seed);
        let output = run(&list);
        assert!(output.status.success());
        output.stdout
    };
    assert_eq!(answer("1"), answer("1"));
    assert_ne!(answer("1"), answer("2"));
}

#[test]
fn serve_says_where_answers_and_ends_on_a_signal() {
    let mut server = Server::start(&["--served-model-name", "parrot"]);
    let summary = &server.summary;
    assert!(
        summary.contains("thread") && summary.contains("context 2048"),
        "{summary}"
    );
    let body = r#"{"model":"parrot","prompt":"Once","max_tokens":3,"ignore_eos":true}"#;
    assert_eq!(server.complete(body)["usage"]["completion_tokens"], 3);

    server.terminate();
    assert_eq!(server.process.wait().unwrap().code(), Some(0));
}

#[test]
fn the_summary_names_a_draft_model() {
    let nano = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano");
    let options = ["--speculate", "draft", "--draft-model", nano];
    let server = Server::start(&[&options[..], &["--draft-dtype", "int8"]].concat());
    let (_, draft) = server.summary.split_once("; drafts by nano: ").unwrap();
    assert!(draft.contains("int8") && draft.contains("KV"), "{draft}");
}

#[test]
fn pipeline_stages_and_guesses_reach_no_answer() {
    let bodies = [
        r#"{"prompt":"Once upon a time","max_tokens":40,"temperature":0,"logprobs":3}"#,
        r#"{"prompt":["Once","The fox"],"max_tokens":40,"temperature":1,"seed":5,"n":3}"#,
        r#"{"prompt":"red red red red red","max_tokens":40,"temperature":0,"logprobs":3}"#,
    ];
    let answers = |options: &str| {
        let options: Vec<_> = options.split_whitespace().collect();
        let server = Server::start(&options);
        bodies.map(|body| server.complete(body)["choices"].clone())
    };
    let one = answers("");
    assert_eq!(one[1].as_array().unwrap().len(), 6);
    let nano = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/nano");
    let by_draft = format!("--speculate draft --draft-model {nano} --draft-dtype int8");
    for options in [
        &*by_draft,
        "--pipeline-parallel-size 2",
        "--pipeline-parallel-size 6",
        "--speculate ngram",
        "--speculate ngram --draft-tokens 20 --pipeline-parallel-size 2",
    ] {
        assert_eq!(answers(options), one, "{options}");
    }
}
