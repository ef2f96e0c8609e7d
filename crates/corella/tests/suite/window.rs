//! Models with sliding windows on the CPU executor: pages behind a window are freed, and answers
//! stay the same, bit for bit.

use std::path::Path;

use crate::held_isa::held_isa;
use corella_core::{
    HeadRoom, KvEvent, KvGroup, RequestOutput, SamplingParams, SchedulerConfig, Speculation,
    TokenId,
};
use corella_cpu::{CpuConfig, CpuExecutor};
use corella_engine::{Engine, EngineConfig, StreamEvent, Submission, TokenStream};
use corella_model::{Checkpoint, DType, KvFormat, KvGroups};
use corella_test::wait_until;

const BF16: KvFormat = KvFormat::Float(DType::Bf16);
const F32: KvFormat = KvFormat::Float(DType::F32);
const PAGE_SIZE: u32 = 8;
const MAX_ROWS: u32 = 40;
/// The window of these models.
const WINDOW: u32 = 24;

/// The content of a page table.
#[derive(Clone, Copy, PartialEq)]
enum Keeps {
    /// All pages of the context.
    Context,
    /// Only pages within the windows of the table's layers.
    Windows,
}

struct Setup {
    model: &'static str,
    kv_format: KvFormat,
    num_stages: usize,
    speculation: Speculation,
    max_spilled_pages: u32,
    max_pinned_pages: u32,
}

impl Setup {
    fn new(model: &'static str, kv_format: KvFormat, num_stages: usize) -> Self {
        Self {
            model,
            kv_format,
            num_stages,
            speculation: Speculation::Off,
            max_spilled_pages: 0,
            max_pinned_pages: 0,
        }
    }
}

fn engine(setup: &Setup, keeps: Keeps, num_pages: u32) -> Engine {
    let Setup {
        model,
        kv_format,
        num_stages,
        speculation,
        max_spilled_pages,
        max_pinned_pages,
    } = *setup;
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let checkpoint = Checkpoint::open(golden.join(model)).unwrap();
    let spec = checkpoint.config().spec.clone();
    let groups = match keeps {
        Keeps::Context => KvGroups::one(&spec),
        Keeps::Windows => KvGroups::by_window(&spec),
    };
    let limits = SchedulerConfig {
        kv_groups: groups.groups().to_vec(),
        max_num_seqs: 8,
        max_num_batched_tokens: MAX_ROWS + 8,
        max_prefill_tokens: MAX_ROWS,
        head_room: HeadRoom::fixed_share(0),
        max_preemptions: 1000,
        max_inflight_steps: num_stages as u32,
        num_pipeline_stages: num_stages as u32,
        speculation,
        max_spilled_pages,
        max_pinned_pages,
        // Without a prefix cache, requests can only get spilled pages back from host memory.
        enable_prefix_caching: max_spilled_pages == 0,
        ..SchedulerConfig::new(num_pages, PAGE_SIZE, 400)
    };
    let config = CpuConfig {
        kv_format,
        kv_groups: Some(groups),
        isa: held_isa(),
        ..CpuConfig::for_scheduler(&limits, 2)
    };
    let executor = CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap();
    Engine::start(EngineConfig::new(limits), Box::new(executor)).unwrap()
}

fn submit(engine: &Engine, prompt: Vec<TokenId>, seed: u64, max_tokens: u32) -> TokenStream {
    let mut sampling = SamplingParams::GREEDY;
    if seed % 2 == 1 {
        sampling.temperature = 0.7;
        sampling.seed = seed;
    }
    sampling.logprobs = Some(3);
    let submission = Submission {
        sampling,
        ..Submission::new(prompt, max_tokens)
    };
    engine.submit(submission).unwrap().remove(0)
}

fn prompt(seed: u64, len: u64) -> Vec<TokenId> {
    let token = |i| (i * i * 37 + i * 11 + seed * 53) % 79;
    (0..len).map(|i| token(i) as TokenId).collect()
}

/// Returns the outputs of a request, with the fields cleared that depend on other requests. Calls `look` for each
/// token, with the number of tokens before it.
fn read(mut stream: TokenStream, look: impl Fn(usize)) -> Vec<RequestOutput> {
    let mut outputs = Vec::new();
    while let Some(event) = stream.next_blocking() {
        if let StreamEvent::Output(mut output) = event {
            look(outputs.len());
            output.queue_us = 0;
            output.cache_use.num_cached_tokens = 0;
            output.request = Default::default();
            outputs.push(output);
        }
    }
    outputs
}

