//! Profiling: the division of the steps' time among operations.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use strum::{IntoStaticStr, VariantArray};

use crate::system::Worker;

/// The operations that divide a step's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Operation {
    Embed,
    #[strum(serialize = "norms")]
    Norm,
    #[strum(serialize = "adapters")]
    Adapter,
    #[strum(serialize = "quantise rows")]
    Quantise,
    #[strum(serialize = "dense q k v")]
    Qkv,
    #[strum(serialize = "rope, store")]
    Rope,
    Attention,
    Recurrent,
    #[strum(serialize = "dense output")]
    Output,
    #[strum(serialize = "route to experts")]
    Route,
    #[strum(serialize = "dense gate up")]
    GateUp,
    #[strum(serialize = "dense down")]
    Down,
    #[strum(serialize = "combine experts")]
    Combine,
    Head,
    Draw,
}

impl Operation {
    pub const ALL: &'static [Self] = Self::VARIANTS;

    pub fn name(self) -> &'static str {
        self.into()
    }
}

/// Time accounts of prefill steps, which have a span of several rows, and of decode steps, which
/// are all others. Workers add to them.
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

/// The cost of all prefill steps, or of all decode steps.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileReport {
    pub num_steps: u64,
    /// The time from the start of the first operation to the end of the last, summed over the steps.
    pub duration: Duration,
    /// The operations that took any time.
    pub operations: Vec<OperationReport>,
}

/// The cost of one operation, summed over the steps.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationReport {
    pub operation: Operation,
    /// Mean over the workers of the time spent on the operation.
    pub busy: Duration,
    /// Mean over the workers of the time spent waiting for other workers to finish the operation.
    pub waiting: Duration,
    pub flops: f64,
    /// Bytes of weights, keys and values that the operation reads.
    pub bytes: f64,
}

impl Profile {
    /// Reports on prefill steps, which computed several rows of a span, and on decode steps, all others.
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
        let operations = Operation::ALL.iter().zip(&self.entries);
        let operations = operations.map(|(&operation, entry)| OperationReport {
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

/// One worker's progress through a step's operations, which all workers execute together. Without a
/// profile no time is recorded.
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

    /// Counts the time since the last call as time of an operation, which may continue.
    pub fn note(&mut self, operation: Operation) {
        self.lap(operation, |entry| &entry.busy);
    }

    /// Counts the time since the last call as time of waiting for other workers at the end of an operation.
    pub fn note_waiting(&mut self, operation: Operation) {
        self.lap(operation, |entry| &entry.waiting);
    }

    /// Counts the floating-point operations and bytes that all workers together need at least for an operation.
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

/// The barrier after an operation: every worker has done its part of the operation, so that all workers may read the
/// output, and overwrite the input. Results need the barrier, with a profile and without.
pub fn barrier_after(operation: Operation, walk: &mut Walk<'_>) {
    walk.note(operation);
    walk.worker.barrier();
    walk.note_waiting(operation);
}
