//! Draft models on the CPU executor: answers stay the same, and unsuitable models are refused.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::held_isa::held_isa;
use corella_core::{
    HeadRoom, RequestOutput, SamplingParams, SchedulerConfig, Speculation, TokenId,
};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_engine::{DraftModel, Engine, EngineConfig, StreamEvent, Submission};
use corella_model::{Checkpoint, DecoderSpec, KvGroups, WeightFormat};

fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    root.join(name)
}

/// Returns limits for the model's groups of layers.
fn limits(model: &str, speculation: Speculation) -> SchedulerConfig {
    let checkpoint = Checkpoint::open(folder(model)).unwrap();
    let groups = KvGroups::by_window(&checkpoint.config().spec);
    let num_pages = match groups.groups().len() {
        1 => 30,
        _ => 90,
    };
    SchedulerConfig {
        kv_groups: groups.groups().to_vec(),
        max_num_seqs: 8,
        max_num_batched_tokens: 48,
        max_prefill_tokens: 40,
        head_room: HeadRoom::fixed_share(0),
        max_preemptions: 1000,
        speculation,
        ..SchedulerConfig::new(num_pages, 8, 120)
    }
}

fn executor(
    model: &str,
    weight_format: Option<WeightFormat>,
    num_pages: u32,
    kv_groups: impl FnOnce(&DecoderSpec) -> KvGroups,
) -> CpuExecutor {
    let limits = limits(model, Speculation::Off);
    let checkpoint = Checkpoint::open(folder(model)).unwrap();
    let spec = checkpoint.config().spec.clone();
    let config = CpuConfig {
        weight_format,
        num_pages,
        kv_groups: Some(kv_groups(&spec)),
        isa: held_isa(),
        ..CpuConfig::for_scheduler(&limits, 2)
    };
    CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap()
}

fn engine(model: &str, draft: Option<CpuExecutor>) -> Engine {
    let speculation = match draft {
        None => Speculation::Off,
        Some(_) => Speculation::Draft { draw_cost: 0 },
    };
    let limits = limits(model, speculation);
    let target = executor(model, None, limits.num_pages, KvGroups::by_window);
    let config = EngineConfig::new(limits.clone());
    match draft {
        None => Engine::start(config, Box::new(target)).unwrap(),
        Some(draft) => {
            let draft = DraftModel {
                executor: Box::new(draft),
                max_num_batched_tokens: limits.max_num_batched_tokens,
                max_model_len: limits.max_model_len,
            };
            Engine::start_with_draft_model(config, Box::new(target), draft).unwrap()
        }
    }
}

/// Returns requests of which every second one is greedy, and some share a beginning.
pub fn submissions(vocab_size: usize) -> Vec<Submission> {
    let submission = |at: u64| {
        let token = |i: u64| ((i * 7919 + at / 3 * 31 + 11) % vocab_size as u64) as TokenId;
        let mut sampling = SamplingParams::GREEDY;
        if at % 2 == 1 {
            sampling.temperature = 0.7;
            sampling.top_p = 0.9;
            sampling.seed = at;
        }
        sampling.logprobs = at.is_multiple_of(3).then_some(3);
        Submission {
            sampling,
            ..Submission::new((0..3 + at * 5).map(token).collect(), 30 + at as u32 % 4 * 8)
        }
    };
    (0..12).map(submission).collect()
}

/// Runs all requests together. Returns the outputs of each request, with the fields cleared that depend on other
/// requests.
pub fn play(engine: &Engine, submissions: &[Submission]) -> Vec<Vec<RequestOutput>> {
    let streams: Vec<_> = submissions
        .iter()
        .map(|submission| engine.submit(submission.clone()).unwrap().remove(0))
        .collect();
    let read = |mut stream: corella_engine::TokenStream| {
        let mut outputs = Vec::new();
        while let Some(event) = stream.next_blocking() {
            if let StreamEvent::Output(mut output) = event {
                // These fields depend on requests that ran earlier or at the same time.
                (output.queue_us, output.cache_use.num_cached_tokens) = (0, 0);
                output.request = Default::default();
                outputs.push(output);
            }
        }
        outputs
    };
    streams.into_iter().map(read).collect()
}

