//! Guesses of the tokens to come, which a decode's step computes and checks along the way.
//!
//! A step is planned as if nobody guessed; then what is left of its budget goes to drafts. They
//! preempt nobody, and take only pages that nobody else is counted on. What an executor draws
//! behind a draft counts only if the draft was what it had drawn, so outputs are those of a run
//! without; `feedback.rs` takes them in.

use alloc::vec::Vec;

use crate::draft_length::DraftLength;
use crate::request_state::RequestIndex;
use crate::step_plan::StepPlan;
use crate::suffix_index::SuffixIndex;
use crate::{Scheduler, SchedulerConfig, Speculation, TokenId};

/// Guesses for one request.
#[derive(Debug)]
pub(crate) struct Speculator {
    proposer: Proposer,
    length: DraftLength,
}

/// Where guesses come from. Another kind, say the tokens that a draft model has drawn, is another
/// variant: all that is asked of it is tokens that may follow.
#[derive(Debug)]
enum Proposer {
    Ngram(SuffixIndex),
}

impl Proposer {
    /// Appends up to `max` tokens to `drafts`. `tokens` begin with those of the last call.
    fn propose(&mut self, tokens: &[TokenId], max: usize, drafts: &mut Vec<TokenId>) {
        match self {
            Self::Ngram(index) => {
                let Some(end) = index.longest_match(tokens) else {
                    return;
                };
                for at in end..end + max {
                    // A match that overlaps what it matches goes on in its own period.
                    let draft = match at.checked_sub(tokens.len()) {
                        None => tokens[at],
                        Some(at) => drafts[at],
                    };
                    drafts.push(draft);
                }
            }
        }
    }
}

impl Speculator {
    pub fn new(config: &SchedulerConfig) -> Option<Self> {
        let proposer = match config.speculation {
            Speculation::Off => return None,
            Speculation::Ngram => Proposer::Ngram(SuffixIndex::default()),
        };
        Some(Self {
            proposer,
            length: DraftLength::default(),
        })
    }

    /// So many drafts were computed, and so many of them held.
    pub fn note_checked(&mut self, num_drafts: u32, num_accepted: u32) {
        self.length.note_checked(num_drafts, num_accepted);
    }
}

impl Scheduler {
    /// Shares what the step has left out over its decodes, for drafts.
    pub(crate) fn plan_drafts(&mut self, plan: &mut StepPlan) {
        if self.config.speculation == Speculation::Off || plan.tokens_left == 0 {
            return;
        }
        let is_decode = |plan: &StepPlan, at: usize| {
            plan.batch.spans[at].sample && plan.batch.spans[at].tokens.len() == 1
        };
        let at_all = 0..plan.entries.len();
        let mut num_decodes = at_all.clone().filter(|&at| is_decode(plan, at)).count() as u32;
        let mut num_tokens = plan.tokens_left;
        let running = self.running.iter().map(|&index| &self.requests[index]);
        plan.num_reserved_pages = running.map(|state| self.num_future_pages(state)).sum();
        for at in at_all {
            if !is_decode(plan, at) {
                continue;
            }
            let share = num_tokens.div_ceil(num_decodes);
            let num_drafts = self.draft(plan.entries[at].index, share, plan);
            plan.entries[at].num_drafts = num_drafts;
            num_tokens -= num_drafts;
            num_decodes -= 1;
        }
        let num_drafts = plan.tokens_left - num_tokens;
        if num_drafts > 0 {
            self.counters.num_draft_tokens += u64::from(num_drafts);
            plan.insert_drafts(&self.requests);
        }
    }

    /// Guesses up to `max` tokens behind the one that the request has in the step, and sees to
    /// their pages.
    fn draft(&mut self, index: RequestIndex, max: u32, plan: &mut StepPlan) -> u32 {
        let num_own_pages = self.num_future_pages(&self.requests[index]);
        let state = &mut self.requests[index];
        // The draw behind the last of them is its last token at most.
        let num_left = state.max_tokens - (state.num_total_tokens() - state.num_prompt_tokens);
        let Some(speculator) = &mut state.speculator else {
            return 0;
        };
        let max = speculator
            .length
            .next(self.config.max_draft_tokens)
            .min(max)
            .min(num_left);
        if max == 0 {
            return 0;
        }
        let drafts = &mut state.drafts;
        speculator
            .proposer
            .propose(&state.tokens, max as usize, drafts);
        let page_size = self.config.page_size;
        let num_rows = state.num_scheduled_tokens + drafts.len() as u32;
        let num_pages = (num_rows.div_ceil(page_size) as usize).saturating_sub(state.table.len());
        if num_pages > 0 {
            let num_others_pages = plan.num_reserved_pages - num_own_pages;
            let has_pages = !plan.is_short_of_pages
                && num_others_pages + num_pages <= self.kv.num_available()
                && (self.waiting.is_empty() || num_pages <= num_own_pages);
            let first_new = state.table.len();
            if has_pages && self.kv.try_allocate(num_pages, &mut state.table) {
                let slot = state.slot.expect("a request in a step has a slot");
                plan.extend_table(state, slot, first_new);
                plan.num_reserved_pages -= num_pages.min(num_own_pages);
            } else {
                let num_free_rows = first_new as u32 * page_size - state.num_scheduled_tokens;
                state.drafts.truncate(num_free_rows as usize);
            }
        }
        self.requests[index].drafts.len() as u32
    }
}
