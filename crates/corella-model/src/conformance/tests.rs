//! The mock passes the suite, and an executor with any one fault fails it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::ThreadId;
use std::time::Duration;

use corella_core::{Batch, BatchOutput, InputToken, KvGroup, PageId, SlotStart, Yield};

use super::*;
use crate::{
    ExecutorInfo, KvGeometry, KvLayout, KvPages, LayerProgress, MockConfig, MockExecutor, PageForm,
    StepWaker, TokenMask,
};

const VOCAB_SIZE: usize = 100;

fn mock(config: &ConformanceConfig) -> MockExecutor {
    MockExecutor::new(MockConfig {
        num_layers: 2,
        ..MockConfig::new(VOCAB_SIZE, config.num_pages, config.page_size)
    })
}

#[test]
fn the_mock_passes() {
    for page_size in [4, 5, 16] {
        run(VOCAB_SIZE, page_size, |config| Box::new(mock(config)));
    }
}

fn mock_with_windows(config: &ConformanceConfig, windows: &[Option<u32>]) -> MockExecutor {
    let groups = windows.iter().map(|&window| KvGroup { window });
    MockExecutor::new(MockConfig {
        num_layers: 2,
        kv_groups: groups.collect(),
        ..MockConfig::new(VOCAB_SIZE, config.num_pages, config.page_size)
    })
}

#[test]
fn the_mock_passes_with_windows() {
    let models: [(u32, &[Option<u32>]); 4] = [
        (4, &[Some(7)]),
        (5, &[None, Some(1)]),
        (4, &[Some(20), None, Some(3)]),
        (16, &[None, Some(24)]),
    ];
    for (page_size, windows) in models {
        run(VOCAB_SIZE, page_size, |config| {
            Box::new(mock_with_windows(config, windows))
        });
    }
}

#[test]
fn the_mock_passes_with_recurrent_layers() {
    for page_size in [4, 16] {
        run_recurrent(VOCAB_SIZE, page_size, |config| {
            Box::new(MockExecutor::new(MockConfig {
                num_layers: 2,
                num_snapshots: Some(8),
                ..MockConfig::new(VOCAB_SIZE, config.num_pages, config.page_size)
            }))
        });
    }
}

/// An executor that reads positions behind its declared windows.
struct TooWide(MockExecutor);

impl Executor for TooWide {
    fn info(&self) -> ExecutorInfo {
        self.0.info()
    }

    fn kv_layout(&self) -> KvLayout {
        let mut layout = self.0.kv_layout();
        let windows = layout.groups.iter_mut().map(|group| &mut group.window);
        windows.flatten().for_each(|window| *window -= 1);
        layout
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        self.0.warm_up()
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        self.0.submit(batch)
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.0.sample(step, masks)
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        self.0.try_wait()
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.0.set_waker(waker);
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        self.0.wait()
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        self.0.kv_pages()
    }
}

/// Pages behind a window may already belong to other requests.
#[test]
fn who_reads_behind_a_window_is_found() {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        run(VOCAB_SIZE, 4, |config| {
            Box::new(TooWide(mock_with_windows(config, &[None, Some(9)])))
        });
    }));
    let panic = outcome.expect_err("nothing was found");
    let said = panic.downcast_ref::<String>().unwrap();
    assert!(said.contains("of another history"), "{said}");
}

/// The mock executor with one fault in its batches or its results.
struct Broken {
    mock: MockExecutor,
    num_threads: usize,
    batches: VecDeque<Arc<Batch>>,
    fault: Fault,
}

#[derive(Clone, Copy)]
enum Fault {
    /// Changes the mock's batch.
    Batch(fn(&mut Batch)),
    /// Changes the last log-probability by one unit in the last place, if the condition is true.
    Rounding(fn(&Batch, usize) -> bool),
    Output(fn(&mut BatchOutput)),
    LostMasks,
    /// Drops masks that allow all tokens.
    ForgottenMasks,
    SwallowedFailures,
    /// Keeps drawing after a draft that does not hold.
    TrustedDraft,
    Pages(PagesFault),
}

impl Executor for Broken {
    fn info(&self) -> ExecutorInfo {
        self.mock.info()
    }

    fn kv_layout(&self) -> KvLayout {
        self.mock.kv_layout()
    }

