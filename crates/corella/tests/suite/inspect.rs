//! `corella inspect`, run on models of every family, on one larger than memory, and on unknown models.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::sparse_model::{self, Shape};
use serde_json::{Value, json};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn command(model: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corella"));
    command.stdin(Stdio::null()).env_remove("RUST_LOG");
    command.current_dir(root()).arg("inspect").arg(model);
    command.args(options);
    command
}

fn inspect(model: &Path, options: &[&str]) -> Output {
    command(model, options).output().expect("it runs")
}

/// The peak memory of one run. Touched pages of a mapped file count as memory of the process.
#[expect(
    clippy::zombie_processes,
    reason = "wait4 waits for the process and tells its memory"
)]
fn most_memory_kib(model: &Path, options: &[&str]) -> i64 {
    let mut command = command(model, options);
    let child = command.stdout(Stdio::null()).spawn().expect("it starts");
    let id = i32::try_from(child.id()).unwrap();
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: no other code waits for the child, and the pointer is to a structure of this type.
    unsafe {
        let waited_for = libc::wait4(id, std::ptr::null_mut(), 0, usage.as_mut_ptr());
        assert_eq!(waited_for, id);
        usage.assume_init().ru_maxrss
    }
}

#[track_caller]
fn text(model: &Path, options: &[&str]) -> String {
    let output = inspect(model, options);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    let told = String::from_utf8(output.stdout).unwrap();
    // If a server would refuse the model, the command prints everything and then fails.
    let is_served = told.contains("\nproblems      none") || told.contains("\"refused\": []");
    let status = if is_served { 0 } else { 2 };
    assert_eq!(
        output.status.code(),
        Some(status),
        "{}: {error}",
        model.display()
    );
    let says_so = error.contains("error: `corella serve` would refuse this model");
    assert_eq!(says_so, !is_served, "{error}");
    told
}

#[track_caller]
fn value(model: &Path, options: &[&str]) -> Value {
    let options = [options, &["--json"]].concat();
    serde_json::from_str(&text(model, &options)).unwrap()
}

