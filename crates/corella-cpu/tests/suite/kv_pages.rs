//! Tests of KV memory beyond the conformance suite: executors of different KV formats, and access from other threads.

use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::held_isa::{held_isa, isas};
use crate::whole_page::{read_page, write_page};
use corella_core::{Batch, PageId, Sample, SamplingParams, StepId, TokenId};
use corella_cpu::{CpuConfig, CpuExecutor, Isa};
use corella_model::{
    BatchBuilder, Checkpoint, DType, ElementOrder, Executor, KvFormat, KvGeometry, KvPages,
    LayerProgress, PageConversion, PageForm,
};
use corella_test::wait_until;

const F32: KvFormat = KvFormat::Float(DType::F32);
const F16: KvFormat = KvFormat::Float(DType::F16);
const BF16: KvFormat = KvFormat::Float(DType::Bf16);
const PAGE_SIZE: u32 = 16;
const MAX_TOKENS: u32 = 1024;
const NUM_PAGES: u32 = 2 * MAX_TOKENS / PAGE_SIZE;
/// Longer than any step here.
const LONG: Duration = Duration::from_secs(300);

/// In the first layer, keys and values depend on no stored keys and values. So an executor with a smaller format stores
/// there what an executor with f32 stores, rounded.
#[test]
fn rows_are_converted_as_executors_round_them() {
    let prompt = prompt(40);
    let model = golden("qwen3-gqa-tied");
    for isa in isas() {
        let layer = |format| {
            let mut executor = executor(&model, Some(isa), format, PAGE_SIZE);
            prefill(&mut executor, &prompt, &[3, 1, 2]);
            let kv = executor.kv_pages();
            (kv.geometry().clone(), read_layer(&*kv, 0, &[3, 1, 2]))
        };
        let (from, full) = layer(F32);
        for format in [F16, BF16, KvFormat::Int8] {
            let (to, stored) = layer(format);
            let converted = convert(&from, &to, prompt.len(), &full);
            // After the prompt, both have zeros.
            assert!(converted == stored, "{isa}, {format:?}");
            assert!(stored.iter().any(|&byte| byte != 0));
        }
    }
}

/// Prefill with keys and values in bf16, decode with integers: pages may be sent layer by layer and chunk by chunk
/// while the prompt is computed, or all at the end, with the same result.
#[test]
fn a_prompt_in_bf16_goes_on_in_integers_and_smaller_pages() {
    let prompt = prompt(75);
    let model = golden("qwen3-gqa-tied");
    let cached = prompt.len() - 1;
    let decode = |pages: &[Vec<u8>], to: &KvGeometry| {
        let mut executor = executor(&model, held_isa(), KvFormat::Int8, to.page_size);
        let kv = executor.kv_pages();
        let ids: Vec<PageId> = (0..cached as u32).map(PageId).collect();
        let ids = &ids[..cached.div_ceil(to.page_size as usize)];
        for (layer, pages) in pages.iter().enumerate() {
            // SAFETY: the pages are not in use yet.
            unsafe { kv.write(layer as u32, ids, PageForm::Canonical, pages) };
        }
        play(&mut executor, &prompt, ids, cached)
    };
    let page_size = 7;
    let to = executor(&model, held_isa(), KvFormat::Int8, page_size);
    let to = to.kv_pages().geometry().clone();

    let mut source = executor(&model, held_isa(), BF16, PAGE_SIZE);
    let kv = source.kv_pages();
    let from = kv.geometry().clone();
    let ids = [4, 9, 2, 7, 5];
    let conversion = PageConversion::new(&from, &to).unwrap();
    let num_pages = cached.div_ceil(page_size as usize);
    let mut pieces = vec![vec![0; num_pages * to.layer_bytes()]; from.num_layers as usize];
    let chunks = [0..20, 20..48, 48..75];
    let mut builder = BatchBuilder::new(0);
    builder
        .start(0, prompt.len(), &SamplingParams::GREEDY)
        .pages(0, 0, &ids);
    for chunk in chunks {
        builder.span(0, chunk.start, &prompt[chunk.clone()], false);
        let batch = builder.build();
        submit(&mut source, &batch);
        let positions = chunk.start..chunk.end.min(cached);
        for (layer, to_pages) in pieces.iter_mut().enumerate() {
            let progress = kv.wait_layer(batch.step, layer as u32, LONG);
            assert_ne!(progress, LayerProgress::TimedOut);
            let sent = &ids[positions.start / 16..positions.end.div_ceil(16)];
            let sent = read_layer(&*kv, layer as u32, sent);
            let first = positions.start / page_size as usize * to.layer_bytes();
            conversion.convert(positions.clone(), &sent, &mut to_pages[first..]);
        }
        source.wait().unwrap();
    }
    let whole = |layer| convert(&from, &to, cached, &read_layer(&*kv, layer, &ids));
    let whole: Vec<Vec<u8>> = (0..from.num_layers).map(whole).collect();
    assert!(pieces == whole);
    assert_eq!(decode(&pieces, &to), decode(&whole, &to));
    // The draws also resemble those of an executor that computes the whole prompt with integers.
    let mut alone = executor(&model, held_isa(), KvFormat::Int8, page_size);
    let ids: Vec<PageId> = (0..cached.div_ceil(page_size as usize) as u32 + 1)
        .map(PageId)
        .collect();
    let alone = play(&mut alone, &prompt, &ids, 0);
    for (a, b) in alone.iter().zip(decode(&whole, &to)) {
        let [a, b] = [a, &b].map(|sample| sample.logprobs.as_ref().unwrap().top[0].1);
        assert!((a - b).abs() < 0.05, "{a} {b}");
    }
}

