//! Drives a scheduler with many running and many more waiting requests. No executor computes its
//! steps.

use corella_core::{
    Batch, BatchOutput, PrefillAdmissionPolicy, Request, RequestId, Sample, Scheduler,
    SchedulerConfig, SchedulingPolicy, TokenId,
};

use super::calls::{CallLimits, Calls};

pub(super) const NUM_PROMPT_TOKENS: usize = 64;

/// The limit of steps in which the first requests of a run may start.
const MAX_START_STEPS: usize = 10_000;

/// A policy, with its name on the command line.
#[derive(Debug, Clone, Copy)]
pub(super) struct Policy {
    pub name: &'static str,
    scheduling: SchedulingPolicy,
    admission: PrefillAdmissionPolicy,
}

const LOOKAHEAD: u32 = 64;

pub(super) const FCFS: Policy = Policy::new("fcfs", SchedulingPolicy::Fcfs);
const PACK: Policy = Policy {
    admission: PrefillAdmissionPolicy::Pack {
        lookahead: LOOKAHEAD,
        force_fifo_every: 8,
    },
    ..Policy::new("pack", SchedulingPolicy::Fcfs)
};
pub(super) const PRIORITY: Policy = Policy::new("priority", SchedulingPolicy::Priority);
const LPM: Policy = Policy::new(
    "lpm",
    SchedulingPolicy::LongestPrefix {
        lookahead: LOOKAHEAD,
    },
);
const SHORTEST_FIRST: Policy = Policy::new(
    "sjf",
    SchedulingPolicy::ShortestFirst {
        lookahead: LOOKAHEAD,
    },
);

/// Every policy that the scheduler has.
pub(super) const POLICIES: [Policy; 5] = [FCFS, PACK, PRIORITY, LPM, SHORTEST_FIRST];

impl Policy {
    const fn new(name: &'static str, scheduling: SchedulingPolicy) -> Self {
        Self {
            name,
            scheduling,
            admission: PrefillAdmissionPolicy::Fifo,
        }
    }

    /// Returns a configuration in which only slots and pages are ever scarce.
    pub fn config(&self, num_slots: usize, num_pages: usize, page_size: u32) -> SchedulerConfig {
        let mut config = SchedulerConfig::new(num_pages as u32, page_size, 1 << 30);
        config.max_num_seqs = num_slots as u32;
        config.max_num_batched_tokens = 8192.max(2 * num_slots as u32);
        config.max_prefill_tokens = config.max_num_batched_tokens;
        config.max_queued_requests = u32::MAX;
        config.scheduling_policy = self.scheduling;
        config.prefill_admission_policy = self.admission;
        config
    }
}

pub(super) struct Traffic {
    pub scheduler: Scheduler,
    pub now_us: u64,
    /// The time between the plans of two steps.
    pub step_us: u64,
    num_added: u64,
}

impl Traffic {
    pub fn new(mut config: SchedulerConfig) -> Self {
        config.max_queued_tokens = u64::MAX;
        Self {
            scheduler: Scheduler::new(config).expect("the limits contradict each other"),
            now_us: 0,
            step_us: 0,
            num_added: 0,
        }
    }

    /// Adds `count` requests. `make` gets the number of requests added before.
    pub fn add(&mut self, count: usize, make: impl Fn(u64) -> Request) {
        for _ in 0..count {
            let mut request = make(self.num_added);
            request.arrival_us = self.now_us;
            self.num_added += 1;
            let added = self.scheduler.add_requests(vec![request]);
            added.expect("the queue refuses a request although it has no limit");
        }
    }

    /// Adds requests and runs steps until all of them run.
    pub fn start(&mut self, count: usize, make: impl Fn(u64) -> Request) {
        let num_running = self.scheduler.stats().num_running + count;
        self.add(count, make);
        for _ in 0..MAX_START_STEPS {
            if self.scheduler.stats().num_running == num_running {
                return;
            }
            self.unmeasured_step();
        }
        panic!("requests do not start although there is room for all");
    }

    pub fn unmeasured_step(&mut self) -> usize {
        let limits = CallLimits {
            num_calls: 1,
            max_time: std::time::Duration::MAX,
            num_allocations: None,
        };
        self.step(&mut Calls::new(limits), &mut Calls::new(limits))
    }

    /// Times the calls of planning and of processing outputs. `after` gets the number of requests that ended in each
    /// step.
    pub fn measure(
        &mut self,
        limits: CallLimits,
        after: impl Fn(&mut Self, usize),
    ) -> (Calls, Calls) {
        let (mut schedule, mut update) = (Calls::new(limits), Calls::new(limits));
        while schedule.go_on() {
            let num_ended = self.step(&mut schedule, &mut update);
            after(self, num_ended);
        }
        (schedule, update)
    }

    /// Plans a step and processes its tokens. Returns the number of requests that have ended.
    pub fn step(&mut self, schedule: &mut Calls, update: &mut Calls) -> usize {
        self.now_us += self.step_us;
        let batch = schedule.time(|| self.scheduler.schedule(self.now_us));
        let output = drawn(&batch.expect("no step was planned although requests run"));
        update.time(|| self.scheduler.update_from_output(&output));
        self.num_ended()
    }

    pub fn num_ended(&mut self) -> usize {
        let mut num_ended = 0;
        while let Some(output) = self.scheduler.poll_output() {
            num_ended += usize::from(output.finish.is_some());
        }
        num_ended
    }
}

/// The output of a step, with some token for every span that samples.
pub(super) fn drawn(batch: &Batch) -> BatchOutput {
    let sampled = batch.spans.iter().filter(|span| span.yields.draws());
    let samples = sampled.map(|span| {
        let sample = Sample {
            token: span.start ^ span.slot.0,
            logprobs: None,
        };
        (span.slot, sample)
    });
    BatchOutput {
        step: batch.step,
        samples: samples.collect(),
        ..BatchOutput::default()
    }
}

/// Returns a request with a unique prompt.
pub(super) fn request(id: u64, num_prompt_tokens: usize, max_tokens: u32) -> Request {
    let first = id as TokenId * num_prompt_tokens as TokenId;
    Request::greedy(
        RequestId(id),
        (first..first + num_prompt_tokens as TokenId).collect(),
        max_tokens,
    )
}

/// Returns a request with a unique prompt of the usual length.
pub(super) fn with_priority(id: u64, max_tokens: u32, priority: i32) -> Request {
    Request {
        priority,
        ..request(id, NUM_PROMPT_TOKENS, max_tokens)
    }
}

/// Spreads requests over four priorities.
pub(super) fn mixed_priority(id: u64) -> i32 {
    (id * 7 % 4) as i32
}

/// A request that shares half of its prompt with every 64th request.
pub(super) fn sharing_request(id: u64, max_tokens: u32) -> Request {
    const NUM_GROUPS: u64 = 64;
    let mut request = with_priority(id, max_tokens, mixed_priority(id));
    let group = (id % NUM_GROUPS) as TokenId;
    request.prompt[..NUM_PROMPT_TOKENS / 2].fill(TokenId::MAX - group);
    request
}
