//! Where the time of steps goes, operation by operation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::thread_pool::Worker;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    Embed,
    Norm,
    Quantise,
    Qkv,
    Rotate,
    Attention,
    Output,
    GateUp,
    Down,
    Head,
    Draw,
}

impl Operation {
    pub const ALL: [Self; 11] = [
        Self::Embed,
        Self::Norm,
        Self::Quantise,
        Self::Qkv,
        Self::Rotate,
        Self::Attention,
        Self::Output,
        Self::GateUp,
        Self::Down,
        Self::Head,
        Self::Draw,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Norm => "norms",
            Self::Quantise => "quantise rows",
            Self::Qkv => "dense q k v",
            Self::Rotate => "rotate, store",
            Self::Attention => "attention",
            Self::Output => "dense output",
            Self::GateUp => "dense gate up",
            Self::Down => "dense down",
            Self::Head => "head",
            Self::Draw => "draw",
        }
    }
}

/// Two accounts: of steps with a span of several rows, and of all others. Workers add to it.
#[derive(Debug, Default)]
pub struct Profile {
    prefill: Account,
    decode: Account,
}

#[derive(Debug, Default)]
struct Account {
    num_steps: AtomicU64,
    nanoseconds: AtomicU64,
    entries: [Entry; Operation::ALL.len()],
}

#[derive(Debug, Default)]
struct Entry {
    busy: AtomicU64,
    waiting: AtomicU64,
    flops: AtomicU64,
    bytes: AtomicU64,
}

/// What steps of a kind have cost.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileReport {
    pub num_steps: u64,
    /// From the first operation's beginning to the last one's end.
    pub duration: Duration,
    /// Those that took any time.
    pub operations: Vec<OperationReport>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct OperationReport {
    pub operation: Operation,
    /// The mean of all workers.
    pub busy: Duration,
    /// For others to finish the same operation, the mean again.
    pub waiting: Duration,
    pub flops: f64,
    /// Of weights, keys and values.
    pub bytes: f64,
}

impl Profile {
    /// Of steps that computed several rows of a span, prefill, and of those that did not.
    pub fn report(&self, num_threads: usize) -> [ProfileReport; 2] {
        [&self.prefill, &self.decode].map(|account| account.report(num_threads))
    }

    pub fn add_step(&self, is_prefill: bool, duration: Duration) {
        let account = self.account(is_prefill);
        add(&account.num_steps, 1);
        add(&account.nanoseconds, duration.as_nanos() as u64);
    }

    fn account(&self, is_prefill: bool) -> &Account {
        match is_prefill {
            true => &self.prefill,
            false => &self.decode,
        }
    }
}

impl Account {
    fn report(&self, num_threads: usize) -> ProfileReport {
        let mean = |sum: &AtomicU64| Duration::from_nanos(load(sum) / num_threads as u64);
        let operations = Operation::ALL.into_iter().zip(&self.entries);
        let operations = operations.map(|(operation, entry)| OperationReport {
            operation,
            busy: mean(&entry.busy),
            waiting: mean(&entry.waiting),
            flops: load(&entry.flops) as f64,
            bytes: load(&entry.bytes) as f64,
        });
        ProfileReport {
            num_steps: load(&self.num_steps),
            duration: Duration::from_nanos(load(&self.nanoseconds)),
            operations: operations.filter(|o| !o.busy.is_zero()).collect(),
        }
    }
}

/// A worker's way through a step: operation after operation, all workers together. Without a
/// profile it is the barriers alone.
pub struct Walk<'a> {
    pub worker: &'a Worker<'a>,
    account: Option<&'a Account>,
    last: Option<Instant>,
}

impl<'a> Walk<'a> {
    pub fn new(worker: &'a Worker<'a>, profile: Option<&'a Profile>, is_prefill: bool) -> Self {
        Self {
            worker,
            account: profile.map(|profile| profile.account(is_prefill)),
            last: profile.map(|_| Instant::now()),
        }
    }

    /// This worker's part is done; waits for the others'.
    pub fn finish(&mut self, operation: Operation) {
        self.note(operation);
        self.worker.barrier();
        self.lap(operation, |entry| &entry.waiting);
    }

    /// Some of this worker's part is done.
    pub fn note(&mut self, operation: Operation) {
        self.lap(operation, |entry| &entry.busy);
    }

    /// What an operation does at least, all workers together.
    pub fn count(&self, operation: Operation, flops: usize, bytes: usize) {
        if let Some(account) = self.account
            && self.worker.index() == 0
        {
            let entry = &account.entries[operation as usize];
            add(&entry.flops, flops as u64);
            add(&entry.bytes, bytes as u64);
        }
    }

    fn lap(&mut self, operation: Operation, sum: impl Fn(&Entry) -> &AtomicU64) {
        if let (Some(account), Some(last)) = (self.account, &mut self.last) {
            let now = Instant::now();
            let elapsed = now.duration_since(*last).as_nanos() as u64;
            add(sum(&account.entries[operation as usize]), elapsed);
            *last = now;
        }
    }
}

fn add(sum: &AtomicU64, value: u64) {
    sum.fetch_add(value, Ordering::Relaxed);
}

fn load(sum: &AtomicU64) -> u64 {
    sum.load(Ordering::Relaxed)
}