/// Pages of each instruction set go through the memory of all others, and come back with the same bits.
#[test]
fn pages_change_between_plain_order_and_tiles() {
    let prompt = prompt(40);
    let model = golden("qwen3-gqa-tied");
    for format in [BF16, KvFormat::Int8] {
        let executors = || isas().map(|isa| executor(&model, Some(isa), format, PAGE_SIZE));
        for mut source in executors() {
            prefill(&mut source, &prompt, &[0, 1, 2]);
            let mut pages = [0, 1, 2].map(|id| read_page(&mut source, id, PageForm::Canonical));
            let order = source.kv_pages().geometry().order;
            for mut target in executors() {
                let kv = target.kv_pages();
                let is_native = kv.geometry().is_native_to(source.kv_pages().geometry());
                assert_eq!(is_native, kv.geometry().order == order);
                for (id, page) in (5..).zip(&mut pages) {
                    write_page(&mut target, id, PageForm::Canonical, page);
                    *page = read_page(&mut target, id, PageForm::Canonical);
                }
            }
            for (id, page) in (0..).zip(&pages) {
                let original = read_page(&mut source, id, PageForm::Canonical);
                assert!(*page == original, "{format:?}, {order:?}, page {id}");
            }
        }
    }
    let has_tiles = isas().any(|isa| {
        let executor = executor(&model, Some(isa), BF16, PAGE_SIZE);
        executor.kv_pages().geometry().order == ElementOrder::Tiles
    });
    if !has_tiles {
        eprintln!("no instruction set here reads tiles: only one order was tried");
    }
}

