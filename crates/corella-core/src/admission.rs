//! Who may wait, and who of those that wait starts now.

use alloc::vec::Vec;

use crate::prefix_tree::{KnownPath, PrefixMatch};
use crate::request_state::{RequestIndex, RequestState, Stage};
use crate::step_plan::StepPlan;
use crate::waiting_queue::Queue;
use crate::{
    AdmissionError, PageCopy, PageId, PrefillAdmissionPolicy, Request, Scheduler, SchedulerConfig,
    SchedulingPolicy, StepId,
};

/// Followers of leaders that one round looks past.
pub(crate) const MAX_HELD_BY_LEADERS: usize = 64;

impl SchedulerConfig {
    /// The request's limit of new tokens, or why it could never run to its end.
    pub fn check_request(&self, request: &Request) -> Result<u32, AdmissionError> {
        let num_prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        if num_prompt_tokens == 0 {
            return Err(AdmissionError::EmptyPrompt);
        }
        let asked = request.stopping.max_tokens;
        if asked == Some(0) {
            return Err(AdmissionError::ZeroMaxTokens);
        }
        let max_tokens = asked.unwrap_or(1);
        let num_tokens = u64::from(num_prompt_tokens) + u64::from(max_tokens);
        if num_tokens > u64::from(self.max_model_len) {
            return Err(AdmissionError::ContextExceeded {
                num_prompt_tokens,
                max_tokens,
                max_model_len: self.max_model_len,
            });
        }
        let needed_pages = (num_tokens as u32).div_ceil(self.page_size);
        let num_pages = self.num_pages - self.max_pinned_pages;
        if needed_pages > num_pages {
            return Err(AdmissionError::PoolExceeded {
                num_prompt_tokens,
                max_tokens,
                needed_pages,
                num_pages,
            });
        }
        let step_limit = self.max_unchunked_tokens();
        if num_tokens - 1 > u64::from(step_limit) {
            return Err(AdmissionError::StepExceeded {
                num_prompt_tokens,
                max_tokens,
                limit: step_limit,
            });
        }
        let pool_len = u64::from(num_pages) * u64::from(self.page_size);
        let max_len = pool_len
            .min(self.max_model_len.into())
            .min(u64::from(step_limit) + 1);
        Ok(asked.unwrap_or((max_len - u64::from(num_prompt_tokens)) as u32))
    }

    /// Without chunks, what a step has for one prompt beside all decodes: also for a
    /// preempted request, whose output is then prefilled too.
    pub(crate) fn max_unchunked_tokens(&self) -> u32 {
        if self.enable_chunked_prefill {
            return u32::MAX;
        }
        self.max_num_batched_tokens - self.max_other_decodes()
    }

    /// Decode rows of a step in which someone prefills.
    pub(crate) fn max_other_decodes(&self) -> u32 {
        self.max_decode_seqs.min(self.max_num_seqs - 1)
    }
}

/// What keeps a request from starting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Held {
    /// It lacks tokens of the step, pages or a slot.
    NoRoom,
    /// Another request is computing what it needs next.
    ByLeader,
}

/// What it takes to start a waiting request now.
pub(crate) struct Candidate {
    index: RequestIndex,
    pub matched: PrefixMatch,
    num_matched_tokens: u32,
    num_uncached_tokens: u32,
    /// Pages that it takes or locks: for its known tokens and its share of output.
    pub num_needed_pages: usize,
}