/// A prompt of 300 tokens has 38 pages, or 38 of each KV group. If pages behind windows are freed, far fewer pages are
/// enough, and decoding uses only those of the windows.
#[test]
fn a_prompt_longer_than_its_window_gives_pages_back() {
    const NUM_TOKENS: u32 = 300;
    // The second model has three groups with a window, and one without.
    for (model, num_window_groups, num_full_groups) in [("mistral", 1, 0), ("gemma3", 3, 1)] {
        for (kv_format, num_stages) in [(BF16, 1), (KvFormat::Int8, 1), (F32, 2)] {
            let setup = Setup::new(model, kv_format, num_stages);
            let roomy = engine(&setup, Keeps::Context, 60);
            let ask = |engine: &Engine| submit(engine, prompt(1, NUM_TOKENS.into()), 1, 30);
            let expected = read(ask(&roomy), |_| ());
            assert_eq!(expected.len(), 30);

            let num_full_pages = num_full_groups * (NUM_TOKENS + 30).div_ceil(PAGE_SIZE);
            let num_at_once = MAX_ROWS * num_stages as u32;
            let window = KvGroup {
                window: Some(WINDOW),
            };
            let in_window = |num_rows| window.num_pages(1000, num_rows, PAGE_SIZE);
            let num_pages = num_full_pages + num_window_groups * in_window(num_at_once);
            let all_pages = (num_full_groups + num_window_groups) * NUM_TOKENS.div_ceil(PAGE_SIZE);
            assert!(num_pages < all_pages);
            let tight = engine(&setup, Keeps::Windows, num_pages);
            // The pages for one row of the next step and one row of a step in flight.
            let most = num_full_pages + num_window_groups * in_window(2);
            let look = |num_before: usize| {
                let stats = tight.stats().scheduler;
                // The first counts may belong to the prompt's last step.
                let is_decoding = num_before > 2;
                let num_in_use = stats.num_in_use_pages;
                assert!(!is_decoding || num_in_use <= most as usize, "{stats:?}");
            };
            assert_eq!(read(ask(&tight), look), expected, "{model}, {kv_format:?}");
            assert_eq!(tight.stats().scheduler.num_preemptions, 0);
        }
    }
}

/// A cached prefix extends as far as all groups have the rows that the next query reads.
#[test]
fn prefixes_are_found_with_their_windows() {
    for model in [
        "mistral",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4-per-layer",
        "mixtral",
    ] {
        let setup = Setup::new(model, BF16, 1);
        let engines = [Keeps::Context, Keeps::Windows].map(|keeps| engine(&setup, keeps, 400));
        let first = prompt(2, 101);
        let longer = [first.clone(), prompt(3, 60)].concat();
        let other = [first[..70].to_vec(), prompt(4, 30)].concat();
        let outputs = engines.each_ref().map(|engine| {
            let prompts = [&first, &longer, &other, &first].into_iter();
            let outputs = prompts.map(|prompt| read(submit(engine, prompt.clone(), 0, 12), |_| ()));
            outputs.collect::<Vec<_>>()
        });
        assert_eq!(outputs[0], outputs[1], "{model}");
        let hits = engines[1].stats().scheduler.num_prefix_hit_tokens;
        // Whole pages, and copied rows of the next page. The last token of a prompt is always computed.
        assert_eq!(hits, (96 + 5) + (64 + 6) + (96 + 4), "{model}");
    }
}

/// Requests preempted for lack of pages resume and continue with the same answers.
#[test]
fn preempted_requests_come_back_with_their_windows() {
    for (model, kv_format, num_stages, num_pages) in [
        ("gemma2", BF16, 1, 60),
        ("gemma3", KvFormat::Int8, 1, 90),
        ("gemma4", KvFormat::Int8, 1, 70),
        ("gemma4-per-layer", BF16, 1, 70),
        ("gemma4-experts", F32, 2, 70),
        ("mixtral", F32, 1, 18),
        ("gemma2", F32, 2, 60),
    ] {
        let setup = Setup::new(model, kv_format, num_stages);
        let ask = |engine: &Engine, at: u64| submit(engine, prompt(at, 5 + at * 9), at, 60);
        let roomy = engine(&setup, Keeps::Context, 200);
        let expected: Vec<_> = (0..8).map(|at| read(ask(&roomy, at), |_| ())).collect();
        let tight = engine(&setup, Keeps::Windows, num_pages);
        let streams: Vec<_> = (0..8).map(|at| ask(&tight, at)).collect();
        for (at, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
            assert_eq!(read(stream, |_| ()), *expected, "request {at}, {model}");
        }
        let stats = tight.stats().scheduler;
        assert!(stats.num_preemptions > 0, "{model}: {stats:?}");
    }
}

