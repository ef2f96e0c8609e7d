//! Models that draft with their own heads: answers stay the same, and unsuitable models and options are refused.

use std::fs;
use std::path::{Path, PathBuf};

use crate::draft_model::{play, submissions};
use crate::held_isa::held_isa;
use crate::server::{Server, corella};
use corella_core::{HeadRoom, RecurrentState, SchedulerConfig, Speculation};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_engine::{Engine, EngineConfig};
use corella_model::Checkpoint;
use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn open(model: &str) -> Checkpoint {
    Checkpoint::open(root().join("tests/golden/mtp").join(model)).unwrap()
}

/// An engine with few pages, so that requests are preempted, and with snapshots.
fn engine(model: &str, drafts: bool) -> Engine {
    let mut checkpoint = open(model);
    let mut speculation = Speculation::Off;
    if drafts {
        checkpoint.add_draft_head().unwrap();
        speculation = Speculation::Draft { draw_cost: 0 };
    }
    let mut limits = SchedulerConfig {
        max_num_seqs: 8,
        max_num_batched_tokens: 48,
        max_prefill_tokens: 40,
        head_room: HeadRoom::fixed_share(0),
        max_preemptions: 1000,
        speculation,
        ..SchedulerConfig::new(30, 8, 120)
    };
    limits.set_recurrent_state(RecurrentState {
        num_snapshots: 12,
        snapshot_interval: 2,
        least_distance: 1,
    });
    let config = CpuConfig {
        isa: held_isa(),
        ..CpuConfig::for_scheduler(&limits, 2)
    };
    let spec = checkpoint.config().spec.clone();
    let executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
    Engine::start(EngineConfig::new(limits), Box::new(executor)).unwrap()
}

/// Requests share prefixes, are preempted, and are read in chunks.
#[test]
fn guesses_of_a_models_own_head_reach_no_bit_of_any_answer() {
    for (model, agrees) in [
        ("agreeing", true),
        ("qwen3-5", false),
        ("qwen3-next", false),
    ] {
        let submissions = submissions(open(model).config().spec.vocab_size);
        let plain = engine(model, false);
        let alone = submissions.chunks(1).flat_map(|one| play(&plain, one));
        let expected: Vec<_> = alone.collect();
        let drafting = engine(model, true);
        for round in 0..2 {
            let played = play(&drafting, &submissions);
            for (at, (found, expected)) in played.iter().zip(&expected).enumerate() {
                assert_eq!(found, expected, "{model}, round {round}, request {at}");
            }
        }
        let stats = drafting.stats().scheduler;
        assert!(stats.num_preemptions > 0, "{stats:?}");
        assert!(stats.num_draft_tokens > 50, "{stats:?}");
        match agrees {
            true => assert_eq!(stats.num_accepted_draft_tokens, stats.num_draft_tokens),
            // These heads are random, and one token in eighty is right by chance.
            false => assert!(stats.num_accepted_draft_tokens < stats.num_draft_tokens / 4),
        }
    }
}

#[test]
fn an_engine_needs_a_head_to_draft_with() {
    let checkpoint = open("qwen3-5");
    let mut limits = SchedulerConfig::new(30, 8, 120);
    limits.speculation = Speculation::Draft { draw_cost: 0 };
    let config = CpuConfig::for_scheduler(&limits, 1);
    let spec = checkpoint.config().spec.clone();
    let executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
    let started = Engine::start(EngineConfig::new(limits), Box::new(executor));
    let refusal = started.err().unwrap().to_string();
    assert!(refusal.contains("draft head"), "{refusal}");
}

/// A folder that can be served: a golden model, and as many of the built-in model's tokens as the golden model has.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, model: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("corella-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let golden = root().join("tests/golden").join(model);
        for file in ["config.json", "model.safetensors"] {
            fs::copy(golden.join(file), folder.join(file)).unwrap();
        }
        let read =
            |path: PathBuf| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
        let num_tokens = read(golden.join("config.json"))["vocab_size"].as_u64();
        let is_kept = |id: &Value| id.as_u64() < num_tokens;
        let mut tokenizer = read(root().join("models/nano/tokenizer.json"));
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        vocab.retain(|_, id| is_kept(id));
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        added.retain(|token| is_kept(&token["id"]));
        tokenizer["model"]["merges"] = Value::Array(Vec::new());
        fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        Self(folder)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn vllms_option_lets_a_model_draft_with_its_own_head() {
    let folder = Folder::new("mtp", "mtp/agreeing");
    let body = r#"{"prompt":[5,6,7,8,9,10],"max_tokens":60,"temperature":0.8,"seed":3,"ignore_eos":true,"logprobs":2}"#;
    let plain = Server::start(&[folder.path()]).complete(body);
    let option = r#"{"method": "mtp", "num_speculative_tokens": 3}"#;
    let server = Server::start(&[folder.path(), "--speculative-config", option]);
    assert!(
        server.summary.ends_with("; drafts by its own head"),
        "{}",
        server.summary
    );
    assert_eq!(server.complete(body)["choices"], plain["choices"]);
    let metrics = server.get("/metrics", "a");
    let count = |name: &str| {
        let mut lines = metrics.lines();
        let line = lines.find(|line| line.starts_with(name));
        let (_, value) = line.unwrap().rsplit_once(' ').unwrap();
        value.parse::<f64>().unwrap()
    };
    let drafted = count("corella_spec_decode_num_draft_tokens");
    assert!(drafted > 20.0, "{metrics}");
    assert_eq!(
        count("corella_spec_decode_num_accepted_tokens_total"),
        drafted
    );
}

#[test]
fn what_has_no_head_to_draft_with_is_refused() {
    let without = Folder::new("no-mtp", "qwen3-5-moe");
    let with = Folder::new("mtp-stages", "mtp/agreeing");
    let gguf = root().join("tests/gguf/llama-f32.gguf");
    for (arguments, word) in [
        (vec![without.path()], "no tensor begins with mtp."),
        (vec![gguf.to_str().unwrap()], "GGUF files are read without"),
        (vec![], "Qwen3ForCausalLM is read without a head"),
        (
            vec![with.path(), "--draft-model", "x"],
            "--draft-model needs --speculate draft",
        ),
        (
            vec![with.path(), "--pipeline-parallel-size", "2"],
            "--pipeline-parallel-size 1",
        ),
        (
            vec![with.path(), "--device", "mock"],
            "--speculate mtp runs on CPUs only",
        ),
    ] {
        let options = [
            &["serve", "--port", "0", "--speculate", "mtp"][..],
            &arguments,
        ]
        .concat();
        let output = corella(&options).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert_eq!(text.trim_end().lines().count(), 1, "{text}");
        assert!(text.contains(word), "{text}");
    }
}