impl Scheduler {
    /// Starts waiting requests: preempted ones first, then new ones by the policy.
    pub(crate) fn admit_waiting(&mut self, plan: &mut StepPlan) {
        if self.waiting.is_empty() || plan.is_short_of_pages {
            return;
        }
        self.num_admission_rounds += 1;
        if !self.has_room_to_start(plan) {
            return;
        }
        self.survey_running(plan);
        match self.config.scheduling_policy {
            SchedulingPolicy::Fcfs => {
                if !self.admit_in_order(Queue::Preempted, plan) {
                    return;
                }
                match self.config.prefill_admission_policy {
                    PrefillAdmissionPolicy::Pack {
                        lookahead,
                        force_fifo_every,
                    } if !self.is_fifo_round(force_fifo_every) => {
                        self.admit_packed(lookahead, plan);
                    }
                    _ => {
                        self.admit_in_order(Queue::New, plan);
                    }
                }
            }
            SchedulingPolicy::Priority => {
                if self.admit_in_order(Queue::Aged, plan) {
                    self.admit_most_urgent(plan);
                }
                self.count_passed_over(plan);
            }
            SchedulingPolicy::LongestPrefix { lookahead } => {
                if self.admit_in_order(Queue::Preempted, plan)
                    && self.admit_in_order(Queue::Aged, plan)
                {
                    self.admit_longest_prefix(lookahead, plan);
                }
                self.count_passed_over(plan);
            }
        }
    }

    /// Who is prefilling, and which pages those that run will ask for.
    pub(crate) fn survey_running(&self, plan: &mut StepPlan) {
        let requests = &self.requests;
        let running = self.running.iter().copied();
        plan.leaders = running
            .clone()
            .filter(|&index| requests[index].is_prefilling())
            .collect();
        plan.num_reserved_pages = running
            .map(|index| self.num_future_pages(&requests[index]))
            .sum();
    }

    /// Packing stands back when the head has been passed over too often, when no tokens limit
    /// a step, and regularly.
    fn is_fifo_round(&self, force_fifo_every: u32) -> bool {
        let is_head_aged = self.waiting.new.front().is_some_and(|&head| {
            self.requests[head].num_passed_over >= self.config.max_passed_over
        });
        let limit = self
            .config
            .max_prefill_tokens
            .min(self.config.max_num_batched_tokens);
        let every = u64::from(force_fifo_every);
        is_head_aged
            || limit == u32::MAX
            || (every > 0 && self.num_admission_rounds.is_multiple_of(every))
    }

    /// Starts requests until one does not fit; then false. Those held by a leader stay where
    /// they are.
    fn admit_in_order(&mut self, queue: Queue, plan: &mut StepPlan) -> bool {
        let mut num_held = 0;
        while let Some(&index) = self.waiting.queue(queue).get(num_held) {
            match self.try_start(index, plan) {
                Ok(()) => {}
                Err(Held::ByLeader) if num_held < MAX_HELD_BY_LEADERS => num_held += 1,
                Err(_) => return false,
            }
        }
        true
    }

    /// Starts the smallest of the first `lookahead` requests that fit, in order of arrival;
    /// when none fits, the first.
    fn admit_packed(&mut self, lookahead: u32, plan: &mut StepPlan) {
        if !self.has_room_to_start(plan) {
            return;
        }
        let considered = self.waiting.new.iter().take(lookahead as usize);
        let considered: Vec<_> = considered.copied().collect();
        let candidates: Vec<_> = considered
            .into_iter()
            .filter_map(|index| self.candidate(index, plan).ok())
            .collect();
        let mut by_size: Vec<usize> = (0..candidates.len()).collect();
        by_size.sort_by_key(|&at| candidates[at].num_uncached_tokens);

        let mut num_tokens = plan.prefill_room();
        let mut num_pages = self.num_unreserved_pages(plan);
        let num_seqs = (plan.prefill_seqs_left as usize).min(self.free_slots.len());
        let mut chosen: Vec<usize> = Vec::new();
        for at in by_size {
            let candidate = &candidates[at];
            if chosen.len() < num_seqs
                && candidate.num_uncached_tokens <= num_tokens
                && candidate.num_needed_pages <= num_pages
            {
                num_tokens -= candidate.num_uncached_tokens;
                num_pages -= candidate.num_needed_pages;
                chosen.push(at);
            }
        }
        if chosen.is_empty() {
            if let Some(head) = candidates.first() {
                let _ = self.try_start(head.index, plan);
            }
            return;
        }
        chosen.sort_unstable();
        // What one starts can change what the next finds cached, so each is looked at again.
        chosen.retain(|&at| self.try_start(candidates[at].index, plan).is_ok());
        let overtaken_before = chosen.last().copied().unwrap_or(0);
        for at in (0..overtaken_before).filter(|at| !chosen.contains(at)) {
            self.pass_over(candidates[at].index);
        }
    }

