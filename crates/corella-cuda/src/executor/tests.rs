//! The executor with impossible batches and with failing devices.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use corella_core::{PageId, SamplingParams, TokenId};
use corella_model::{BatchBuilder, Checkpoint, DType, PageForm};

use super::*;
use crate::device::{Fault, FaultyDevice, Stream, test_device};

const PAGE_SIZE: u32 = 16;
const NUM_PAGES: u32 = 8;
/// The length of two pages, so that an overlong table would reach into the next one.
const MAX_MODEL_LEN: u32 = 32;
const PROMPT: [TokenId; 5] = [3, 1, 4, 1, 5];

fn executor(device: &SharedDevice, uses_graphs: bool) -> CudaExecutor {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/qwen3-gqa-tied");
    let checkpoint = Checkpoint::open(folder).unwrap();
    let spec = checkpoint.config().spec.clone();
    let config = CudaConfig {
        element: Element::F32,
        kv_format: DType::F32.into(),
        kv_groups: None,
        num_pages: NUM_PAGES,
        page_size: PAGE_SIZE,
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        max_model_len: MAX_MODEL_LEN,
        max_logprobs: 4,
        is_batch_invariant: true,
        uses_graphs,
    };
    let weights = checkpoint.weights().unwrap();
    CudaExecutor::new(device, spec, weights, config, &|_| ()).unwrap()
}

/// The draws of a step for its slots.
fn run(
    executor: &mut CudaExecutor,
    builder: &mut BatchBuilder,
) -> Result<Vec<TokenId>, ExecutorError> {
    let batch = builder.build();
    executor.submit(Arc::clone(&batch))?;
    executor.sample(batch.step, Vec::new())?;
    let output = executor.wait()?;
    let samples = output.samples.into_iter();
    Ok(samples.map(|(_, sample)| sample.token).collect())
}

/// The token after the prompt, in a slot with pages of its own.
fn draw(
    executor: &mut CudaExecutor,
    builder: &mut BatchBuilder,
    slot: u32,
) -> Result<Vec<TokenId>, ExecutorError> {
    builder
        .start(slot, PROMPT.len(), &SamplingParams::GREEDY)
        .pages(slot, 0, &[2 * slot, 2 * slot + 1])
        .span(slot, 0, &PROMPT, true);
    run(executor, builder)
}

fn is_lost(result: Result<Vec<TokenId>, ExecutorError>, reason: &str) {
    match result {
        Err(ExecutorError::Lost { reason: told }) => assert_eq!(told, reason),
        other => panic!("{other:?}, not lost because {reason}"),
    }
}

#[test]
fn impossible_batches_change_nothing_but_their_own_slots() {
    let device = test_device();
    let expected = draw(&mut executor(&device, false), &mut BatchBuilder::new(0), 0).unwrap();
    assert_eq!(expected.len(), 1);

    let mut executor = executor(&device, false);
    let mut builder = BatchBuilder::new(0);
    let prompt_len = PROMPT.len();
    // The first slot's tokens stay in use all the time.
    assert_eq!(draw(&mut executor, &mut builder, 0).unwrap(), expected);
    let long = [7; 3 * MAX_MODEL_LEN as usize];
    let long_table = [7; 3];
    let impossible: [&dyn Fn(&mut BatchBuilder); 7] = [
        // A group of pages that the model lacks.
        &|builder| {
            builder.pages_of_group(1, 200, 0, &[4]);
        },
        // A page, an entry, and a slot that do not exist.
        &|builder| {
            builder.pages(1, 0, &[NUM_PAGES]);
        },
        &|builder| {
            builder.pages(1, 1 << 20, &[4]);
        },
        &|builder| {
            builder.pages(77, 0, &[4]);
        },
        // More entries than a context has pages, which would lie after the tables.
        &|builder| {
            builder.pages(1, 0, &long_table);
            builder.span(1, 0, &[1 << 30], true);
        },
        // More tokens than a context may have.
        &|builder| {
            builder.start_cached(1, long.len(), &SamplingParams::GREEDY, &long);
            builder.span(1, long.len(), &[1], true);
        },
        // Copies beyond the pages.
        &|builder| {
            builder.copy(0, NUM_PAGES + 1, 1);
        },
    ];
    for (index, add) in impossible.iter().enumerate() {
        builder.start(1, prompt_len, &SamplingParams::GREEDY);
        add(&mut builder);
        let result = run(&mut executor, &mut builder);
        assert!(
            matches!(result, Err(ExecutorError::StepFailed { .. })),
            "{index}: {result:?}"
        );
        builder.release(1);
        // The last token of the prompt again: its pages are the first slot's.
        builder.span(0, prompt_len - 1, &PROMPT[prompt_len - 1..], true);
        assert_eq!(
            run(&mut executor, &mut builder).unwrap(),
            expected,
            "{index}"
        );
    }
    assert_eq!(draw(&mut executor, &mut builder, 1).unwrap(), expected);
}

#[test]
fn a_device_whose_work_fails_is_lost_and_its_caller_is_woken() {
    let faulty = Arc::new(FaultyDevice::open());
    let device: SharedDevice = faulty.clone();
    let mut executor = executor(&device, false);
    let woken = Arc::new(AtomicUsize::new(0));
    let waker = Arc::clone(&woken);
    executor.set_waker(Arc::new(move || {
        waker.fetch_add(1, Ordering::SeqCst);
    }));
    let mut builder = BatchBuilder::new(0);
    draw(&mut executor, &mut builder, 0).unwrap();
    faulty.set(Fault::Work);
    let before = woken.load(Ordering::SeqCst);
    is_lost(draw(&mut executor, &mut builder, 1), "the work went wrong");
    // Later steps give no result, whether they are waited for or not.
    let next = draw(&mut executor, &mut builder, 0);
    assert!(matches!(next, Err(ExecutorError::Lost { .. })), "{next:?}");
    assert!(matches!(
        executor.try_wait(),
        Err(ExecutorError::Lost { .. })
    ));
    drop(executor);
    assert!(woken.load(Ordering::SeqCst) > before);
}

#[test]
fn pages_that_could_not_be_moved_end_the_executor() {
    let faulty = Arc::new(FaultyDevice::open());
    let device: SharedDevice = faulty.clone();
    let mut executor = executor(&device, false);
    let mut builder = BatchBuilder::new(0);
    draw(&mut executor, &mut builder, 0).unwrap();
    faulty.set(Fault::Launches(Stream::Pages));
    let pages = executor.kv_pages();
    let mut bytes = vec![0; pages.geometry().layer_bytes()];
    // SAFETY: the step that wrote the page has returned.
    unsafe { pages.read(0, &[PageId(0)], PageForm::Canonical, &mut bytes) };
    is_lost(
        draw(&mut executor, &mut builder, 1),
        "the launch was refused",
    );
}

#[test]
fn a_graph_that_cannot_be_captured_tells_why() {
    let faulty = Arc::new(FaultyDevice::open());
    let device: SharedDevice = faulty.clone();
    let mut executor = executor(&device, true);
    faulty.set(Fault::Captures);
    let reason = String::from("the launch was refused");
    assert_eq!(executor.warm_up(), Err(ExecutorError::Lost { reason }));
}
