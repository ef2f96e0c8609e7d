//! Speculation: guesses of the next tokens, which the step of a decode computes and checks along
//! the way.
//!
//! A step is first planned without guesses; what is left of its budget then goes to drafts. Drafts
//! preempt nobody, and take only pages that no other request is expected to need. What an executor
//! draws behind a draft counts only if it had drawn that draft itself, so outputs are those of a
//! run without speculation; `feedback.rs` takes them in.

use alloc::vec::Vec;

use crate::request_state::{RequestIndex, RequestState};
use crate::step::draft_length::DraftLength;
use crate::step::step_plan::StepPlan;
use crate::step::suffix_index::SuffixIndex;
use crate::{RequestId, Scheduler, SchedulerConfig, SlotStart, Speculation, TokenId};

/// The speculation of one request.
#[derive(Debug)]
pub(crate) struct Speculator {
    proposer: Proposer,
    length: DraftLength,
}

/// Where guesses come from. Another source is another variant, and only has to name tokens that may
/// follow.
#[derive(Debug)]
enum Proposer {
    Ngram(SuffixIndex),
    /// Tokens that a draft model has drawn behind the first `num_tokens` tokens. They are useless
    /// behind any others.
    Given {
        num_tokens: usize,
        drafts: Vec<TokenId>,
    },
}

/// A request that could use guesses in the step to come.
#[derive(Debug)]
pub struct DraftRequest<'a> {
    /// Its slot and sampling parameters. A draft model that draws with the same parameters at the
    /// same position guesses better. `cached_tokens` is empty.
    pub start: SlotStart,
    /// The prompt and the output so far.
    pub tokens: &'a [TokenId],
    /// The number of drafts that the step can use, at least 1.
    pub max_drafts: u32,
}