/// Checks that answers with a draft model equal those without. Returns the numbers of guessed and accepted tokens.
fn check_drafts(
    model: &str,
    (draft_model, draft_format): (&str, Option<WeightFormat>),
    num_draft_pages: u32,
) -> (u64, u64) {
    let checkpoint = Checkpoint::open(folder(model)).unwrap();
    let submissions = submissions(checkpoint.config().spec.vocab_size);
    let plain = engine(model, None);
    let alone = submissions.chunks(1).flat_map(|one| play(&plain, one));
    let expected: Vec<_> = alone.collect();
    let draft = executor(draft_model, draft_format, num_draft_pages, KvGroups::one);
    let drafting = engine(model, Some(draft));
    for (at, (found, expected)) in play(&drafting, &submissions)
        .iter()
        .zip(&expected)
        .enumerate()
    {
        assert_eq!(found, expected, "{model}, request {at}");
    }
    let stats = drafting.stats();
    assert!(stats.scheduler.num_preemptions > 0, "{stats:?}");
    let (drafted, accepted) = (
        stats.scheduler.num_draft_tokens,
        stats.scheduler.num_accepted_draft_tokens,
    );
    println!(
        "{model}, drafts by {draft_model} {draft_format:?}, {num_draft_pages} pages: {accepted} of \
         {drafted} hold"
    );
    (drafted, accepted)
}

#[test]
fn drafts_reach_no_bit_of_any_answer() {
    let golden = "tests/golden/qwen3-gqa-tied";
    for model in ["models/nano", golden] {
        for num_draft_pages in [120, 10] {
            // The same model draws the same tokens, greedy or seeded.
            let (drafted, accepted) = check_drafts(model, (model, None), num_draft_pages);
            assert!(accepted > 0 && accepted == drafted, "{model}");
            // A draft model with rounded weights guesses another token where two are about equally likely.
            let rounded = (model, Some(WeightFormat::Int8));
            let (_, accepted) = check_drafts(model, rounded, num_draft_pages);
            assert!(accepted > 0, "{model}");
        }
    }
    // The draft model keeps the pages of the whole context, and the model keeps only the pages in its windows.
    let windowed = "tests/golden/gemma3";
    for num_draft_pages in [120, 10] {
        let (drafted, accepted) = check_drafts(windowed, (windowed, None), num_draft_pages);
        assert!(
            accepted > 0 && accepted == drafted,
            "{accepted} of {drafted}"
        );
    }
    // An unrelated model mostly guesses wrong, with any instruction set.
    let stranger = ("tests/golden/llama-gqa-tied", None);
    for num_draft_pages in [120, 10] {
        let (drafted, accepted) = check_drafts(golden, stranger, num_draft_pages);
        assert!(2 * accepted < drafted, "{accepted} of {drafted}");
    }
}

#[track_caller]
fn refusal(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_corella"))
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{text}");
    text
}

#[test]
fn what_cannot_draft_is_refused() {
    let nano = folder("models/nano");
    let nano = nano.to_str().unwrap();
    let other = folder("tests/gguf/llama-f32.gguf");
    let drafting = ["--speculate", "draft", "--draft-model"];
    let with = |rest: &[&'static str]| [&drafting[..], &[nano], rest].concat();
    for (arguments, words) in [
        (
            vec!["--draft-model", nano],
            ["--draft-model", "--speculate draft"],
        ),
        (
            vec!["--speculate", "ngram", "--draft-dtype", "int8"],
            ["--draft-dtype", "--speculate draft"],
        ),
        (
            vec!["--speculate", "draft"],
            ["--speculate draft", "--draft-model"],
        ),
        (
            [&drafting[..], &["/no/such-model"]].concat(),
            ["/no/such-model", ""],
        ),
        (
            [&drafting[..], &[other.to_str().unwrap()]].concat(),
            ["--draft-model llama-f32", "vocabulary"],
        ),
        (
            with(&["--pipeline-parallel-size", "2"]),
            ["--max-inflight-steps 1", "--pipeline-parallel-size 1"],
        ),
    ] {
        let line = refusal(&[&["serve", "--port", "0"], &arguments[..]].concat());
        for word in words {
            assert!(line.contains(word), "{line}");
        }
    }
}

/// The vocabularies have the same size, but two tokens have changed places.
#[test]
fn a_vocabulary_of_the_same_size_may_differ() {
    let copy = std::env::temp_dir().join(format!("corella-draft-{}", std::process::id()));
    std::fs::create_dir(&copy).unwrap();
    for entry in std::fs::read_dir(folder("models/nano")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, copy.join(path.file_name().unwrap())).unwrap();
        }
    }
    let file = copy.join("tokenizer.json");
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    let first = a.as_u64().min(b.as_u64()).unwrap();
    (vocab["a"], vocab["b"]) = (b, a);
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    let draft = copy.to_str().unwrap();
    let line = refusal(&[
        "generate",
        "-p",
        "x",
        "--speculate",
        "draft",
        "--draft-model",
        draft,
    ]);
    std::fs::remove_dir_all(&copy).unwrap();
    for word in [&format!("token {first} is"), "\"a\"", "\"b\"", "vocabulary"] {
        assert!(line.contains(word), "{line}");
    }
}