/// Correct and wrong guesses occupy rows behind windows, and change no bit of an answer.
#[test]
fn guesses_behind_windows_reach_no_bit() {
    for (model, num_pages) in [("mistral", 18), ("gemma2", 60), ("gemma3", 90)] {
        let setup = Setup::new(model, BF16, 1);
        // A prompt that repeats itself gives the drafter something to guess.
        let ask = |engine: &Engine, at: u64| {
            let prompt = prompt(at, 9).repeat(3 + at as usize);
            submit(engine, prompt, at, 40)
        };
        let roomy = engine(&setup, Keeps::Context, 200);
        let expected: Vec<_> = (0..8).map(|at| read(ask(&roomy, at), |_| ())).collect();
        let guessing = Setup {
            speculation: Speculation::Ngram,
            ..setup
        };
        for num_pages in [400, num_pages] {
            let engine = engine(&guessing, Keeps::Windows, num_pages);
            let streams: Vec<_> = (0..8).map(|at| ask(&engine, at)).collect();
            for (at, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
                assert_eq!(read(stream, |_| ()), *expected, "request {at}, {model}");
            }
            let stats = engine.stats().scheduler;
            assert!(stats.num_draft_tokens > 0, "{model}: {stats:?}");
        }
    }
}

/// Preempted requests keep their windows in host memory, and continue with them.
#[test]
fn spilled_requests_come_back_with_their_windows() {
    for (model, kv_format, num_stages, num_pages) in [
        ("mistral", BF16, 1, 18),
        ("gemma3", KvFormat::Int8, 1, 90),
        ("gemma3", F32, 2, 90),
        ("gemma4", KvFormat::Int8, 1, 70),
        ("gemma4-per-layer", BF16, 1, 70),
    ] {
        let setup = Setup::new(model, kv_format, num_stages);
        let ask = |engine: &Engine, at: u64| submit(engine, prompt(at, 5 + at * 9), at, 60);
        let roomy = engine(&setup, Keeps::Context, 200);
        let expected: Vec<_> = (0..8).map(|at| read(ask(&roomy, at), |_| ())).collect();
        let spilling = Setup {
            max_spilled_pages: 400,
            ..setup
        };
        let tight = engine(&spilling, Keeps::Windows, num_pages);
        let streams: Vec<_> = (0..8).map(|at| ask(&tight, at)).collect();
        for (at, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
            assert_eq!(read(stream, |_| ()), *expected, "request {at}, {model}");
        }
        let stats = tight.stats().scheduler;
        assert!(stats.num_restores > 0, "{model}: {stats:?}");
    }
}

/// A pinned prefix is found whole after requests have taken all other pages. Answers are the same without pinning.
#[test]
fn a_pinned_prefix_keeps_its_windows() {
    for (model, num_window_groups, num_full_groups) in [("mistral", 1, 0), ("gemma3", 3, 1)] {
        let setup = Setup {
            max_pinned_pages: 60,
            ..Setup::new(model, BF16, 1)
        };
        let ask = |engine: &Engine| submit(engine, prompt(2, 100), 1, 12);
        let expected = read(ask(&engine(&setup, Keeps::Context, 200)), |_| ());
        let pinning = engine(&setup, Keeps::Windows, 180);
        // The prefix has twelve blocks. The token after it sees their last 23 rows in each group with a window.
        let num_pages = pinning.pin_prefix(prompt(2, 96)).unwrap();
        assert_eq!(
            num_pages,
            num_full_groups * 12 + num_window_groups * 3,
            "{model}"
        );
        for seed in 3..9 {
            read(submit(&pinning, prompt(seed, 250), 0, 20), |_| ());
        }
        let hits = |engine: &Engine| engine.stats().scheduler.num_prefix_hit_tokens;
        let before = hits(&pinning);
        assert_eq!(read(ask(&pinning), |_| ()), expected, "{model}");
        assert_eq!(hits(&pinning) - before, 96, "{model}");
        assert!(pinning.stats().scheduler.num_evicted_pages > 0);
    }
}

/// Sends the prompts of `asked`, and returns the engine's events of stored blocks, at least `num_blocks`.
fn stored_blocks(engine: &Engine, asked: &[Vec<TokenId>], num_blocks: usize) -> Vec<KvEvent> {
    let events = engine.subscribe_kv_events(7);
    for prompt in asked {
        read(submit(engine, prompt.clone(), 0, 1), |_| ());
    }
    let mut stored = Vec::new();
    wait_until("all blocks are announced", || {
        while let Some(event) = events.try_next() {
            match event {
                KvEvent::Stored { .. } => stored.push(event),
                KvEvent::Removed { .. } => panic!("nothing is evicted"),
                KvEvent::Cleared => {}
            }
        }
        stored.len() >= num_blocks
    });
    stored
}

/// The events name the same blocks, whether a node keeps all pages or only those of the windows.
#[test]
fn events_name_the_blocks_of_a_node_that_keeps_all_pages() {
    // The second prompt continues the first, of which only the last window is kept.
    let asked = [prompt(2, 40), prompt(2, 97), prompt(5, 33)];
    for model in ["mistral", "gemma3"] {
        let setup = Setup::new(model, BF16, 1);
        let expected = stored_blocks(&engine(&setup, Keeps::Context, 200), &asked, 12 + 4);
        let found = stored_blocks(&engine(&setup, Keeps::Windows, 400), &asked, 12 + 4);
        assert_eq!(found, expected, "{model}");
    }
}
