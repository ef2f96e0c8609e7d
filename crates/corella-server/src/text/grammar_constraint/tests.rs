//! Measures how much a request's masks slow another request in the same batch. Time is virtual: steps and masks move a
//! clock by their counted work.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use corella_core::{Batch, BatchOutput, FinishReason, SchedulerConfig, SlotId, StepId};
use corella_engine::{Engine, EngineConfig, StreamEvent, Submission};
use corella_model::{
    Executor, ExecutorError, ExecutorInfo, KvLayout, KvPages, MockConfig, MockExecutor, StepWaker,
    TokenMask,
};
use corella_text::GrammarSource;

use super::*;

/// A step without masks takes as long as a step of a small model on a CPU.
const STEP_NS: u64 = 3_000_000;
/// The time of one comparison of items, as measured in a release build.
const COMPARISON_NS: u64 = 16;
/// An upper bound on the comparisons of a mask that failed. The grammar counts the comparisons of all other masks.
const FAILED_MASK: u64 = 20_000 * 500;

/// The work of a request's masks so far, as comparisons of items.
type Work = Arc<AtomicU64>;

/// A grammar whose masks are counted.
#[derive(Debug)]
struct Counted {
    grammar: GrammarConstraint,
    work: Work,
}

struct CountedAnswer {
    answer: GrammarAnswer,
    work: Work,
}

impl TokenConstraint for Counted {
    fn start(&self) -> Result<Box<dyn ConstrainedAnswer>, String> {
        Ok(Box::new(CountedAnswer {
            answer: GrammarAnswer(self.grammar.0.start()),
            work: self.work.clone(),
        }))
    }
}

impl ConstrainedAnswer for CountedAnswer {
    fn push(&mut self, token: TokenId) -> Result<(), String> {
        self.answer.push(token)
    }

    fn allowed(&mut self) -> Result<Allowed, String> {
        let before = self.answer.0.work();
        let allowed = self.answer.allowed();
        let work = match self.answer.0.work() {
            work if work == before && allowed.is_err() => work + FAILED_MASK,
            work => work,
        };
        self.work.store(work, Ordering::Relaxed);
        allowed
    }
}

/// The mock, which notes the virtual time at which each step of the request in `slot` draws.
struct Clocked {
    mock: MockExecutor,
    slot: SlotId,
    work: Work,
    batch: Option<Arc<Batch>>,
    num_steps: u64,
    draws_ns: Arc<Mutex<Vec<u64>>>,
}

impl Executor for Clocked {
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
        self.batch = Some(batch.clone());
        self.mock.submit(batch)
    }

    fn sample(&mut self, step: StepId, masks: Vec<TokenMask>) -> Result<(), ExecutorError> {
        self.num_steps += 1;
        let batch = self.batch.take().expect("it was submitted");
        if batch.spans.iter().any(|span| span.slot == self.slot) {
            let masks_ns = self.work.load(Ordering::Relaxed) * COMPARISON_NS;
            let draws_ns = &mut *self.draws_ns.lock().expect("it is not poisoned");
            draws_ns.push(self.num_steps * STEP_NS + masks_ns);
        }
        self.mock.sample(step, masks)
    }

    fn wait(&mut self) -> Result<BatchOutput, ExecutorError> {
        self.mock.wait()
    }

    fn try_wait(&mut self) -> Result<Option<BatchOutput>, ExecutorError> {
        self.mock.try_wait()
    }

    fn set_waker(&mut self, waker: StepWaker) {
        self.mock.set_waker(waker);
    }

    fn kv_pages(&self) -> Arc<dyn KvPages> {
        self.mock.kv_pages()
    }
}

fn submission(max_tokens: u32, constraint: Option<Arc<dyn TokenConstraint>>) -> Submission {
    Submission {
        constraint,
        ..Submission::new(vec![7; 4], max_tokens)
    }
}

const MAX_TOKENS: u32 = 1900;

/// Runs two requests, one of which follows the grammar `lark`. Returns the virtual times at which the other request
/// draws its tokens, and the finish reason of the request with the grammar.
fn draws_beside(lark: Option<&str>) -> (Vec<u64>, Option<FinishReason>) {
    let tokenizer = include_bytes!("../../../../../models/nano/tokenizer.json");
    let tokenizer = Tokenizer::from_bytes(tokenizer).expect("a tokenizer");
    let vocab_size = tokenizer.vocab_size();
    let scheduler = SchedulerConfig {
        max_inflight_steps: 1,
        ..SchedulerConfig::new(1024, 16, 4096)
    };
    let mock = MockConfig::new(vocab_size, scheduler.num_pages, scheduler.page_size);
    let gate = mock.gate.clone();
    let (work, draws_ns) = (Work::default(), Arc::default());
    let executor = Clocked {
        mock: MockExecutor::new(mock),
        slot: SlotId(0),
        work: work.clone(),
        batch: None,
        num_steps: 0,
        draws_ns: Arc::clone(&draws_ns),
    };
    let engine = Engine::start(EngineConfig::new(scheduler), Box::new(executor));
    let engine = engine.expect("it starts");
    // The other request arrives during the first step.
    gate.close();
    let submit = |constraint| {
        let streams = engine.submit(submission(MAX_TOKENS, constraint));
        streams.expect("it is accepted").remove(0)
    };
    let mut stream = submit(None);
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let other = lark.map(|lark| {
        let compiler = GrammarCompiler::new(&tokenizer, vocab_size).expect("a vocabulary");
        let grammar = compiler.compile(&GrammarSource::Lark(lark.to_owned()));
        let grammar = GrammarConstraint(grammar.expect("it compiles"));
        submit(Some(Arc::new(Counted { grammar, work })))
    });
    gate.open();
    let [_, end] = [Some(stream), other].map(|stream| {
        let mut stream = stream?;
        std::iter::from_fn(|| stream.next_blocking()).find_map(|event| match event {
            StreamEvent::Output(output) => output.finish,
            _ => None,
        })
    });
    let draws_ns = std::mem::take(&mut *draws_ns.lock().expect("it is not poisoned"));
    assert_eq!(draws_ns.len(), MAX_TOKENS as usize);
    (draws_ns, end)
}

/// The least number of tokens that a request draws in a virtual second.
fn slowest_second(draws_ns: &[u64]) -> usize {
    let second = |from: u64| draws_ns.partition_point(|at| *at < from + 1_000_000_000);
    let whole = draws_ns.iter().enumerate();
    let whole = whole.map_while(|(index, from)| {
        let next = second(*from);
        (next < draws_ns.len()).then_some(next - index)
    });
    whole.min().expect("it takes longer")
}

/// Words that may follow each other. A row of the parser has items for each word, and a token may need many rows.
fn words(num_words: usize, letter: &str) -> String {
    let words: Vec<_> = (0..num_words).map(|at| format!("(L \"{at}\")")).collect();
    format!("start: (L | {})*\nL: {letter}", words.join(" | "))
}

#[test]
fn a_grammar_leaves_the_request_beside_it_its_steps() {
    let (alone, _) = draws_beside(None);
    let alone = slowest_second(&alone);
    for lark in [
        "start: e\ne: e e | e e e | \"a\" | ",
        "start: e\ne: e e | \"a\"",
        &words(200, "/[erst]/"),
        &words(200, "\"a\""),
    ] {
        let (draws_ns, end) = draws_beside(Some(lark));
        let slowest = slowest_second(&draws_ns);
        assert!(slowest * 3 > alone, "{lark}: {slowest} of {alone}");
        assert!(
            matches!(end, Some(FinishReason::Error(_))),
            "{lark}: {end:?}"
        );
    }
}
