//! The rules that every run must keep.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{
    FinishReason, PrefillAdmissionPolicy, Request, RequestError, RequestId, RequestOutput,
    SchedulerStats,
};

use crate::check::lateness::Lateness;
use crate::check::prompt_check::PromptCheck;
use crate::check::starvation::NoStarvation;
use crate::check::step_budget::{Drafts, StepLimits};
use crate::check::verdict::{Checker, Planned, Verdict, ensure};
use crate::check::window_bound::WindowBound;
use crate::executor::UNDEFINED;
use crate::workload::policy;
use crate::workload::{Answer, NEVER, Workload};

pub fn all(workload: &Workload) -> Vec<Box<dyn Checker>> {
    vec![
        Box::new(Conservation::new(workload)),
        Box::new(OneEnd::new(workload)),
        Box::<LoneRun>::default(),
        Box::<PromptCheck>::default(),
        Box::new(Order::new(workload)),
        Box::new(NoStarvation::new(workload)),
        Box::<Billing>::default(),
        Box::new(StepLimits::new(workload)),
        Box::new(Drafts::new(workload)),
        Box::new(Lateness::new(workload)),
        Box::new(WindowBound::new(workload)),
    ]
}

/// Rule 17: every page is free, cached or in use, and at the end only pinned pages are in use. At most as many pages as
/// the configuration allows are pinned, and retained.
struct Conservation {
    max_pinned_pages: usize,
    max_retained_pages: usize,
}

impl Conservation {
    fn new(workload: &Workload) -> Self {
        Self {
            max_pinned_pages: workload.config.max_pinned_pages as usize,
            max_retained_pages: workload.config.max_retained_pages as usize,
        }
    }
}

impl Checker for Conservation {
    fn rule(&self) -> &'static str {
        "pages are conserved"
    }

    fn settled(&mut self, stats: &SchedulerStats) -> Verdict {
        let sum = stats.num_free_pages + stats.num_cached_pages + stats.num_in_use_pages;
        let max_pinned_pages = self.max_pinned_pages.min(stats.num_in_use_pages);
        let is_conserved = sum == stats.num_pages
            && stats.num_pinned_pages <= max_pinned_pages
            && stats.num_retained_pages <= self.max_retained_pages;
        ensure(is_conserved, || format!("{stats:?}"))
    }

    fn ended(&mut self, stats: &SchedulerStats) -> Verdict {
        ensure(stats.num_in_use_pages == stats.num_pinned_pages, || {
            format!("pages are in use after the last request has ended: {stats:?}")
        })
    }
}

/// Rules 27 and 32: a request ends exactly once and for a true reason, and has no output after its end.
struct OneEnd {
    max_preemptions: u32,
    live: BTreeSet<RequestId>,
    aborted: BTreeSet<RequestId>,
    in_failed_step: BTreeSet<RequestId>,
}

impl OneEnd {
    fn new(workload: &Workload) -> Self {
        Self {
            max_preemptions: workload.config.max_preemptions,
            live: BTreeSet::new(),
            aborted: BTreeSet::new(),
            in_failed_step: BTreeSet::new(),
        }
    }
}

impl Checker for OneEnd {
    fn rule(&self) -> &'static str {
        "a request ends once"
    }

    fn queued(&mut self, answer: &Answer) {
        self.live.insert(answer.request.id);
    }

    fn aborted(&mut self, id: RequestId) {
        self.aborted.insert(id);
    }

    fn step_failed(&mut self, requests: &BTreeSet<RequestId>) {
        self.in_failed_step.extend(requests);
    }

    fn told(&mut self, output: &RequestOutput, _: u64) -> Verdict {
        let id = output.request;
        ensure(self.live.contains(&id), || {
            format!("request {id} has an output after its end: {output:?}")
        })?;
        let Some(finish) = &output.finish else {
            return Ok(());
        };
        self.live.remove(&id);
        let has_reason = match finish {
            FinishReason::EndToken | FinishReason::StopToken | FinishReason::Length => true,
            FinishReason::Aborted => self.aborted.contains(&id),
            FinishReason::Error(
                RequestError::StepFailed(_)
                | RequestError::NotDrawn(_)
                | RequestError::NoHiddenState(_),
            ) => self.in_failed_step.contains(&id),
            FinishReason::Error(RequestError::PreemptedTooOften { num_preemptions }) => {
                *num_preemptions > self.max_preemptions
            }
            // The checker `Lateness` judges whether the request was late.
            FinishReason::Error(RequestError::ObjectiveMissed(_)) => true,
            FinishReason::Error(_) => false,
        };
        ensure(has_reason, || {
            format!("request {id} ends without a reason: {finish:?}")
        })
    }

    fn ended(&mut self, _: &SchedulerStats) -> Verdict {
        ensure(self.live.is_empty(), || {
            format!("requests never end: {:?}", self.live)
        })
    }
}

/// Rules 4, 23 and 25: a request gets the tokens of a lone run, each once and in order.
#[derive(Default)]
struct LoneRun {
    answers: BTreeMap<RequestId, (Answer, usize)>,
}

