//! The check that only late requests are refused or ended.

use std::collections::BTreeMap;

use corella_core::{
    FinishReason, LatencyObjectives, MissedObjective, ObjectiveKind, RequestError, RequestId,
    RequestOutput, SchedulerConfig,
};

use crate::check::verdict::{Checker, Planned, Verdict, ensure};
use crate::workload::policy;
use crate::workload::{Answer, Workload};

/// With `enable_slo_admission`, a request that cannot be in time ends at once, and no other request ends for lateness.
/// Steps are assumed to be no slower than the slowest so far.
pub struct Lateness {
    config: SchedulerConfig,
    slowest_step_us: u64,
    /// The largest time per 1,024 tokens of any step so far, in microseconds.
    slowest_pace_us: u64,
    requests: BTreeMap<RequestId, Watched>,
}

struct Watched {
    arrival_us: u64,
    objectives: LatencyObjectives,
    num_prompt_tokens: u64,
    num_tokens: u64,
    has_started: bool,
}

impl Lateness {
    pub fn new(workload: &Workload) -> Self {
        Self {
            config: workload.config.clone(),
            slowest_step_us: 0,
            slowest_pace_us: 0,
            requests: BTreeMap::new(),
        }
    }

    fn most_us(&self, kind: ObjectiveKind, waited_us: u64, num_tokens: u64) -> u64 {
        match kind {
            ObjectiveKind::Ttft => waited_us + num_tokens * self.slowest_pace_us / 1024,
            ObjectiveKind::Tpot => {
                let num_steps = self
                    .config
                    .max_num_seqs
                    .div_ceil(self.config.max_decode_seqs);
                self.slowest_step_us * u64::from(num_steps)
            }
        }
    }

    fn ensure_not_late(&self, id: RequestId, now_us: u64) -> Verdict {
        let watched = &self.requests[&id];
        let ttft_us = watched.objectives.ttft_us.unwrap_or(u64::MAX);
        let due_us = watched.arrival_us.saturating_add(ttft_us);
        ensure(
            !self.config.enable_slo_admission || now_us <= due_us,
            || format!("request {id} should have its first token by now, but is still waiting"),
        )
    }

    fn check(
        &self,
        missed: &MissedObjective,
        objectives: LatencyObjectives,
        most_us: u64,
    ) -> Verdict {
        let objective_us = match missed.kind {
            ObjectiveKind::Ttft => objectives.ttft_us,
            ObjectiveKind::Tpot => objectives.tpot_us,
        };
        let is_late = self.config.enable_slo_admission
            && objective_us == Some(missed.objective_us)
            && missed.objective_us < missed.expected_us
            && missed.expected_us <= most_us;
        ensure(is_late, || {
            format!("{missed:?}, with {objectives:?} and {most_us} us at most")
        })
    }
}

impl Checker for Lateness {
    fn rule(&self) -> &'static str {
        "a late request ends, and no other"
    }

    fn queued(&mut self, answer: &Answer) {
        let request = &answer.request;
        let num_prompt_tokens = request.prompt.len() as u64;
        self.requests.insert(
            request.id,
            Watched {
                arrival_us: request.arrival_us,
                objectives: request.objectives,
                num_prompt_tokens,
                num_tokens: num_prompt_tokens + answer.output.len() as u64,
                has_started: false,
            },
        );
    }

    /// Bounds the expected time by the work before the new request: all tokens of the running requests and, if
    /// waiting requests start before the new one, all of their tokens.
    fn refused(&mut self, answer: &Answer, missed: &MissedObjective) -> Verdict {
        let request = &answer.request;
        let is_in_order = policy::starts_in_order(&self.config);
        let is_before = |other: &&Watched| other.has_started || is_in_order;
        let before = self.requests.values().filter(is_before);
        let num_before: u64 = before.map(|other| other.num_tokens).sum();
        let num_tokens = num_before + request.prompt.len() as u64;
        let most_us = self.most_us(missed.kind, 0, num_tokens);
        self.check(missed, request.objectives, most_us)
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        let mut waiting = self.requests.iter().filter(|(_, it)| !it.has_started);
        waiting.try_for_each(|(&id, _)| self.ensure_not_late(id, step.now_us))?;
        for start in &step.batch.started {
            let started = self.requests.get_mut(&start.request);
            started
                .expect("a step starts an unknown request")
                .has_started = true;
        }
        Ok(())
    }

    fn returned(&mut self, num_tokens: u64, elapsed_us: u64) {
        self.slowest_step_us = self.slowest_step_us.max(elapsed_us);
        let pace_us = (elapsed_us * 1024).div_ceil(num_tokens);
        self.slowest_pace_us = self.slowest_pace_us.max(pace_us);
    }

    fn told(&mut self, output: &RequestOutput, now_us: u64) -> Verdict {
        let Some(finish) = &output.finish else {
            return Ok(());
        };
        let watched = self.requests.remove(&output.request);
        let watched = watched.expect("an output names an unknown request");
        let FinishReason::Error(RequestError::ObjectiveMissed(missed)) = finish else {
            return Ok(());
        };
        ensure(!watched.has_started, || {
            format!(
                "request {} was given up after it had started",
                output.request
            )
        })?;
        let waited_us = now_us - watched.arrival_us;
        let most_us = self.most_us(missed.kind, waited_us, watched.num_prompt_tokens);
        self.check(missed, watched.objectives, most_us)
    }
}