impl Proposer {
    /// Appends up to `max` guesses to `drafts`. `tokens` must begin with those of the last call.
    fn propose(&mut self, tokens: &[TokenId], max: usize, drafts: &mut Vec<TokenId>) {
        match self {
            Self::Given {
                num_tokens,
                drafts: given,
            } => {
                if *num_tokens == tokens.len() {
                    drafts.extend(given.iter().take(max));
                }
            }
            Self::Ngram(index) => {
                let Some(end) = index.longest_match(tokens) else {
                    return;
                };
                for at in end..end + max {
                    // A match that reaches up to the end of the text continues into its own period.
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
        let (proposer, draw_cost) = match config.speculation {
            Speculation::Off => return None,
            Speculation::Ngram => (Proposer::Ngram(SuffixIndex::default()), 0),
            Speculation::Draft { draw_cost } => {
                let (num_tokens, drafts) = (0, Vec::new());
                (Proposer::Given { num_tokens, drafts }, draw_cost)
            }
        };
        Some(Self {
            proposer,
            length: DraftLength::new(draw_cost),
        })
    }

    /// The number of guesses to ask for. Given drafts were already limited when they were
    /// requested.
    fn num_wanted(&mut self, max: u32) -> u32 {
        match &self.proposer {
            Proposer::Ngram(_) => self.length.next(max),
            Proposer::Given { drafts, .. } => max.min(drafts.len() as u32),
        }
    }

    fn has_given(&self, tokens: &[TokenId]) -> bool {
        match &self.proposer {
            Proposer::Ngram(_) => false,
            Proposer::Given { num_tokens, drafts } => {
                *num_tokens == tokens.len() && !drafts.is_empty()
            }
        }
    }

    /// Drops the given drafts after one step, of which `num_planned` were in that step.
    fn drop_given(&mut self, num_planned: u32) {
        if let Proposer::Given { drafts, .. } = &mut self.proposer {
            let num_given = core::mem::take(drafts).len() as u32;
            self.length.note_unused(num_given - num_planned);
        }
    }

    /// Records how many drafts were checked and how many of them held.
    pub fn note_checked(&mut self, num_drafts: u32, num_accepted: u32) {
        self.length.note_checked(num_drafts, num_accepted);
    }
}

impl Scheduler {
    /// The requests that could use a draft model's guesses in the next step, and how many. There
    /// are none with another kind of speculation, while a step is in flight, or when a prompt is
    /// about to take what the step has left.
    pub fn draft_requests(&mut self) -> Vec<DraftRequest<'_>> {
        let is_asked = matches!(self.config.speculation, Speculation::Draft { .. });
        if !is_asked || !self.inflight.is_empty() {
            return Vec::new();
        }
        let requests = &mut self.requests;
        let running = self.running.iter();
        let decoding: Vec<_> = running.filter(|&i| requests[i].wants_decode()).collect();
        let num_decodes = (decoding.len() as u32).min(self.config.max_decode_seqs);
        let running = self.running.iter().map(|index| &requests[index]);
        let prefilling = running.filter(|state| state.is_prefilling());
        let num_to_prefill = match self.waiting.len() == 0 || self.slots.num_free() == 0 {
            true => { prefilling }
                .map(|state| state.prefill_end - state.num_scheduled_tokens)
                .sum(),
            // A starting request takes all prefill tokens that it can.
            false => u32::MAX,
        };
        let num_taken =
            num_decodes.saturating_add(num_to_prefill.min(self.config.max_prefill_tokens));
        let mut num_tokens = self.config.max_num_batched_tokens.saturating_sub(num_taken);
        let mut num_left = decoding.len() as u32;
        let mut asked = Vec::with_capacity(decoding.len());
        for index in decoding {
            let share = num_tokens.div_ceil(num_left);
            num_left -= 1;
            let state = &mut requests[index];
            // One token is drawn behind the last draft, so the drafts leave room for it.
            let max = (state.max_tokens - state.num_output_tokens() - 1)
                .min(share)
                .min(self.config.max_draft_tokens);
            let Some(speculator) = &mut state.speculator else {
                continue;
            };
            if max == 0 || speculator.has_given(&state.tokens) {
                continue;
            }
            let max_drafts = speculator.length.next(max);
            num_tokens -= max_drafts;
            if max_drafts > 0 {
                asked.push((index, max_drafts));
            }
        }
        let requests = &self.requests;
        let request = |(index, max_drafts): (RequestIndex, u32)| {
            let state: &RequestState = &requests[index];
            let slot = state.slot.expect("a running request has no slot");
            DraftRequest {
                start: state.slot_start(slot, 0),
                tokens: &state.tokens,
                max_drafts,
            }
        };
        asked.into_iter().map(request).collect()
    }

    /// Gives a request drafts behind its current tokens. The next step that computes the newest of
    /// those tokens includes the drafts, as far as it has room.
    pub fn give_drafts(&mut self, id: RequestId, drafts: Vec<TokenId>) {
        let Some(index) = self.requests.find(id) else {
            return;
        };
        let state = &mut self.requests[index];
        let num_tokens = state.tokens.len();
        if let Some(speculator) = &mut state.speculator
            && let Proposer::Given { .. } = speculator.proposer
        {
            speculator.drop_given(0);
            speculator.proposer = Proposer::Given { num_tokens, drafts };
        }
    }

    /// Shares the tokens left in the step among its decodes, for drafts.
    pub(crate) fn plan_drafts(&mut self, plan: &mut StepPlan) {
        if self.config.speculation == Speculation::Off || plan.budget.tokens_left == 0 {
            return;
        }
        let is_decode = |plan: &StepPlan, at: usize| {
            plan.batch.spans[at].yields.draws() && plan.batch.spans[at].tokens.len() == 1
        };
        let at_all = 0..plan.entries.len();
        let mut num_decodes = at_all.clone().filter(|&at| is_decode(plan, at)).count() as u32;
        let mut num_tokens = plan.budget.tokens_left;
        self.keep_pages_of_running();
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
        let num_drafts = plan.budget.tokens_left - num_tokens;
        if num_drafts > 0 {
            self.counters.num_draft_tokens += u64::from(num_drafts);
            plan.insert_drafts(&self.requests);
        }
    }

    /// Guesses up to `max` tokens behind the request's token in the step, and allocates their
    /// pages. Returns the number of drafts.
    fn draft(&mut self, index: RequestIndex, max: u32, plan: &mut StepPlan) -> u32 {
        let demand = self.demand_of_running(&self.requests[index]);
        let num_own_pages = self.forecast.num_own_pages(&demand);
        let state = &mut self.requests[index];
        // The token drawn behind the last draft may be the request's last.
        let num_left = state.max_tokens - (state.num_total_tokens() - state.num_prompt_tokens);
        let Some(speculator) = &mut state.speculator else {
            return 0;
        };
        let max = speculator
            .num_wanted(self.config.max_draft_tokens)
            .min(max)
            .min(num_left);
        if max > 0 {
            let drafts = &mut state.drafts;
            speculator
                .proposer
                .propose(&state.tokens, max as usize, drafts);
        }
        let page_size = self.config.page_size;
        let num_rows = state.num_scheduled_tokens + state.drafts.len() as u32;
        let first_new = state.tables.len();
        let num_entries = (num_rows.div_ceil(page_size) as usize).saturating_sub(first_new);
        let num_pages = num_entries * self.config.kv_groups.len();
        if num_pages > 0 {
            let num_others_pages = self.forecast.peak().saturating_sub(num_own_pages);
            let has_pages = !plan.is_short_of_pages
                && num_others_pages + num_pages <= self.kv.num_available()
                && (self.waiting.len() == 0 || num_pages <= num_own_pages);
            let end = first_new + num_entries;
            if has_pages && self.kv.try_extend(&mut state.tables, |_| end) {
                let slot = state.slot.expect("a request in a step has no slot");
                plan.extend_tables(state, slot, |_, _| first_new);
                let num_kept_pages = num_pages.min(demand.num_kept_pages as usize);
                self.forecast.drop_kept_pages(num_kept_pages);
                self.forecast.note_taken(num_pages, state.is_length_known);
            } else {
                let num_free_rows = first_new as u32 * page_size - state.num_scheduled_tokens;
                state.drafts.truncate(num_free_rows as usize);
            }
        }
        let num_drafts = state.drafts.len() as u32;
        if let Some(speculator) = &mut state.speculator {
            speculator.drop_given(num_drafts);
        }
        num_drafts
    }
}