    pub(crate) fn try_start(
        &mut self,
        index: RequestIndex,
        plan: &mut StepPlan,
    ) -> Result<(), Held> {
        if !self.has_room_to_start(plan) {
            return Err(Held::NoRoom);
        }
        let candidate = self.candidate(index, plan)?;
        let others_want = self.waiting.len() > 1 || !plan.leaders.is_empty();
        let chunk = self.chunk_len(candidate.num_uncached_tokens, others_want, plan);
        if chunk == 0 || candidate.num_needed_pages > self.num_unreserved_pages(plan) {
            return Err(Held::NoRoom);
        }
        self.start(candidate, chunk, plan);
        Ok(())
    }

    pub(crate) fn has_room_to_start(&self, plan: &StepPlan) -> bool {
        !self.free_slots.is_empty() && plan.prefill_room() > 0
    }

    pub(crate) fn num_unreserved_pages(&self, plan: &StepPlan) -> usize {
        let available = self.kv.num_available();
        available.saturating_sub(plan.num_reserved_pages)
    }

    /// Looks a waiting request up in the prefix tree and counts what it needs.
    pub(crate) fn candidate(
        &mut self,
        index: RequestIndex,
        plan: &StepPlan,
    ) -> Result<Candidate, Held> {
        let mut matched = PrefixMatch::default();
        if self.config.enable_prefix_caching {
            matched = self.match_waiting(index, plan.batch.step);
        }
        let state = &self.requests[index];
        if self.config.enable_prefix_caching && self.is_held_by_leader(state, &matched, plan) {
            return Err(Held::ByLeader);
        }
        // Cached pages that it locks are available no longer.
        let is_cached = |page| !self.kv.is_locked(page);
        let num_fresh_pages = self.num_pages_at_share(state) - matched.pages.len();
        // Locks reach from the root to the last locked page of a path.
        let num_in_use = matched.pages.partition_point(|&page| !is_cached(page));
        let mut num_needed_pages = num_fresh_pages + matched.pages.len() - num_in_use;
        if let Some((donor, _)) = matched.donor
            && is_cached(donor)
        {
            if num_needed_pages < self.num_unreserved_pages(plan) {
                num_needed_pages += 1;
            } else {
                // Computing those rows takes no page more than the request has anyway.
                matched.donor = None;
            }
        }
        let num_rows = matched.donor.map_or(0, |(_, num_rows)| num_rows);
        let num_matched_tokens = matched.pages.len() as u32 * self.config.page_size + num_rows;
        Ok(Candidate {
            index,
            num_uncached_tokens: state.num_known_tokens() - num_matched_tokens,
            num_matched_tokens,
            matched,
            num_needed_pages,
        })
    }

    /// What the tree has of a waiting request's tokens. A request that waits long is looked up
    /// often, so it remembers what was found.
    pub(crate) fn match_waiting(&mut self, index: RequestIndex, step: StepId) -> PrefixMatch {
        let state = &mut self.requests[index];
        // At least the last token is computed, for its logits.
        let tokens = &state.tokens[..state.tokens.len() - 1];
        let namespace = &state.request.namespace;
        let known = &mut state.known_path;
        self.kv.rematch_prefix(namespace, tokens, step, known)
    }

    /// Whether a prefilling request is about to publish the page that this one needs next.
    fn is_held_by_leader(
        &self,
        state: &RequestState,
        matched: &PrefixMatch,
        plan: &StepPlan,
    ) -> bool {
        let page_size = self.config.page_size as usize;
        let frontier = matched.pages.len();
        let next_page = frontier * page_size..(frontier + 1) * page_size;
        if next_page.end > state.tokens.len() - 1 {
            return false;
        }
        plan.leaders.iter().any(|&leader| {
            let leader = &self.requests[leader];
            leader.num_published_pages as usize == frontier
                && next_page.end <= leader.prefill_end as usize
                && leader.table[..frontier] == matched.pages[..]
                && leader.request.namespace == state.request.namespace
                && leader.tokens[next_page.clone()] == state.tokens[next_page.clone()]
        })
    }