/// Returns the text of the line with this name.
#[track_caller]
fn line<'a>(text: &'a str, name: &str) -> &'a str {
    let lines: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix(name))
        .collect();
    let [only] = lines[..] else {
        panic!("{name}: {lines:?} in\n{text}");
    };
    only.trim()
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let name = format!("corella-inspect-{}-{name}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        fs::create_dir(&folder).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, bytes: impl AsRef<[u8]>) {
        fs::write(self.0.join(name), bytes).unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn models_of_every_family_are_told_and_not_refused() {
    let golden = root().join("tests/golden");
    let mut num_models = 0;
    for entry in fs::read_dir(golden).unwrap() {
        let folder = entry.unwrap().path();
        let Ok(config) = fs::read(folder.join("config.json")) else {
            continue;
        };
        num_models += 1;
        let name = folder.display();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let found = value(&folder, &["--dtype", "f32"]);
        assert_eq!(found["architecture"], config["architectures"][0], "{name}");
        assert_eq!(found["family"], found["architecture"], "{name}");
        let model = &found["model"];
        for (ours, theirs) in [
            ("hidden_size", ["hidden_size", "n_embd"]),
            ("num_layers", ["num_hidden_layers", "n_layer"]),
            ("vocab_size", ["vocab_size", "vocab_size"]),
        ] {
            let stated = theirs.iter().find_map(|field| config.get(field));
            assert_eq!(Some(&model[ours]), stated, "{name}: {ours}");
        }
        // Goldens lack a tokenizer, which is their only fault.
        let refused = found["refused"].as_array().unwrap();
        assert_eq!(refused.len(), 1, "{name}: {refused:?}");
        assert!(
            refused[0].as_str().unwrap().contains("tokenizer.json"),
            "{name}"
        );
        let weights = &model["weights"];
        // An embedding that is not the head is held as stored.
        let all_but_embedding = |numbers: &Value| {
            let [all, embedding] = ["all", "embedding"].map(|part| numbers[part].as_u64().unwrap());
            all - embedding
        };
        let parameters = all_but_embedding(&model["num_parameters"]);
        let memory = all_but_embedding(&weights["memory_bytes"]);
        // Biases count as parameters and not as memory, but they are few.
        assert!(memory >= 4 * parameters * 97 / 100, "{name}: {memory}");
    }
    assert!(num_models >= 20, "{num_models}");
}

#[test]
fn a_file_is_told_as_its_folder_is() {
    for name in ["llama-f32", "llama3-f16", "qwen3-f16"] {
        let folder = root().join("tests/gguf").join(name);
        let file = folder.with_extension("gguf");
        let (mut folder, mut file) = (value(&folder, &[]), value(&file, &[]));
        assert_eq!(folder["refused"], json!([]), "{name}");
        assert_eq!(folder["name"], file["name"]);
        assert_eq!(
            (&folder["form"], &file["form"]),
            (&"folder".into(), &"GGUF".into())
        );
        assert_eq!(folder["family"], file["family"]);
        for both in [&mut folder, &mut file] {
            let model = &mut both["model"];
            // Converters store vectors and RoPE's divisors as f32.
            model["weights"]
                .as_object_mut()
                .unwrap()
                .retain(|key, _| key == "format");
            for layer in model["layers"].as_array_mut().unwrap() {
                layer["rope"].take();
            }
            model["kv_cache"].take();
            for end in both["tokenizer"]["ends"].as_array_mut().unwrap() {
                assert!(end["named_by"].take().is_string());
            }
        }
        assert_eq!(folder["model"], file["model"], "{name}");
        assert_eq!(folder["tokenizer"], file["tokenizer"], "{name}");
        assert_eq!(folder["chat_template"], file["chat_template"], "{name}");
    }
}

#[test]
fn windows_and_experts_are_told() {
    let gemma = text(
        &root().join("tests/golden/gemma3"),
        &["--kv-cache-memory", "1M"],
    );
    assert!(
        line(&gemma, "window ").contains(" of 4); none ("),
        "{gemma}"
    );
    assert!(
        line(&gemma, "KV cache").contains("in layers with a window"),
        "{gemma}"
    );
    let experts = text(&root().join("tests/golden/mixtral"), &[]);
    assert!(line(&experts, "feed-forward").contains(" experts, 2 for each token"));
    let number = |name| {
        let words = line(&experts, name).split(' ');
        words
            .map(str::to_owned)
            .next()
            .unwrap()
            .parse::<f64>()
            .unwrap()
    };
    assert!(number("per token") < number("all"), "{experts}");
}

#[test]
fn memory_is_divided_among_requests() {
    let model = root().join("models/nano");
    let found = value(&model, &["--kv-cache-memory", "4M", "--max-num-seqs", "64"]);
    let kv = &found["model"]["kv_cache"];
    let token_bytes = kv["token_bytes"].as_u64().unwrap();
    let num_tokens = (4 << 20) / (16 * token_bytes) * 16;
    assert_eq!(kv["num_tokens"], num_tokens);
    let fits = kv["fits"].as_array().unwrap();
    let num_requests: Vec<_> = fits
        .iter()
        .map(|fit| fit["num_requests"].as_u64().unwrap())
        .collect();
    assert_eq!(num_requests, [1, 8, 32, 64]);
    for fit in fits {
        let (requests, context) = (&fit["num_requests"], fit["context"].as_u64().unwrap());
        let all = requests.as_u64().unwrap() * context;
        assert!(all <= num_tokens && context <= 2048, "{fit}");
        assert!(
            all + 16 * requests.as_u64().unwrap() > num_tokens || context == 2048,
            "{fit}"
        );
    }
}

/// The shape of Llama 3 70B, which has 70.6 billion parameters by its makers' account. Its file has
/// no content but the header, and is larger than the memory of most machines.
#[test]
fn a_large_model_is_told_without_reading_it() {
    const HIDDEN: usize = 8192;
    let folder = Folder::new("large");
    sparse_model::write(
        &folder.0,
        &Shape {
            hidden: HIDDEN,
            intermediate: 28_672,
            num_layers: 80,
            vocab: 128_256,
        },
    );
    let found = value(&folder.0, &[]);
    let refused = found["refused"].to_string();
    let does_not_fit = corella_model::host_bytes() <= 2 * 70_553_706_496;
    let expected = "the weights take 131.4 GiB as bf16 and this machine has ";
    assert_eq!(refused.contains(expected), does_not_fit, "{refused}");
    let found = value(&folder.0, &["--dtype", "int4"]);
    let model = &found["model"];
    assert_eq!(model["num_parameters"]["all"], 70_553_706_496_u64);
    assert_eq!(
        model["weights"]["stored_bytes"]["all"],
        2 * 70_553_706_496_u64
    );
    let memory = model["weights"]["memory_bytes"]["all"].as_u64().unwrap() as f64;
    // A group of 128 weights has 64 bytes and a scale. The embedding is read as stored.
    let embedding = 128_256.0 * HIDDEN as f64;
    let matrices = (70_553_706_496.0 - embedding) * (64.0 + 2.0) / 128.0;
    let expected = matrices + 2.0 * embedding;
    assert!(
        (memory / expected - 1.0).abs() < 0.02,
        "{memory} {expected}"
    );
    let memory_kib = most_memory_kib(&folder.0, &["--dtype", "int4", "--json"]);
    assert!(memory_kib < 1 << 20, "{memory_kib} KiB");
}

#[test]
fn an_unknown_architecture_is_answered_with_what_is_known() {
    let folder = Folder::new("unknown");
    let config = json!({
        "architectures": ["Qwen4ForCausalLM"],
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151_936,
    });
    folder.write("config.json", config.to_string());
    for name in [
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        fs::copy(root().join("models/nano").join(name), folder.0.join(name)).unwrap();
    }
    let found = text(&folder.0, &[]);
    let architecture = line(&found, "architecture");
    assert!(architecture.contains("closest is Qwen"), "{architecture}");
    assert_eq!(line(&found, "layers"), "36");
    assert_eq!(line(&found, "experts"), "128");
    assert!(line(&found, "tokenizer").contains("BPE"), "{found}");
    assert!(line(&found, "tensors").contains("MiB"), "{found}");
    let problem = line(&found, "problem");
    assert!(
        problem.contains("it is not supported; the closest that is supported is Qwen"),
        "{found}"
    );
    let found = value(&folder.0, &[]);
    assert_eq!(found["stated"]["hidden_size"], 2560);
    assert_eq!(found["model"], Value::Null);
}

#[test]
fn what_a_server_would_refuse_is_said() {
    let folder = Folder::new("refused");
    for entry in fs::read_dir(root().join("models/nano")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, folder.0.join(path.file_name().unwrap())).unwrap();
        }
    }
    let path = folder.0.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["intermediate_size"] = 1000.into();
    fs::write(&path, config.to_string()).unwrap();
    folder.write("chat_template.jinja", "{% if %}");
    let found = value(&folder.0, &[]);
    let refused = found["refused"].as_array().unwrap();
    assert_eq!(refused.len(), 2, "{refused:?}");
    assert!(
        refused[0].as_str().unwrap().starts_with("chat template: "),
        "{refused:?}"
    );
    assert!(
        refused[1].as_str().unwrap().contains("gate_proj"),
        "{refused:?}"
    );
    assert!(found["model"]["num_parameters"]["all"].as_u64().unwrap() > 0);
}