impl Checker for LoneRun {
    fn rule(&self) -> &'static str {
        "outputs equal the lone run's"
    }

    fn queued(&mut self, answer: &Answer) {
        self.answers.insert(answer.request.id, (answer.clone(), 0));
    }

    fn told(&mut self, output: &RequestOutput, _: u64) -> Verdict {
        let id = output.request;
        let (answer, num_seen) = self
            .answers
            .get_mut(&id)
            .expect("an output names an unknown request");
        if let Some(sample) = &output.sample {
            let should = answer.output.get(*num_seen).copied();
            let token = (sample.token != UNDEFINED).then_some(sample.token);
            ensure(token.is_some() && token == should, || {
                format!("token {num_seen} of request {id} is {token:?}, alone it is {should:?}")
            })?;
            *num_seen += 1;
        }
        let num_prompt_tokens = answer.request.prompt.len();
        let counts_are_right = output.num_output_tokens as usize == *num_seen
            && output.num_prompt_tokens as usize == num_prompt_tokens
            && (output.cache_use.num_cached_tokens as usize) < num_prompt_tokens;
        ensure(counts_are_right, || {
            format!("{output:?} after {num_seen} tokens")
        })?;
        match &output.finish {
            None | Some(FinishReason::Aborted | FinishReason::Error(_)) => Ok(()),
            Some(finish) => ensure(
                *finish == answer.finish && *num_seen == answer.output.len(),
                || {
                    let (tokens, should) = (answer.output.len(), &answer.finish);
                    format!(
                        "request {id} ends with {finish:?} after {num_seen} tokens, \
                         alone with {should:?} after {tokens}"
                    )
                },
            ),
        }
    }
}

/// The order of starts if only priority and arrival decide.
type Rank = (i32, u64, RequestId);

/// Rule 10: requests start in order of arrival, or by priority and then arrival, unless one has aged. This is the order
/// of starts within a step. Without packing and without leaders, it is the order across steps, too.
struct Order {
    is_by_priority: bool,
    is_ordered: bool,
    is_fifo: bool,
    ranks: BTreeMap<RequestId, Rank>,
    waiting: BTreeSet<Rank>,
    started: BTreeSet<RequestId>,
}

impl Order {
    /// With the cache on, a follower waits for its leader, and later requests may start before the follower.
    fn new(workload: &Workload) -> Self {
        let config = &workload.config;
        let is_by_priority = policy::is_by_priority(config);
        let is_ordered =
            policy::ranks_by_arrival(config) || is_by_priority && config.max_passed_over == NEVER;
        let is_fifo = config.prefill_admission_policy == PrefillAdmissionPolicy::Fifo;
        Self {
            is_by_priority,
            is_ordered,
            is_fifo: is_ordered && is_fifo && !config.enable_prefix_caching,
            ranks: BTreeMap::new(),
            waiting: BTreeSet::new(),
            started: BTreeSet::new(),
        }
    }

    fn rank(&self, request: &Request) -> Rank {
        let priority = if self.is_by_priority {
            request.priority
        } else {
            0
        };
        (priority, request.arrival_us, request.id)
    }
}

impl Checker for Order {
    fn rule(&self) -> &'static str {
        "requests start in order"
    }

    fn queued(&mut self, answer: &Answer) {
        let rank = self.rank(&answer.request);
        self.ranks.insert(answer.request.id, rank);
        self.waiting.insert(rank);
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        let ids = step.batch.started.iter().map(|start| start.request);
        // Only first starts count: preempted requests resume at other times.
        let new: Vec<_> = ids.filter(|id| self.started.insert(*id)).collect();
        let new: Vec<_> = new.iter().map(|id| self.ranks[id]).collect();
        ensure(!self.is_ordered || new.is_sorted(), || {
            format!("a step starts requests out of order: {new:?}")
        })?;
        for rank in new {
            let first = self.waiting.first().copied();
            ensure(!self.is_fifo || first == Some(rank), || {
                format!("{rank:?} starts before {first:?}")
            })?;
            self.waiting.remove(&rank);
        }
        Ok(())
    }

    fn told(&mut self, output: &RequestOutput, _: u64) -> Verdict {
        if output.finish.is_some() {
            self.waiting.remove(&self.ranks[&output.request]);
        }
        Ok(())
    }
}

/// Rule 28: without end tokens, hits, preemption and faults, a request computes exactly prompt + output − 1 rows, or as
/// many as its prompt has tokens if it has no output.
#[derive(Default)]
struct Billing {
    num_rows: u64,
    is_exact: Option<bool>,
}

impl Checker for Billing {
    fn rule(&self) -> &'static str {
        "no row is computed twice"
    }

    fn queued(&mut self, answer: &Answer) {
        let stopping = &answer.request.stopping;
        let is_exact = stopping.end_token_ids.is_empty() && stopping.stop_token_ids.is_empty();
        self.is_exact = Some(self.is_exact.unwrap_or(true) && is_exact);
        self.num_rows += (answer.request.prompt.len() + answer.output.len().max(1) - 1) as u64;
    }

    /// A request for which nothing could be drawn may start over, because its drafts may be the cause.
    fn step_failed(&mut self, requests: &BTreeSet<RequestId>) {
        self.is_exact = self
            .is_exact
            .map(|is_exact| is_exact && requests.is_empty());
    }

    fn told(&mut self, output: &RequestOutput, _: u64) -> Verdict {
        if !matches!(output.finish, None | Some(FinishReason::Length)) {
            self.is_exact = Some(false);
        }
        Ok(())
    }

    fn ended(&mut self, stats: &SchedulerStats) -> Verdict {
        let is_exact = self.is_exact == Some(true)
            && stats.num_preemptions == 0
            && stats.num_prefix_hit_tokens == 0;
        let num_rejected = stats.num_draft_tokens - stats.num_accepted_draft_tokens;
        let (computed, needed) = (stats.num_scheduled_tokens - num_rejected, self.num_rows);
        ensure(!is_exact || computed == needed, || {
            format!("{computed} rows were computed, {needed} were needed")
        })
    }
}
