//! The limits of a step, and the rule that drafts take only tokens and pages that the step has left over.

use std::collections::{BTreeMap, BTreeSet};

use corella_core::{RecurrentState, RequestId, SchedulerConfig, SchedulerStats, SlotId, Span};

use crate::check::verdict::{Checker, Planned, Verdict, ensure};
use crate::workload::policy;
use crate::workload::{Answer, Workload};

/// Rules 1, 3 and 7: a step exceeds no limit, and cuts a prompt short only if it is full.
pub struct StepLimits {
    config: SchedulerConfig,
    prompts: BTreeMap<RequestId, u32>,
    /// The prompt lengths of requests that draw no token.
    undrawn_prompts: BTreeMap<RequestId, u32>,
    /// Slots whose prompt was cut at a branch of the prefix tree. That may happen once after each start of a slot.
    branched: BTreeSet<SlotId>,
}

impl StepLimits {
    pub fn new(workload: &Workload) -> Self {
        Self {
            config: workload.config.clone(),
            prompts: BTreeMap::new(),
            undrawn_prompts: BTreeMap::new(),
            branched: BTreeSet::new(),
        }
    }

    /// Returns whether a snapshot may be due after a span: at a multiple of the interval, after the last block that an
    /// equal prompt would find, and at one other block after each start of a slot.
    fn ends_at_snapshot(&mut self, span: &Span, id: RequestId) -> bool {
        let page_size = self.config.page_size;
        let num_rows = span.start + span.tokens.len() as u32;
        let num_blocks = num_rows / page_size;
        let end_of_prompt = (self.prompts[&id] - 1) / page_size;
        let is_due = |recurrent: &RecurrentState| {
            num_blocks.is_multiple_of(recurrent.snapshot_interval) || num_blocks == end_of_prompt
        };
        let Some(recurrent) = &self.config.recurrent_state else {
            return false;
        };
        num_rows.is_multiple_of(page_size) && (is_due(recurrent) || self.branched.insert(span.slot))
    }
}

impl Checker for StepLimits {
    fn rule(&self) -> &'static str {
        "a step keeps its limits and is not wasted"
    }

    fn queued(&mut self, answer: &Answer) {
        let request = &answer.request;
        let num_prompt_tokens = request.prompt.len() as u32;
        self.prompts.insert(request.id, num_prompt_tokens);
        if request.stopping.max_tokens == Some(0) {
            self.undrawn_prompts.insert(request.id, num_prompt_tokens);
        }
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        for start in &step.batch.started {
            self.branched.remove(&start.slot);
        }
        let config = &self.config;
        let spans = step.batch.spans.iter();
        let is_prefill = |span: &&Span| step.prefilling.contains(&span.slot);
        let (prefills, decodes): (Vec<_>, Vec<_>) = spans.partition(is_prefill);
        // A span that ends a prompt may have drafts after the prompt's last token.
        let num_own = |span: &&Span| span.tokens.len() as u32 - span.num_drafts;
        let num_prefill_tokens: u32 = prefills.iter().map(num_own).sum();
        let num_drafts: u32 = step.batch.spans.iter().map(|span| span.num_drafts).sum();
        let is_lone_prompt = !config.enable_chunked_prefill && prefills.len() == 1;
        let has_small_chunks = prefills
            .iter()
            .all(|span| num_own(span) <= config.max_chunk_tokens);
        let keeps_limits = (num_prefill_tokens <= config.max_prefill_tokens || is_lone_prompt)
            && (has_small_chunks || !config.enable_chunked_prefill)
            && prefills.len() <= config.max_prefill_seqs as usize
            && decodes.len() <= config.max_decode_seqs as usize;
        let sizes = || {
            let (num_prefills, num_decodes) = (prefills.len(), decodes.len());
            format!(
                "{num_prefills} prompts with {num_prefill_tokens} tokens, {num_decodes} decodes \
                 with {num_drafts} drafts"
            )
        };
        ensure(keeps_limits, sizes)?;
        let num_tokens = step.batch.num_tokens() as u32 - num_drafts;
        let is_full = num_tokens == config.max_num_batched_tokens
            || num_prefill_tokens >= config.max_prefill_tokens;
        let ends_undrawn = |span: &Span| {
            let num_prompt_tokens = self.undrawn_prompts.get(&step.slots[&span.slot]);
            num_prompt_tokens == Some(&(span.start + span.tokens.len() as u32))
        };
        // With windows, a prompt is also cut short at page boundaries.
        if is_full || config.has_windows() {
            return Ok(());
        }
        let is_full_chunk = |span: &Span| span.tokens.len() as u32 == config.max_chunk_tokens;
        let cut = prefills
            .iter()
            .filter(|span| !span.yields.draws() && !ends_undrawn(span));
        let cut = cut.filter(|span| !is_full_chunk(span));
        let cut: Vec<_> = cut.collect();
        for span in cut {
            let ends_at_snapshot = self.ends_at_snapshot(span, step.slots[&span.slot]);
            ensure(ends_at_snapshot, || {
                format!("a prompt is cut short in a step of {}", sizes())
            })?;
        }
        Ok(())
    }
}

/// Drafts take only what a step has left over: no request is preempted for them. [`StepLimits`] checks that no prompt
/// is cut short for them.
pub struct Drafts {
    config: SchedulerConfig,
    num_preemptions: u64,
}

impl Drafts {
    pub fn new(workload: &Workload) -> Self {
        Self {
            config: workload.config.clone(),
            num_preemptions: 0,
        }
    }
}

impl Checker for Drafts {
    fn rule(&self) -> &'static str {
        "drafts yield"
    }

    fn planned(&mut self, step: &Planned<'_>) -> Verdict {
        let config = &self.config;
        let spans = &step.batch.spans;
        let num_drafts: u32 = spans.iter().map(|span| span.num_drafts).sum();
        if num_drafts == 0 {
            return Ok(());
        }
        // A request is preempted because another needs a page, so there was no page left for drafts. Under `priority`
        // one urgent request may preempt several, which can free more pages than it needs.
        let is_for_pages = !policy::is_by_priority(config);
        let num_preempted = step.stats.num_preemptions - self.num_preemptions;
        let first_rows = |span: &&Span| span.start + span.tokens.len() as u32 - span.num_drafts;
        let takes_page = |span: &&Span| {
            let num_pages = first_rows(span).div_ceil(config.page_size);
            num_pages < (first_rows(span) + span.num_drafts).div_ceil(config.page_size)
        };
        let has_new_page = |span: &&Span| {
            let deltas = step
                .batch
                .tables
                .iter()
                .filter(|delta| delta.slot == span.slot);
            let ends = deltas.map(|delta| delta.first + (delta.pages.end - delta.pages.start));
            let num_needed = first_rows(span).div_ceil(config.page_size);
            ends.max().is_some_and(|end| end > num_needed)
        };
        let drafting = spans.iter().filter(|span| span.num_drafts > 0);
        let num_taking = drafting.filter(takes_page).filter(has_new_page).count();
        ensure(
            !is_for_pages || num_preempted == 0 || num_taking == 0,
            || format!("{num_preempted} requests are preempted and drafts get pages"),
        )
    }

    fn settled(&mut self, stats: &SchedulerStats) -> Verdict {
        self.num_preemptions = stats.num_preemptions;
        Ok(())
    }
}