#[test]
fn a_template_for_tools_may_have_a_file_of_its_own() {
    let folder = Folder::new("tool-use");
    for entry in fs::read_dir(root().join("models/nano")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            fs::copy(&path, folder.0.join(path.file_name().unwrap())).unwrap();
        }
    }
    folder.write("chat_template.jinja", "{{ messages }}");
    let reads_tools = || value(&folder.0, &[])["chat_template"]["reads_tools"].clone();
    assert_eq!(reads_tools(), false);
    fs::create_dir(folder.0.join("additional_chat_templates")).unwrap();
    let file = "additional_chat_templates/tool_use.jinja";
    folder.write(file, "{{ tools }}{{ messages }}");
    assert_eq!(reads_tools(), true);
    folder.write(file, "{% if %}");
    let refused = value(&folder.0, &[])["refused"].clone();
    assert!(
        refused[0].as_str().unwrap().contains("chat template"),
        "{refused}"
    );
}

#[test]
fn what_is_no_model_is_an_error() {
    let output = inspect(Path::new("/no/such-model"), &[]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(output.stdout, b"");
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.starts_with("error: /no/such-model: "), "{error}");
}

/// The examples have f32 weights, which every instruction set packs alike.
#[test]
fn the_book_shows_what_is_printed() {
    let page = fs::read_to_string(root().join("docs/src/real-model.md")).unwrap();
    let mut blocks = page
        .split("```console\n$ corella inspect ")
        .skip(1)
        .peekable();
    assert!(blocks.peek().is_some());
    for block in blocks {
        let (block, _) = block.split_once("```").unwrap();
        let (command, shown) = block.split_once('\n').unwrap();
        let words: Vec<_> = command.split(' ').collect();
        assert_eq!(text(Path::new(words[0]), &words[1..]), shown, "{command}");
    }
}
