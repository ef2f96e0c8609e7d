//! Processes the results of the executor: the draws of a step, or its failure.

use alloc::vec::Vec;

use crate::request_state::{Leaving, Phase, RequestIndex, RequestSet};
use crate::step::scheduler::publication::Undefined;
use crate::step::step_plan::{InflightSpan, InflightStep};
use crate::{
    BatchOutput, FinishReason, HiddenState, PromptLogprob, RequestError, Sample, Scheduler, SlotId,
    StepId,
};

type Drawn = (SlotId, Sample);

impl Scheduler {
    /// Processes the results of the oldest step in flight.
    ///
    /// # Panics
    /// Panics when `output` does not belong to that step. Steps return in order. Each span that draws has one
    /// sample, and one more for each accepted draft. Each span also has the log-probabilities and the hidden state that
    /// it yields, or the reason why it has no result.
    pub fn update_from_output(&mut self, output: &BatchOutput) {
        let returned = self.take_oldest(output.step);
        let mut undrawn = output.undrawn.iter().peekable();
        let mut failed = Vec::new();
        for span in &returned.spans {
            let yields = span.draws || span.num_logprobs > 0 || span.has_hidden_state;
            let is_its = |(slot, _): &&(SlotId, _)| yields && *slot == span.slot;
            if let Some((_, reason)) = undrawn.next_if(is_its) {
                failed.push((span, &**reason));
            }
        }
        assert!(
            undrawn.next().is_none(),
            "the executor gives a reason for a span that yields nothing"
        );
        self.handle_undrawn(&failed, returned.step);
        let mut failed = failed.iter().peekable();
        let mut samples = &output.samples[..];
        let mut logprobs = output.logprobs.iter();
        let mut hidden_states = output.hidden_states.iter();
        for span in &returned.spans {
            if failed
                .next_if(|(other, _)| other.slot == span.slot)
                .is_some()
            {
                continue;
            }
            let (own, others) = match span.draws {
                true => self.split_samples(span, samples),
                false => (&[][..], samples),
            };
            samples = others;
            let scored = match span.num_logprobs {
                0 => &[][..],
                _ => logprobs_of(span, logprobs.next()),
            };
            if span.has_hidden_state {
                self.take_hidden_state(span, hidden_states.next());
            }
            self.update_request(span, (scored, own), returned.step);
        }
        assert!(
            hidden_states.next().is_none(),
            "the executor returns a hidden state of a span that yields none"
        );
        assert!(
            logprobs.next().is_none(),
            "the executor returns log-probabilities of a span that yields none"
        );
        assert!(
            samples.is_empty(),
            "the executor returns a sample for a span that does not draw"
        );
    }