    fn warm_up(&mut self) -> Result<(), ExecutorError> {
        self.mock.warm_up()
    }

    fn submit(&mut self, batch: Arc<Batch>) -> Result<(), ExecutorError> {
        let mut seen = (*batch).clone();
        if let Fault::Batch(change) = self.fault {
            change(&mut seen);
        }
        self.batches.push_back(batch);
        self.mock.submit(Arc::new(seen))
    }

    fn sample(&mut self, step: StepId, mut masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        if let Fault::LostMasks = self.fault {
            masks.retain(|mask| mask.allowed.iter().all(|&word| word == 0));
        }
        if let Fault::ForgottenMasks = self.fault {
            let is_all = |mask: &TokenMask| mask.allowed[..3].iter().all(|&word| word == u32::MAX);
            masks.retain(|mask| !is_all(mask));
        }
        self.mock.sample(step, masks)
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        self.wait().map(Some)
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.mock.set_waker(waker);
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let batch = self.batches.pop_front().unwrap();
        let mut result = self.mock.wait();
        match (self.fault, &mut result) {
            (Fault::SwallowedFailures, Err(ExecutorError::StepFailed { step, .. })) => {
                let sampling = batch.spans.iter().filter(|span| span.yields.draws());
                let sample = |slot| {
                    (
                        slot,
                        Sample {
                            token: 0,
                            logprobs: None,
                        },
                    )
                };
                let samples = sampling.map(|span| sample(span.slot)).collect();
                result = Ok(BatchOutput {
                    step: *step,
                    samples,
                    logprobs: Vec::new(),
                    hidden_states: Vec::new(),
                    undrawn: Vec::new(),
                });
            }
            (Fault::Rounding(applies), Ok(output)) if applies(&batch, self.num_threads) => {
                let last = output
                    .samples
                    .last_mut()
                    .and_then(|(_, s)| s.logprobs.as_mut());
                if let Some((_, logprob)) = last.and_then(|logprobs| logprobs.top.last_mut()) {
                    *logprob = logprob.next_down();
                }
            }
            (Fault::TrustedDraft, Ok(output)) => {
                if let Some(span) = batch.spans.last()
                    && let Some((slot, sample)) = output.samples.last().cloned()
                {
                    let own = output.samples.iter().filter(|(other, _)| *other == slot);
                    if slot == span.slot && own.count() <= span.num_drafts as usize {
                        output.samples.push((slot, sample));
                    }
                }
            }
            (Fault::Output(change), Ok(output)) => change(output),
            _ => {}
        }
        result
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        match self.fault {
            Fault::Pages(fault) => Arc::new(BrokenPages {
                pages: self.mock.kv_pages(),
                fault,
                owner: std::thread::current().id(),
            }),
            _ => self.mock.kv_pages(),
        }
    }
}

/// The mock's pages with one fault.
struct BrokenPages {
    pages: Arc<dyn KvPages>,
    fault: PagesFault,
    owner: ThreadId,
}

#[derive(Clone, Copy, PartialEq)]
enum PagesFault {
    /// Changes a byte for other threads, which read before the step has returned.
    ChangeLater,
    NeverReady,
    NotCounted,
    /// Reads copy no bytes.
    Empty,
    /// Gives native bytes, also if the canonical form is asked for.
    NativeOnly,
    /// Gives the layer before the last one in place of the last layer.
    LastLayer,
    /// The last byte of the last page is outside of the region.
    ShortRegion,
    /// Whole pages are read with a wrong byte, or not written.
    ReadWhole,
    WriteWhole,
}

// SAFETY: all memory belongs to the mock, which is a correct implementation.
unsafe impl KvPages for BrokenPages {
    fn geometry(&self) -> &KvGeometry {
        self.pages.geometry()
    }

    fn regions(&self) -> Vec<NonNull<[u8]>> {
        let mut regions = self.pages.regions();
        if self.fault == PagesFault::ShortRegion {
            let whole = regions[0];
            regions[0] = NonNull::slice_from_raw_parts(whole.cast(), whole.len() - 1);
        }
        regions
    }

    fn native_parts(&self, layer: u32, page: PageId) -> [NonNull<[u8]>; 2] {
        self.pages.native_parts(layer, page)
    }