/// Whether a reader is in time depends on the machine's other load, so the test tries again until each layer except the
/// last has been read early.
#[test]
fn layers_can_be_read_while_later_ones_are_computed() {
    for num_stages in [1, 2] {
        let mut executor = executor_of(&nano(), held_isa(), BF16, PAGE_SIZE, num_stages);
        let kv = executor.kv_pages();
        let num_layers = kv.geometry().num_layers;
        let pages: Vec<u32> = (0..MAX_TOKENS / PAGE_SIZE).collect();
        let mut builder = BatchBuilder::new(0);
        let mut has_slot = false;
        let mut is_early = vec![false; num_layers as usize - 1];
        wait_until("every layer but the last is read early", || {
            if std::mem::replace(&mut has_slot, true) {
                builder.release(0);
            }
            builder
                .start(0, 1000, &SamplingParams::GREEDY)
                .pages(0, 0, &pages);
            builder.span(0, 0, &prompt(1000), false);
            let batch = builder.build();
            assert_eq!(kv.num_layers_done(batch.step), 0);
            assert_eq!(
                kv.wait_layer(batch.step, 0, Duration::ZERO),
                LayerProgress::TimedOut
            );
            submit(&mut executor, &batch);
            let mut early = Vec::new();
            for layer in 0..num_layers {
                let progress = kv.wait_layer(batch.step, layer, LONG);
                assert_ne!(progress, LayerProgress::TimedOut);
                early.push(read_layer(&*kv, layer, &pages[..62]));
                if let Some(is_early) = is_early.get_mut(layer as usize) {
                    *is_early |= kv.num_layers_done(batch.step) < num_layers;
                }
            }
            executor.wait().unwrap();
            assert_eq!(kv.num_layers_done(batch.step), num_layers);
            for (layer, early) in (0..).zip(early) {
                assert!(early.iter().any(|&byte| byte != 0), "layer {layer}");
                let late = read_layer(&*kv, layer, &pages[..62]);
                assert!(early == late, "layer {layer} has changed");
            }
            is_early.iter().all(|&is_early| is_early)
        });
    }
}

/// Idle workers clear memory before its first use, and keep what other threads have written to it. The test writes to
/// every second block only. The others show the progress of the workers.
#[cfg(target_os = "linux")]
#[test]
fn pages_written_from_outside_survive_idle_time() {
    if !clears_ahead() {
        eprintln!("no memory is cleared ahead on this machine: nothing was tried");
        return;
    }
    const BLOCK: usize = 2 << 20;
    let layer_bytes = executor(&nano(), held_isa(), BF16, PAGE_SIZE)
        .kv_pages()
        .geometry()
        .layer_bytes();
    let num_pages = (4 * BLOCK).div_ceil(layer_bytes) as u32;
    let mut executor = executor_with(&nano(), held_isa(), BF16, PAGE_SIZE, 2, num_pages);
    let kv = executor.kv_pages();
    let regions = kv.regions();
    // Blocks that begin and end a part of a page, counted from the start of its region.
    let blocks = |part: NonNull<[u8]>| {
        let first = part.cast::<u8>().addr().get();
        let last = first + part.len() - 1;
        let region = regions
            .iter()
            .map(|region| (region.cast::<u8>().addr().get(), region.len()))
            .find(|(start, len)| (*start..start + len).contains(&first));
        let (start, _) = region.expect("a page lies in a region");
        [(first - start) / BLOCK, (last - start) / BLOCK]
    };
    let parts = |layer: u32, page: u32| {
        let parts = kv.native_parts(layer, PageId(page)).into_iter();
        parts.filter(|part| !part.is_empty()).collect::<Vec<_>>()
    };
    let (mut written, mut left) = (Vec::new(), Vec::new());
    // The step below uses page 0.
    for page in 1..num_pages {
        for layer in 0..kv.geometry().num_layers {
            let parts = parts(layer, page);
            let remainders = parts.iter().flat_map(|&part| blocks(part)).map(|at| at % 2);
            let remainders: Vec<usize> = remainders.collect();
            if remainders.iter().all(|&it| it == 0) {
                written.extend(parts);
            } else if remainders.iter().all(|&it| it == 1) {
                left.extend(parts);
            }
        }
    }
    assert!(written.len() > 1000 && left.len() > 1000);
    let pattern = |at: usize, len: usize| -> Vec<u8> {
        let byte = |i: usize| (i * 31 + at * 7) as u8 | 1;
        (0..len).map(byte).collect()
    };
    let write = |first: usize| {
        for at in (first..written.len()).step_by(3) {
            let bytes = pattern(at, written[at].len());
            // SAFETY: no batch names the pages, and only this thread writes to them.
            unsafe {
                written[at]
                    .cast::<u8>()
                    .as_ptr()
                    .copy_from(bytes.as_ptr(), bytes.len())
            };
        }
    };
    // Some parts are written before memory is cleared, some while it is cleared, and some later.
    write(0);
    wait_until("clearing begins", || is_resident(left[0]));
    write(1);
    let is_cleared = || left.iter().all(|&part| is_resident(part));
    wait_until("memory is cleared", is_cleared);
    write(2);
    // A step wakes the stages, and then they are idle again.
    prefill(&mut executor, &prompt(1), &[0]);
    for (at, part) in written.iter().enumerate() {
        // SAFETY: the pages are no longer written.
        let bytes = unsafe { part.as_ref() };
        assert!(bytes == pattern(at, bytes.len()), "part {at}");
    }
    for part in left {
        // SAFETY: the pages have not been written.
        let bytes = unsafe { part.as_ref() };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }
}