    /// Splits off the samples of a span that draws. The remaining samples belong to later spans.
    fn split_samples<'a>(
        &self,
        span: &InflightSpan,
        samples: &'a [Drawn],
    ) -> (&'a [Drawn], &'a [Drawn]) {
        let drafts = &self.requests[span.index].drafts()[..span.num_drafts as usize];
        let own = samples.iter().take_while(|(slot, _)| *slot == span.slot);
        let num_own = own.take(1 + drafts.len()).count();
        assert!(
            num_own > 0,
            "the executor returns no sample for a span that draws, or returns them out of order"
        );
        let (own, others) = samples.split_at(num_own);
        let held = own.iter().zip(drafts);
        assert!(
            held.take(num_own - 1)
                .all(|((_, sample), draft)| sample.token == *draft),
            "the executor drew behind a draft that it had not drawn itself"
        );
        (own, others)
    }

    /// Ends the requests whose logits are not numbers with an error. All blocks that these requests have computed since
    /// they took their slots may be void too. The blocks are unpublished, and requests that have read them start over.
    /// If such a request had drafts in its span, a draft may be the cause, because even an attention weight of 0 lets a
    /// NaN through. So the request starts over without speculation instead of ending.
    fn handle_undrawn(&mut self, failed: &[(&InflightSpan, &str)], step: StepId) {
        if failed.is_empty() {
            return;
        }
        let mut undefined = Undefined::new(self.config.num_pages);
        // Other requests can have read void pages only after the first of the failed requests took its slot. Such a
        // reader may have been preempted since.
        let mut first_started = step;
        for (span, _) in failed {
            self.forget_span(span, step);
            let started = self.requests[span.index].started_step();
            first_started = first_started.min(started);
            self.unpublish_undefined(span.index, started, &mut undefined);
        }
        let mut others: Vec<_> = self.requests.indices().collect();
        let failed_indices: RequestSet = failed.iter().map(|(span, _)| span.index).collect();
        others.retain(|&index| !failed_indices.contains(index));
        // A reader may have published blocks that it computed from void rows, and others may have read those blocks.
        loop {
            let is_reader = |&index: &RequestIndex| self.reads_any(index, &undefined);
            let (readers, rest): (Vec<_>, Vec<_>) = others.into_iter().partition(is_reader);
            for &index in &readers {
                self.unpublish_undefined(index, first_started, &mut undefined);
                self.reset(index);
            }
            if readers.is_empty() {
                break;
            }
            others = rest;
        }
        for (span, reason) in failed {
            // The request may itself have started from pages of one of those readers.
            self.unpublish_undefined(span.index, first_started, &mut undefined);
            self.end_undrawn(span, reason);
        }
        self.end_undefined_holds(&undefined);
    }

    /// Passes on the hidden state of a span, unless its request has ended.
    fn take_hidden_state(&mut self, span: &InflightSpan, returned: Option<&(SlotId, HiddenState)>) {
        let Some((_, state)) = returned.filter(|(slot, _)| *slot == span.slot) else {
            panic!("the executor returns other hidden states than the spans yield");
        };
        let has_ended = matches!(
            self.requests[span.index].phase(),
            Phase::Leaving(Leaving::Finished | Leaving::Reset)
        );
        if !has_ended {
            self.emit_hidden_state(span.index, state);
        }
    }

    fn end_undrawn(&mut self, span: &InflightSpan, reason: &str) {
        let index = span.index;
        match self.requests[index].phase() {
            Phase::Leaving(Leaving::Finished | Leaving::Reset) => self.release_if_drained(index),
            Phase::Running | Phase::Leaving(Leaving::Preempted) if span.num_drafts > 0 => {
                self.requests[index].stop_speculating();
                self.reset(index);
            }
            Phase::Running | Phase::Leaving(Leaving::Preempted) => {
                let error = match span.has_hidden_state {
                    true => RequestError::NoHiddenState(reason.into()),
                    false => RequestError::NotDrawn(reason.into()),
                };
                self.finish(index, FinishReason::Error(error), None);
            }
            Phase::Waiting | Phase::Receiving | Phase::Arrived => {
                unreachable!("a step names a request without a slot")
            }
        }
    }

    fn update_request(
        &mut self,
        span: &InflightSpan,
        (logprobs, samples): (&[PromptLogprob], &[Drawn]),
        step: StepId,
    ) {
        let index = span.index;
        self.forget_span(span, step);
        let state = &mut self.requests[index];
        match state.phase() {
            Phase::Leaving(Leaving::Finished | Leaving::Reset) => {}
            Phase::Running | Phase::Leaving(Leaving::Preempted) => {
                let completes_prefill = state.note_computed(span.end, span.num_logprobs);
                if let Some(speculator) = state.speculator_mut()
                    && span.num_drafts > 0
                {
                    speculator.note_checked(span.num_drafts, samples.len() as u32 - 1);
                }
                let is_last = completes_prefill && state.max_tokens() == 0;
                if completes_prefill {
                    self.retain_prefixes(index);
                }
                if !logprobs.is_empty() {
                    self.emit_logprobs(index, logprobs);
                }
                match is_last {
                    true => self.finish(index, FinishReason::Length, None),
                    false => self.append_tokens(index, samples),
                }
                if self.kv.has_windows() {
                    self.give_back_pages(index);
                }
            }
            Phase::Waiting | Phase::Receiving | Phase::Arrived => {
                unreachable!("a step names a request without a slot")
            }
        }
        self.release_if_drained(index);
    }

    /// Appends tokens one by one, as if separate steps had drawn them, until one ends the request. All tokens but the
    /// last were drafts in the step, so their rows are in the pages. Tokens after the end are dropped.
    fn append_tokens(&mut self, index: RequestIndex, samples: &[Drawn]) {
        for (at, (_, sample)) in samples.iter().enumerate() {
            if at > 0 {
                self.requests[index].note_accepted();
                let counters = self.journal.counters();
                counters.num_accepted_draft_tokens += 1;
                counters.accepted_by_position.0[at - 1] += 1;
            }
            if !self.append_token(index, sample.clone()) {
                return;
            }
        }
    }

    /// Returns false when the token ends the request.
    fn append_token(&mut self, index: RequestIndex, sample: Sample) -> bool {
        self.journal.counters().num_generated_tokens += 1;
        let state = &mut self.requests[index];
        state.push_token(sample.token);
        self.forecast.note_grown(state);
        match state.finish_reason() {
            Some(reason) => {
                self.finish(index, reason, Some(sample));
                false
            }
            None => {
                self.emit(index, Some(sample), None);
                true
            }
        }
    }

    /// Handles the failure of the oldest step in flight. Its requests end with an error, its blocks are unpublished,
    /// and requests of later steps that read them start over.
    ///
    /// # Panics
    /// Panics when `step` is not the oldest step in flight.
    pub fn handle_step_failed(&mut self, step: StepId, reason: &str) {
        let failed = self.take_oldest(step);
        let mut undefined = Undefined::new(self.config.num_pages);
        for span in &failed.spans {
            self.forget_span(span, step);
            self.unpublish_undefined(span.index, step, &mut undefined);
        }
        // A span that reads rows comes after the span that computes them, even within a step. So one pass is enough.
        let later = self.inflight.iter().flat_map(|step| &step.spans);
        let later: Vec<_> = later.map(|span| span.index).collect();
        let failed_indices: RequestSet = failed.spans.iter().map(|span| span.index).collect();
        for index in later {
            if !failed_indices.contains(index) && self.reads_any(index, &undefined) {
                self.unpublish_undefined(index, step, &mut undefined);
                self.reset(index);
            }
        }
        self.end_undefined_holds(&undefined);
        for span in &failed.spans {
            let index = span.index;
            if self.requests[index].phase() == Phase::Leaving(Leaving::Finished) {
                self.release_if_drained(index);
            } else {
                let error = RequestError::from(reason);
                self.finish(index, FinishReason::Error(error), None);
            }
        }
    }

    /// Requeues a request. Its KV and the results of steps in flight are dropped.
    fn reset(&mut self, index: RequestIndex) {
        let reason = "what it shares with other requests is undefined";
        let state = &self.requests[index];
        let has_spill = self.spills.has(state.id());
        match state.phase() {
            Phase::Leaving(Leaving::Finished | Leaving::Reset) => {}
            Phase::Waiting if !has_spill => {}
            _ if state.came_with_kv() => self.hand_back(index, reason),
            Phase::Running | Phase::Arrived | Phase::Leaving(Leaving::Preempted) => {
                self.leave(index, Leaving::Reset)
            }
            Phase::Receiving if has_spill => self.leave(index, Leaving::Reset),
            Phase::Receiving => {
                let error = RequestError::KvNotReceived(reason.into());
                self.finish(index, FinishReason::Error(error), None);
            }
            Phase::Waiting => self.abandon_spill(index),
        }
    }

    fn take_oldest(&mut self, step: StepId) -> InflightStep {
        let oldest = self
            .inflight
            .take_oldest()
            .expect("a step returns while none is in flight");
        assert_eq!(oldest.step, step, "steps return out of order");
        self.pace.note_returned(
            oldest.planned_us,
            oldest.num_tokens,
            oldest.num_prefill_tokens,
        );
        oldest
    }

    /// Forgets that a step names the request.
    fn forget_span(&mut self, span: &InflightSpan, step: StepId) {
        let state = &mut self.requests[span.index];
        state.forget_span(span.draws, span.num_drafts);
        if let Some(pages) = state.take_donor_of(step) {
            self.kv.unlock_all(pages);
        }
    }

    fn release_if_drained(&mut self, index: RequestIndex) {
        let is_drained = self.requests.get(index).is_some_and(|state| {
            matches!(state.phase(), Phase::Leaving(_)) && state.num_inflight_steps() == 0
        });
        if is_drained {
            self.release(index);
        }
    }
}

/// The log-probabilities of a span.
fn logprobs_of<'a>(
    span: &InflightSpan,
    returned: Option<&'a (SlotId, Vec<PromptLogprob>)>,
) -> &'a [PromptLogprob] {
    match returned {
        Some((slot, logprobs))
            if *slot == span.slot && logprobs.len() == span.num_logprobs as usize =>
        {
            logprobs
        }
        _ => panic!("the executor returns other log-probabilities than the spans yield"),
    }
}
