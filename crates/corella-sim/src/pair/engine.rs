//! A node's engine: the real scheduler and an executor that distrusts the scheduler.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use corella_core::{
    AdmissionError, Batch, BlockHasher, KvGroup, Request, RequestId, Reservation, Scheduler,
    SchedulerStats, SlotId, StepId,
};

use crate::executor::host_memory::HostMemory;
use crate::executor::{CheckingExecutor, Returned, root_row};
use crate::pair::pair_workload::NodePlan;
use crate::pair::step_progress::StepProgress;
use crate::random::Random;

pub struct Engine {
    plan: NodePlan,
    fails_once_in: u64,
    pub scheduler: Scheduler,
    pub executor: CheckingExecutor,
    host: HostMemory,
    slots: BTreeMap<SlotId, RequestId>,
    inflight: VecDeque<StepId>,
    /// The rows that steps in flight still have to compute.
    pub progress: StepProgress,
    last_return_us: u64,
    /// The time that the scheduler was last given.
    scheduled_us: u64,
    /// Requests that were in a failed step.
    failed: BTreeSet<RequestId>,
}

/// A step that has begun.
pub struct PlannedStep {
    pub begins_us: u64,
    pub returns_us: u64,
}

impl Engine {
    pub fn new(plan: &NodePlan, alphabet: u32, fails_once_in: u64) -> Self {
        let config = plan.config.clone();
        let mut executor = CheckingExecutor::new(&config, alphabet, BTreeMap::new());
        executor.set_arithmetic(plan.arithmetic);
        let scheduler = Scheduler::new(config).expect("workloads have valid limits");
        let (max_copy_us, copies_fail_once_in) = (plan.max_copy_us, plan.copies_fail_once_in);
        Self {
            host: HostMemory::new(&scheduler, max_copy_us, copies_fail_once_in, max_copy_us),
            executor,
            scheduler,
            plan: plan.clone(),
            fails_once_in,
            slots: BTreeMap::new(),
            inflight: VecDeque::new(),
            progress: StepProgress::default(),
            last_return_us: 0,
            scheduled_us: 0,
            failed: BTreeSet::new(),
        }
    }

    pub fn submit(&mut self, request: Request, is_accepted: bool) -> Result<(), AdmissionError> {
        let root = root_row(&request.namespace);
        self.executor.add_root(request.id, root);
        match is_accepted {
            true => self.scheduler.add_accepted_requests(vec![request]),
            false => self.scheduler.add_requests(vec![request]),
        }
    }

    /// Reserves pages for a request whose prompt a node of `arithmetic` computes.
    pub fn reserve(
        &mut self,
        request: Request,
        arithmetic: u64,
        deadline_us: u64,
    ) -> Result<Reservation, AdmissionError> {
        let root = root_row(&request.namespace);
        self.executor.add_root(request.id, root);
        let num_rows = request.prompt.len() + request.output.len();
        self.executor.add_foreign(request.id, arithmetic, num_rows);
        self.scheduler.reserve(request, deadline_us)
    }

    pub fn stats(&self) -> SchedulerStats {
        self.scheduler.stats()
    }

    /// Returns the end of a hold that begins now.
    pub fn hold_until_us(&self) -> u64 {
        self.scheduled_us + self.plan.config.hold_lease_us
    }

    pub fn has_failed(&self, request: RequestId) -> bool {
        self.failed.contains(&request)
    }

    pub fn has_failed_steps(&self) -> bool {
        !self.failed.is_empty()
    }

    pub fn is_recurrent(&self) -> bool {
        self.plan.config.recurrent_state.is_some()
    }

    pub fn groups(&self) -> &[KvGroup] {
        &self.plan.config.kv_groups
    }

    pub fn page_size(&self) -> u32 {
        self.plan.config.page_size
    }

    pub fn block_hasher(&self) -> &BlockHasher {
        &self.plan.config.block_hasher
    }

    /// Begins the next step, if there is one.
    pub fn try_step(&mut self, now_us: u64, random: &mut Random) -> Option<PlannedStep> {
        self.scheduled_us = now_us;
        let batch = self.scheduler.schedule(now_us)?;
        self.note_slots(&batch);
        let fails = self.fails_once_in > 0 && random.once_in(self.fails_once_in);
        if fails {
            let named = batch.spans.iter().map(|span| self.slots[&span.slot]);
            self.failed.extend(named);
        }
        self.executor.submit(&batch, fails, None);
        let rows = self.executor.take_written();
        self.progress.begin(batch.step, rows);
        self.inflight.push_back(batch.step);
        let num_tokens = batch.num_tokens() as u64;
        let step_us = self.plan.per_step_us + self.plan.per_token_us * num_tokens;
        let begins_us = now_us.max(self.last_return_us);
        self.last_return_us = begins_us + step_us;
        Some(PlannedStep {
            begins_us,
            returns_us: self.last_return_us,
        })
    }

    /// Begins the next copy to or from host memory, if any, and returns its duration.
    pub fn begin_copy(&mut self) -> Option<u64> {
        self.host
            .begin_copy(&mut self.scheduler, &mut self.executor)
    }

    pub fn end_copy(&mut self) {
        self.host.end_copy(&mut self.scheduler, &mut self.executor);
    }

    /// Returns whether host memory is empty.
    pub fn has_empty_host(&self) -> bool {
        self.host.is_empty() && self.stats().num_spilled_pages == 0
    }

    pub fn return_step(&mut self) {
        let step = self.inflight.pop_front().expect("a step is in flight");
        self.progress.end(step);
        match self.executor.wait() {
            Returned::Output(output, _) => self.scheduler.update_from_output(&output),
            Returned::Failed(step, _) => self.scheduler.handle_step_failed(step, "injected"),
        }
    }

    fn note_slots(&mut self, batch: &Batch) {
        for slot in &batch.released {
            self.slots.remove(slot);
        }
        for start in &batch.started {
            self.slots.insert(start.slot, start.request);
        }
    }
}
