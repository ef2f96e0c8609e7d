//! An engine with a small pool over the mock executor, and helpers for its streams.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use corella_core::{Batch, BatchOutput, FinishReason, HeadRoom, SchedulerConfig, StepId, TokenId};
use corella_engine::{Engine, EngineConfig, EngineState, StreamEvent, Submission, TokenStream};
use corella_model::{
    Executor, ExecutorError, ExecutorInfo, KvLayout, KvPages, MockConfig, MockExecutor, StepGate,
    StepWaker, TokenMask,
};
use corella_test::{wait_for, wait_until};

pub const VOCAB_SIZE: usize = 50;
pub const LONG: Duration = Duration::from_secs(300);

pub fn limits(num_pages: u32, max_inflight_steps: u32) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs: 16,
        max_num_batched_tokens: 48,
        max_prefill_tokens: 32,
        max_queued_requests: 256,
        head_room: HeadRoom::fixed_share(HeadRoom::ONE / 8),
        max_preemptions: 1000,
        max_inflight_steps,
        ..SchedulerConfig::new(num_pages, 4, 128)
    }
}

pub fn model(limits: &SchedulerConfig) -> MockConfig {
    MockConfig {
        kv_groups: limits.kv_groups.clone(),
        num_snapshots: limits.recurrent_state.map(|state| state.num_snapshots),
        ..MockConfig::new(VOCAB_SIZE, limits.num_pages, limits.page_size)
    }
}

pub fn start(limits: SchedulerConfig, mock: MockConfig) -> Engine {
    start_with(EngineConfig::new(limits), mock)
}

pub fn start_with(config: EngineConfig, mock: MockConfig) -> Engine {
    Engine::start(config, Box::new(MockExecutor::new(mock))).expect("the engine did not start")
}

pub fn submission(prompt: Vec<TokenId>, max_tokens: u32) -> Submission {
    Submission::new(prompt, max_tokens)
}

pub fn submit_one(engine: &Engine, submission: Submission) -> TokenStream {
    let mut streams = engine
        .submit(submission)
        .expect("the submission was refused");
    assert_eq!(streams.len(), 1);
    streams.remove(0)
}

/// Submits requests while steps are held, and lets one step through for every second request, so that requests arrive
/// while others run and all wait for pages together, on an engine of any speed.
pub fn submit_together(
    engine: &Engine,
    gate: &StepGate,
    submissions: impl IntoIterator<Item = Submission>,
) -> Vec<TokenStream> {
    gate.close();
    let submit = |(at, submission)| {
        gate.let_through(at as u64 % 2);
        submit_one(engine, submission)
    };
    let streams = submissions.into_iter().enumerate().map(submit).collect();
    gate.open();
    streams
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

/// Reads to the end and checks the order of events on the way.
pub fn finish(stream: &mut TokenStream) -> (Vec<TokenId>, FinishReason) {
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    read_outputs(stream)
}

pub fn read_outputs(stream: &mut TokenStream) -> (Vec<TokenId>, FinishReason) {
    let mut tokens = Vec::new();
    loop {
        let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
            panic!("the stream ended without a terminal event");
        };
        assert_eq!(output.request, stream.id());
        tokens.extend(output.sample.map(|sample| sample.token));
        if let Some(reason) = output.finish {
            assert_eq!(stream.next_blocking(), None);
            assert_eq!(stream.next_blocking(), None);
            return (tokens, reason);
        }
        assert_eq!(output.num_output_tokens as usize, tokens.len());
    }
}

pub fn assert_failed(reason: &FinishReason, text: &str) {
    let FinishReason::Error(error) = reason else {
        panic!("expected an error, got {reason:?}");
    };
    assert!(error.to_string().contains(text), "{error}");
}

/// Checks that no page is in use once the steps planned ahead have returned.
pub fn assert_at_rest(engine: &Engine) {
    assert!(engine.wait_idle(LONG));
    wait_until("the last step has returned", || {
        engine.stats().scheduler.num_inflight_steps == 0
    });
    let stats = engine.stats();
    assert_eq!(stats.num_live_requests, 0);
    assert_eq!(stats.scheduler.num_running, 0);
    assert_eq!(stats.scheduler.num_waiting, 0);
    // A copy of pages to host memory may outlast a request that was aborted.
    wait_until("no page is in use", || {
        engine.stats().scheduler.num_in_use_pages == 0
    });
}

/// Waits until the engine is lost, and returns the reason.
pub fn assert_lost(engine: &Engine) -> String {
    wait_for("the engine is lost", || match engine.state() {
        EngineState::Lost(reason) => Some(reason),
        EngineState::Ready | EngineState::Draining => None,
    })
}

/// The mock executor with altered results. It still checks the pages that it reads.
pub struct Altered<F> {
    pub mock: MockExecutor,
    pub alter: F,
}

impl<F: FnMut(&mut BatchOutput) + Send> Executor for Altered<F> {
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
        self.mock.submit(batch)
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.mock.sample(step, masks)
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        let mut output = self.mock.wait()?;
        (self.alter)(&mut output);
        Ok(output)
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        let mut output = self.mock.try_wait()?;
        output.iter_mut().for_each(&mut self.alter);
        Ok(output)
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.mock.set_waker(waker);
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        self.mock.kv_pages()
    }
}