/// Whether an executor clears memory ahead: on machines with uniform memory, on Linux 5.14 or later.
#[cfg(target_os = "linux")]
fn clears_ahead() -> bool {
    const PAGE: usize = 4096;
    let nodes = std::fs::read_to_string("/sys/devices/system/node/has_memory");
    let has_near_memory = nodes.is_ok_and(|nodes| nodes.contains([',', '-']));
    let memory = vec![0u8; 2 * PAGE];
    let page = memory.as_ptr().map_addr(|at| at.next_multiple_of(PAGE));
    // SAFETY: the page lies in `memory`, whose contents this does not change.
    let populated =
        unsafe { libc::madvise(page.cast_mut().cast(), PAGE, libc::MADV_POPULATE_WRITE) };
    !has_near_memory && populated == 0
}

/// Whether the system has provided memory for the first byte of a part of a page.
#[cfg(target_os = "linux")]
fn is_resident(part: NonNull<[u8]>) -> bool {
    const PAGE: usize = 4096;
    let page = part.cast::<u8>().as_ptr().map_addr(|at| at / PAGE * PAGE);
    let mut is_there = 0u8;
    // SAFETY: the page belongs to the executor's memory, and one byte is written.
    let result = unsafe { libc::mincore(page.cast(), PAGE, &raw mut is_there) };
    assert_eq!(result, 0);
    is_there & 1 == 1
}

#[test]
fn no_reader_waits_for_a_step_that_has_failed_or_never_comes() {
    for num_stages in [1, 2, 3] {
        let mut executor = executor_of(
            &golden("qwen3-gqa-untied"),
            held_isa(),
            BF16,
            PAGE_SIZE,
            num_stages,
        );
        let kv = executor.kv_pages();
        let last_layer = kv.geometry().num_layers - 1;
        let mut builder = BatchBuilder::new(0);
        builder
            .start(0, 1, &SamplingParams::GREEDY)
            .pages(0, 0, &[0]);
        builder.span(0, 0, &[60_000], false);
        let batch = builder.build();
        let waiting = wait_elsewhere(&kv, batch.step, last_layer);
        submit(&mut executor, &batch);
        assert!(executor.wait().is_err());
        assert_eq!(waiting.join().unwrap(), LayerProgress::StepOver);
        // An empty batch.
        let batch = builder.build();
        submit(&mut executor, &batch);
        executor.wait().unwrap();
        let progress = kv.wait_layer(batch.step, last_layer, Duration::ZERO);
        assert_eq!(progress, LayerProgress::StepOver);

        let waiting = wait_elsewhere(&kv, StepId(99), 0);
        let page = read_page(&mut executor, 0, PageForm::Native);
        drop(executor);
        assert_eq!(waiting.join().unwrap(), LayerProgress::StepOver);
        // The memory exists while a reader may use it.
        let mut bytes = vec![1; kv.geometry().layer_bytes()];
        // SAFETY: the memory is no longer written.
        unsafe { kv.read(0, &[PageId(0)], PageForm::Native, &mut bytes) };
        assert!(bytes == page[..bytes.len()]);
    }
}

fn wait_elsewhere(
    kv: &Arc<dyn KvPages>,
    step: StepId,
    layer: u32,
) -> std::thread::JoinHandle<LayerProgress> {
    let kv = Arc::clone(kv);
    std::thread::spawn(move || kv.wait_layer(step, layer, LONG))
}

fn golden(model: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    folder.join(model)
}

