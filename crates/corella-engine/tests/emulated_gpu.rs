//! Blocks of a GPU in host memory, with the CUDA executor on the device that runs its kernels in host memory.

use std::path::Path;

use corella_core::{CacheUse, SchedulerConfig, TokenId};
use corella_cuda::{CudaConfig, CudaExecutor, Element, test_device};
use corella_engine::{
    Engine, EngineConfig, KvDiskConfig, KvDiskLabel, KvDiskStats, KvPlaces, StreamEvent, Submission,
};
use corella_model::{Checkpoint, DType, KvGroups};
use corella_test::wait_until;

const PAGE_SIZE: u32 = 16;
/// Both models have more tokens than this number and 3.
const VOCAB_SIZE: u32 = 70;
/// The number of whole blocks of a prompt.
const NUM_BLOCKS: u32 = 3;
const MAX_TOKENS: u32 = 4;
/// The pages of two requests.
const NUM_PAGES: u32 = 2 * (NUM_BLOCKS + 1);
const MAX_BYTES: u64 = 4 << 20;

fn engine(model: &str, element: Element, places: Option<KvPlaces>) -> Engine {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let checkpoint = Checkpoint::open(folder.join(model)).unwrap();
    let spec = checkpoint.config().spec.clone();
    let groups = KvGroups::by_window(&spec);
    let limits = SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 32,
        max_prefill_tokens: 32,
        max_fetched_pages: NUM_PAGES,
        max_served_pages: NUM_PAGES,
        kv_groups: groups.groups().to_vec(),
        ..SchedulerConfig::new(
            NUM_PAGES * groups.groups().len() as u32,
            PAGE_SIZE,
            NUM_PAGES * PAGE_SIZE,
        )
    };
    let config = CudaConfig {
        element,
        kv_format: match element {
            Element::F32 => DType::F32.into(),
            Element::Bf16 => DType::Bf16.into(),
        },
        kv_groups: Some(groups),
        num_pages: limits.num_pages,
        page_size: PAGE_SIZE,
        max_num_seqs: limits.max_num_seqs,
        max_num_batched_tokens: limits.max_num_batched_tokens,
        max_model_len: limits.max_model_len,
        max_logprobs: 4,
        is_batch_invariant: true,
        uses_graphs: false,
    };
    let weights = checkpoint.weights().unwrap();
    let executor = CudaExecutor::new(&test_device(), spec, weights, config, &|_| ()).unwrap();
    let mut config = EngineConfig::new(limits);
    config.kv_disk = places.map(|places| KvDiskConfig {
        places,
        label: KvDiskLabel::default(),
        identity: 1,
        keeps_salted: true,
        reads_always: true,
    });
    Engine::start(config, Box::new(executor)).unwrap()
}

fn prompt(first: TokenId) -> Vec<TokenId> {
    let num_tokens = NUM_BLOCKS * PAGE_SIZE + 2;
    (0..num_tokens)
        .map(|at| 3 + (first + at * 7) % VOCAB_SIZE)
        .collect()
}

/// The tokens of an answer, and what came from the cache.
fn ask(engine: &Engine, first: TokenId) -> (Vec<TokenId>, CacheUse) {
    let request = Submission::new(prompt(first), MAX_TOKENS);
    let mut stream = engine.submit(request).unwrap().remove(0);
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let (mut tokens, mut cache_use) = (Vec::new(), CacheUse::default());
    while let Some(event) = stream.next_blocking() {
        let StreamEvent::Output(output) = event else {
            panic!("{event:?}");
        };
        cache_use = output.cache_use;
        tokens.extend(output.sample.map(|sample| sample.token));
    }
    assert_eq!(tokens.len(), MAX_TOKENS as usize);
    (tokens, cache_use)
}

fn stats(engine: &Engine) -> KvDiskStats {
    engine.stats().kv_disk.expect("it has host memory")
}

/// Returns the statistics after a prompt was stored, evicted and found again.
fn check(model: &str, element: Element) -> KvDiskStats {
    let plain = engine(model, element, None);
    let expected: Vec<_> = (1..6).map(|first| ask(&plain, first).0).collect();
    plain.shutdown();

    let engine = engine(model, element, Some(KvPlaces::Memory(MAX_BYTES)));
    engine.wait_disk_opened();
    assert_eq!(ask(&engine, 1).0, expected[0]);
    // The second request makes the prompt worth a copy.
    assert_eq!(ask(&engine, 1).0, expected[0]);
    wait_until("the blocks are stored", || {
        stats(&engine).num_stored >= u64::from(NUM_BLOCKS)
    });
    // Each of these prompts takes half of the pages.
    for first in 2..6 {
        assert_eq!(ask(&engine, first).0, expected[first as usize - 1]);
    }
    let (tokens, cache_use) = ask(&engine, 1);
    assert_eq!(tokens, expected[0]);
    let num_tokens = NUM_BLOCKS * PAGE_SIZE;
    assert_eq!(cache_use.num_cached_tokens, num_tokens);
    assert_eq!(cache_use.fetched_tokens.num_from_host, num_tokens);
    assert_eq!(cache_use.fetched_tokens.total(), num_tokens);
    let found = stats(&engine);
    wait_until("no request keeps pages", || {
        engine.reset_prefix_cache_and_tiers().is_ok()
    });
    assert_eq!(stats(&engine).num_pages, 0);
    assert_eq!(ask(&engine, 1), (expected[0].clone(), CacheUse::default()));
    if let Some(events) = engine.subscribe_disk_events(0) {
        assert!(events.is_in_memory());
    }
    engine.shutdown();
    found
}

#[test]
fn an_evicted_prompt_comes_back_from_host_memory() {
    let found = check("qwen3-gqa-tied", Element::F32);
    assert!(found.is_in_memory && found.is_on());
    assert_eq!(found.num_read, u64::from(NUM_BLOCKS));
    assert!(found.bytes_read > 0 && found.bytes_written >= found.bytes_read);
    assert_eq!((found.num_damaged, found.num_errors), (0, 0));
}

#[test]
fn of_windows_the_pages_that_queries_read_come_back() {
    let found = check("gemma2", Element::Bf16);
    // A window of 24 positions reads the last two blocks.
    assert_eq!(found.num_read, u64::from(2 * NUM_BLOCKS - 1));
}