    fn count_hits(&mut self, candidate: &Candidate, step: StepId) {
        let state = &self.requests[candidate.index];
        let num_matched_tokens = u64::from(candidate.num_matched_tokens);
        self.counters.num_prefix_query_tokens += u64::from(state.num_known_tokens());
        self.counters.num_prefix_hit_tokens += num_matched_tokens;
        let hits = &mut self.counters.prefix_hits;
        if state.num_cached_tokens.is_some() {
            hits.num_resumed_tokens += num_matched_tokens;
            return;
        }
        let PrefixMatch { pages, donor } = &candidate.matched;
        let from_step = |&&page: &&PageId| self.kv.filled_by(page) == Some(step);
        // What this step fills follows what earlier ones did.
        let num_shared_pages = pages.iter().rev().take_while(from_step).count() as u64;
        let num_shared_tokens = num_shared_pages * u64::from(self.config.page_size);
        let num_copied_tokens = donor.map_or(0, |(_, num_rows)| u64::from(num_rows));
        hits.num_shared_tokens += num_shared_tokens;
        hits.num_copied_tokens += num_copied_tokens;
        hits.num_cached_tokens += num_matched_tokens - num_shared_tokens - num_copied_tokens;
    }

    /// Gives a request its slot and all pages of its known tokens, and plans the first chunk.
    fn start(&mut self, candidate: Candidate, chunk: u32, plan: &mut StepPlan) {
        self.count_hits(&candidate, plan.batch.step);
        let Candidate { index, matched, .. } = candidate;
        self.waiting.remove(index);
        let now_us = self.now_us();
        let state = &mut self.requests[index];
        let num_known_tokens = state.num_known_tokens();
        let num_matched_tokens = candidate.num_matched_tokens;

        for &page in &matched.pages {
            self.kv.lock(page);
        }
        if let Some((donor, _)) = matched.donor {
            self.kv.lock(donor);
            state.donor = Some((donor, plan.batch.step));
        }
        let num_matched_pages = matched.pages.len();
        state.table = matched.pages;
        state.known_path = KnownPath::default();
        plan.latest_arrival = plan.latest_arrival.max(state.arrival);
        let num_pages = num_known_tokens.div_ceil(self.config.page_size) as usize;
        let has_pages = self
            .kv
            .try_allocate(num_pages - num_matched_pages, &mut state.table);
        assert!(has_pages, "a candidate's pages were counted after locking");

        let slot = self.free_slots.pop().expect("has_room_to_start");
        state.slot = Some(slot);
        state.stage = Stage::Running;
        state.num_published_pages = num_matched_pages as u32;
        state.num_computed_tokens = num_matched_tokens;
        state.num_scheduled_tokens = num_matched_tokens;
        state.prefill_end = num_known_tokens;
        state.started_step = plan.batch.step;
        plan.start_slot(state, slot);
        plan.extend_table(state, slot, 0);
        if let Some((from, num_rows)) = matched.donor {
            let to = state.table[num_matched_pages];
            plan.copy_rows(PageCopy { from, to, num_rows });
        }

        if state.num_cached_tokens.is_none() {
            self.num_queued_tokens -= u64::from(state.num_prompt_tokens);
            state.num_cached_tokens = Some(num_matched_tokens);
            state.queue_us = Some(now_us.saturating_sub(state.request.arrival_us));
            self.counters.num_prompt_tokens += u64::from(state.num_prompt_tokens);
        }

        let rank = state.rank();
        let requests = &self.requests;
        let at = self.running.partition_point(|&i| requests[i].rank() < rank);
        self.running.insert(at, index);
        self.plan_span(index, chunk, plan);
        let state = &self.requests[index];
        plan.num_reserved_pages += self.num_future_pages(state);
        if state.is_prefilling() {
            plan.leaders.push(index);
        }
    }
}