    fn num_layers_done(&self, step: StepId) -> u32 {
        match self.fault {
            PagesFault::NotCounted => 0,
            _ => self.pages.num_layers_done(step),
        }
    }

    fn wait_layer(&self, step: StepId, layer: u32, timeout: Duration) -> LayerProgress {
        match self.fault {
            PagesFault::NeverReady => LayerProgress::TimedOut,
            _ => self.pages.wait_layer(step, layer, timeout),
        }
    }

    unsafe fn read(&self, layer: u32, pages: &[PageId], form: PageForm, out: &mut [u8]) {
        let is_last = layer + 1 == self.geometry().num_layers;
        let (layer, form) = match self.fault {
            PagesFault::Empty => return,
            PagesFault::NativeOnly => (layer, PageForm::Native),
            PagesFault::LastLayer if is_last => (layer - 1, form),
            _ => (layer, form),
        };
        // SAFETY: the caller's contract.
        unsafe { self.pages.read(layer, pages, form, out) };
        let is_other_thread = std::thread::current().id() != self.owner;
        if self.fault == PagesFault::ChangeLater && is_other_thread {
            out[0] ^= 1;
        }
    }

    unsafe fn read_whole(&self, pages: &[PageId], out: &mut [u8]) {
        // SAFETY: the caller's contract.
        unsafe { self.pages.read_whole(pages, out) };
        if self.fault == PagesFault::ReadWhole {
            out[0] ^= 1;
        }
    }

    unsafe fn write_whole(&self, pages: &[PageId], bytes: &[u8]) {
        if self.fault != PagesFault::WriteWhole {
            // SAFETY: the caller's contract.
            unsafe { self.pages.write_whole(pages, bytes) };
        }
    }
}