fn nano() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/nano")
}

fn prompt(len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (i * 37 + i * i) % 251).collect()
}

fn executor(model: &Path, isa: Option<Isa>, kv_format: KvFormat, page_size: u32) -> CpuExecutor {
    executor_of(model, isa, kv_format, page_size, 1)
}

fn executor_of(
    model: &Path,
    isa: Option<Isa>,
    kv_format: KvFormat,
    page_size: u32,
    num_stages: usize,
) -> CpuExecutor {
    executor_with(model, isa, kv_format, page_size, num_stages, NUM_PAGES)
}

fn executor_with(
    model: &Path,
    isa: Option<Isa>,
    kv_format: KvFormat,
    page_size: u32,
    num_stages: usize,
    num_pages: u32,
) -> CpuExecutor {
    let checkpoint = Checkpoint::open(model).unwrap();
    let config = CpuConfig {
        num_threads: 2,
        weight_format: None,
        kv_format,
        kv_groups: None,
        num_pages,
        page_size,
        max_num_seqs: 4,
        max_num_batched_tokens: MAX_TOKENS,
        max_model_len: MAX_TOKENS,
        isa,
        max_draft_tokens: 8,
        num_snapshots: 0,
        num_stages,
        pin_threads: false,
        max_adapter_rank: None,
        profile: None,
        turns: None,
    };
    let spec = checkpoint.config().spec.clone();
    CpuExecutor::new(spec, checkpoint.weights().unwrap(), config).unwrap()
}

fn submit(executor: &mut CpuExecutor, batch: &Arc<Batch>) {
    executor.submit(Arc::clone(batch)).unwrap();
    executor.sample(batch.step, Vec::new()).unwrap();
}

fn prefill(executor: &mut CpuExecutor, prompt: &[TokenId], pages: &[u32]) {
    let mut builder = BatchBuilder::new(0);
    builder.start(0, prompt.len(), &SamplingParams::GREEDY);
    builder.pages(0, 0, pages).span(0, 0, prompt, false);
    submit(executor, &builder.build());
    executor.wait().unwrap();
}

/// Pages of a layer whose step is done, in the canonical form.
fn read_layer(kv: &dyn KvPages, layer: u32, pages: &[u32]) -> Vec<u8> {
    let pages: Vec<PageId> = pages.iter().copied().map(PageId).collect();
    let mut bytes = vec![0; pages.len() * kv.geometry().layer_bytes()];
    // SAFETY: callers have waited for the layer, and submit no step meanwhile.
    unsafe { kv.read(layer, &pages, PageForm::Canonical, &mut bytes) };
    bytes
}

fn convert(from: &KvGeometry, to: &KvGeometry, num_positions: usize, pages: &[u8]) -> Vec<u8> {
    let num_pages = num_positions.div_ceil(to.page_size as usize);
    let mut converted = vec![0; num_pages * to.layer_bytes()];
    let conversion = PageConversion::new(from, to).unwrap();
    conversion.convert(0..num_positions, pages, &mut converted);
    converted
}

/// The draws after a prompt whose first tokens are already in the pages.
fn play(
    executor: &mut CpuExecutor,
    prompt: &[TokenId],
    pages: &[PageId],
    num_cached: usize,
) -> Vec<Sample> {
    let sampling = SamplingParams {
        logprobs: Some(5),
        ..SamplingParams::GREEDY
    };
    let mut pages: Vec<u32> = pages.iter().map(|page| page.0).collect();
    pages.extend([NUM_PAGES - 2, NUM_PAGES - 1]);
    let mut builder = BatchBuilder::new(0);
    builder.start_cached(0, prompt.len(), &sampling, &prompt[..num_cached]);
    builder.pages(0, 0, &pages);
    builder.span(0, num_cached, &prompt[num_cached..], true);
    let mut samples = Vec::new();
    for i in 0..6 {
        submit(executor, &builder.build());
        let sample = executor.wait().unwrap().samples.remove(0).1;
        builder.span(0, prompt.len() + i, &[sample.token], true);
        samples.push(sample);
    }
    samples
}