#[test]
fn whatever_is_broken_is_found() {
    let cases: [(&str, Fault); 40] = [
        (
            "chunks of 3",
            Fault::Rounding(|batch, _| {
                batch
                    .spans
                    .iter()
                    .any(|span| span.start > 0 && span.tokens.len() > 1)
            }),
        ),
        (
            "shuffled pages",
            Fault::Rounding(|batch, _| !batch.pages.is_sorted()),
        ),
        (
            "in one batch",
            Fault::Rounding(|batch, _| batch.spans.len() > 1),
        ),
        (
            "3 threads",
            Fault::Rounding(|_, num_threads| num_threads == 3),
        ),
        (
            "two steps in flight",
            Fault::Rounding(|batch, _| {
                batch
                    .tokens
                    .iter()
                    .any(|input| matches!(input, InputToken::FromStep { .. }))
            }),
        ),
        (
            "tokens cached",
            Fault::Rounding(|batch, _| !batch.copies.is_empty()),
        ),
        ("never written", Fault::Batch(|batch| batch.copies.clear())),
        (
            "resumed after preemption",
            Fault::Rounding(|batch, _| {
                let resumes_with_three =
                    |start: &SlotStart| start.num_prompt_tokens + 3 == batch.tokens.len() as u32;
                batch.spans.len() == 1 && batch.started.iter().any(resumes_with_three)
            }),
        ),
        (
            "slot 0 is started",
            Fault::Batch(|batch| batch.released.clear()),
        ),
        (
            "in moved pages",
            Fault::Rounding(|batch, _| {
                batch
                    .started
                    .iter()
                    .any(|start| start.cached_tokens.len() + 1 == LONG_PROMPT)
                    && batch.copies.is_empty()
                    && batch.spans.len() == 1
            }),
        ),
        (
            "layer 0 changed after it was ready",
            Fault::Pages(PagesFault::ChangeLater),
        ),
        ("is not ready in time", Fault::Pages(PagesFault::NeverReady)),
        ("must count as done", Fault::Pages(PagesFault::NotCounted)),
        ("of another history", Fault::Pages(PagesFault::Empty)),
        (
            "in layer 1, which holds",
            Fault::Pages(PagesFault::LastLayer),
        ),
        (
            "lies outside the regions",
            Fault::Pages(PagesFault::ShortRegion),
        ),
        // The result depends on the bytes.
        ("slot 1 reads token", Fault::Pages(PagesFault::NativeOnly)),
        (
            "other bytes than their layers",
            Fault::Pages(PagesFault::ReadWhole),
        ),
        (
            "written otherwise than read",
            Fault::Pages(PagesFault::WriteWhole),
        ),
        ("fails its step", Fault::SwallowedFailures),
        (
            "samples that no script asked for",
            Fault::Output(|output| {
                for (slot, _) in output.undrawn.drain(..) {
                    let sample = Sample {
                        token: 0,
                        logprobs: None,
                    };
                    output.samples.insert(0, (slot, sample));
                }
            }),
        ),
        (
            "one sample for each",
            Fault::Output(|output| {
                if let Some((slot, _)) = output.samples.first_mut() {
                    slot.0 += 1;
                }
            }),
        ),
        (
            "one sample for each",
            Fault::Output(|output| output.samples.reverse()),
        ),
        (
            "another seed",
            Fault::Batch(|batch| change_sampling(batch, |p| p.seed = 0)),
        ),
        (
            "another choice",
            Fault::Batch(|batch| change_sampling(batch, |p| p.choice = 0)),
        ),
        (
            "top-k of one",
            Fault::Batch(|batch| change_sampling(batch, |p| p.top_k = 0)),
        ),
        (
            "rules instead of masks",
            Fault::Batch(|batch| change_sampling(batch, |p| p.rules = None)),
        ),
        (
            "the biases change something",
            Fault::Batch(|batch| {
                change_sampling(batch, |p| {
                    let rules = p
                        .rules
                        .take()
                        .map(|rules| (*rules).clone().with_bias(Vec::new()));
                    p.rules = rules.map(Arc::new);
                });
            }),
        ),
        (
            "min_tokens",
            Fault::Batch(|batch| {
                batch
                    .started
                    .iter_mut()
                    .for_each(|start| start.min_tokens = 0);
            }),
        ),
        (
            "first token is rewarded",
            Fault::Batch(|batch| {
                change_sampling(batch, |p| p.presence_penalty = p.presence_penalty.max(0.0));
            }),
        ),
        (
            "first token is rewarded",
            Fault::Batch(|batch| {
                change_sampling(batch, |p| {
                    p.frequency_penalty = p.frequency_penalty.max(0.0)
                });
            }),
        ),
        (
            "prompt's tokens are rewarded",
            Fault::Batch(|batch| {
                change_sampling(batch, |p| p.repetition_penalty = 1.0);
            }),
        ),
        ("is not allowed", Fault::LostMasks),
        (
            "with 1 drafts",
            Fault::Rounding(|batch, _| batch.spans.iter().any(|span| span.num_drafts > 0)),
        ),
        // This executor accepts all drafts.
        (
            "a token is drawn behind each draft that holds",
            Fault::Batch(|batch| batch.spans.iter_mut().for_each(|span| span.num_drafts = 0)),
        ),
        // This executor does not draw after drafts.
        (
            "a token is drawn behind each draft that holds",
            Fault::Output(|output| output.samples.dedup_by_key(|(slot, _)| *slot)),
        ),
        (
            "a token is drawn behind each draft that holds",
            Fault::TrustedDraft,
        ),
        ("a slot with a mask draws once", Fault::ForgottenMasks),
        (
            "a hidden state differs",
            Fault::Output(|output| {
                if let [_, (_, state), ..] = &mut output.hidden_states[..] {
                    *state = state.iter().map(|value| value.next_down()).collect();
                }
            }),
        ),
        // This executor takes the mean of a prompt's last chunk.
        (
            "has not added all its rows",
            Fault::Batch(|batch| {
                for span in &mut batch.spans {
                    if span.yields == Yield::Sum {
                        span.yields = Yield::Nothing;
                    }
                }
            }),
        ),
    ];
    for (symptom, fault) in cases {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            run(VOCAB_SIZE, 4, |config| {
                Box::new(Broken {
                    mock: mock(config),
                    num_threads: config.num_threads,
                    batches: VecDeque::new(),
                    fault,
                })
            });
        }));
        let panic = outcome.expect_err(symptom);
        let said = panic
            .downcast_ref::<String>()
            .expect("the panic has no message");
        assert!(said.contains(symptom), "{symptom}: {said}");
    }
}

fn change_sampling(batch: &mut Batch, change: fn(&mut SamplingParams)) {
    batch
        .started
        .iter_mut()
        .for_each(|start| change(&mut start.sampling));
}
