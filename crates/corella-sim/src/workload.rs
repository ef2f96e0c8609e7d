//! The workload of one run, made from a seed.

pub(crate) mod policy;
pub(crate) mod progress;

use corella_core::{
    FinishReason, HeadRoom, KvGroup, LatencyObjectives, Namespace, Pooling, PrefillAdmissionPolicy,
    RecurrentState, Request, RequestId, Retention, SamplingParams, SchedulerConfig,
    SchedulingPolicy, Speculation, StoppingCriteria, TokenId,
};
use corella_model::CostModel;

use crate::executor::{CheckingExecutor, root_row};
use crate::random::Random;

/// Everything that a run consists of, known before it begins.
#[derive(Clone, Debug)]
pub struct Workload {
    pub config: SchedulerConfig,
    pub cost: CostModel,
    /// The number of different tokens. It is small, so that prompts share prefixes by chance.
    pub alphabet: u32,
    /// One in this many steps fails; 0 means none.
    pub fails_once_in: u64,
    /// In one of this many steps nothing can be drawn for one span; 0 means never.
    pub undrawn_once_in: u64,
    /// The longest duration of a copy to or from host memory. One in `copies_fail_once_in` copies fails; 0 means none.
    pub max_copy_us: u64,
    pub copies_fail_once_in: u64,
    /// The calls, in order of time.
    pub calls: Vec<Call>,
    /// The times of attempts to reset the prefix cache.
    pub resets_us: Vec<u64>,
    pub pins: Vec<Pin>,
    /// Attempts to fetch blocks, and the longest pause before a writer fills the next page.
    pub fetches: Vec<FetchPlan>,
    pub max_page_us: u64,
}

/// An attempt to fetch the blocks of a sequence, which may be cached or not.
#[derive(Clone, Debug)]
pub struct FetchPlan {
    pub at_us: u64,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
    /// The time for which requests wait for the fetch, and the further time until the fetch is cancelled.
    pub soft_us: u64,
    pub late_us: u64,
}

/// An attempt to pin a prefix, which may be cached at that time or not.
#[derive(Clone, Debug)]
pub struct Pin {
    pub at_us: u64,
    pub namespace: Namespace,
    pub tokens: Vec<TokenId>,
}

/// One API call with its choices.
#[derive(Clone, Debug)]
pub struct Call {
    pub at_us: u64,
    pub answers: Vec<Answer>,
}

/// A request, and the output that any schedule must produce.
#[derive(Clone, Debug)]
pub struct Answer {
    pub request: Request,
    pub output: Vec<TokenId>,
    pub finish: FinishReason,
    pub abort: Option<Station>,
}

/// The state of a request at its abort.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Station {
    Queued,
    /// A chunk of the prompt, but not the last, is being computed.
    ChunkInFlight,
    /// A part of the prompt has been computed, and no step in flight names the request.
    BetweenChunks,
    /// The end of the prompt is being computed.
    PromptInFlight,
    Decoding,
    BetweenTokens,
    /// Drafts for the request are being checked.
    DraftsInFlight,
    /// The step that draws the last token is being computed.
    LastTokenInFlight,
    Preempted,
    /// The request has ended, so the abort must be declined.
    Ended,
}

impl Station {
    pub const ALL: [Self; 10] = [
        Self::Queued,
        Self::ChunkInFlight,
        Self::BetweenChunks,
        Self::PromptInFlight,
        Self::Decoding,
        Self::BetweenTokens,
        Self::DraftsInFlight,
        Self::LastTokenInFlight,
        Self::Preempted,
        Self::Ended,
    ];
}

/// A `max_passed_over` that no run is long enough to reach.
pub const NEVER: u32 = 10_000;

/// The arrival times and the shapes of calls.
#[derive(Clone, Copy, Debug)]
enum Traffic {
    Steady,
    /// Calls arrive at a few moments, many at a time.
    Bursts,
    /// Prompts are as long as the limits allow, and arrive faster than they can be served.
    LongPrompts,
    /// Prompts are short and want as much output as the limits allow.
    LongOutputs,
    /// Every prompt continues an earlier prompt and its reply.
    Conversations,
}

impl Workload {
    pub fn from_seed(seed: u64) -> Self {
        Writer::new(seed).write()
    }

    /// Returns the same workload with another kind of speculation, or none. The limit of steps in flight becomes one
    /// that this kind supports.
    pub fn with_speculation(mut self, speculation: Speculation) -> Self {
        self.config.speculation = speculation;
        if let Speculation::Draft { .. } = speculation {
            self.config.num_pipeline_stages = 1;
        }
        if speculation != Speculation::Off && self.config.num_pipeline_stages == 1 {
            self.config.max_inflight_steps = 1;
        }
        self
    }

    pub fn answers(&self) -> impl Iterator<Item = &Answer> {
        self.calls.iter().flat_map(|call| &call.answers)
    }
}

struct Writer {
    random: Random,
    /// Draws the properties of spilled requests.
    spill: Random,
    /// Draws the properties of requests for prompt log-probabilities.
    scores: Random,
    /// Draws the properties of requests for hidden states.
    poolings: Random,
    /// Draws the beginnings that requests retain. `None` in a workload without retentions.
    retaining: Option<Random>,
    /// Draws fetches. `None` in a workload without fetches.
    fetching: Option<Random>,
    fetches: Vec<FetchPlan>,
    config: SchedulerConfig,
    alphabet: u32,
    traffic: Traffic,
    /// Earlier sequences to build prompts from, each with its namespace.
    known: Vec<(Namespace, Vec<TokenId>)>,
    num_requests: u64,
    priorities: u64,
    /// The longest delay between a request's arrival and its submission.
    max_delay_us: u64,
    cost: CostModel,
    pins: Vec<Pin>,
}

impl Writer {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut spill = Random(seed ^ 0x5b11);
        let mut config = if random.once_in(5) {
            roomy_config(&mut random)
        } else {
            tight_config(&mut random)
        };
        if spill.once_in(2) {
            config.max_spilled_pages = 1 + spill.below(2 * u64::from(config.num_pages)) as u32;
        }
        let mut groups = Random(seed ^ 0x6709);
        if groups.once_in(3) {
            split_layers(&mut config, &mut groups);
        }
        let mut recurrent = Random(seed ^ 0x5a7e);
        if recurrent.once_in(4) {
            config.set_recurrent_state(RecurrentState {
                num_snapshots: recurrent.below(10) as u32,
                snapshot_interval: 1 + recurrent.below(5) as u32,
                least_distance: 1 + recurrent.below(3) as u32,
            });
        }
        let mut retaining = Random(seed ^ 0x7e7a);
        let has_retentions = retaining.once_in(2);
        if has_retentions {
            config.max_retained_pages = retaining.below(u64::from(config.num_pages) + 1) as u32;
        }
        let is_recurrent = config.recurrent_state.is_some();
        let mut fetching = Random(seed ^ 0xfe7c);
        let has_fetches = config.enable_prefix_caching && fetching.once_in(3) && !is_recurrent;
        if has_fetches && fetching.once_in(2) {
            config.max_fetched_pages = fetching.below(u64::from(config.num_pages) + 1) as u32;
            config.max_served_pages = fetching.below(2 * u64::from(config.num_pages)) as u32;
        }
        let traffic = random.pick(&[
            Traffic::Steady,
            Traffic::Bursts,
            Traffic::LongPrompts,
            Traffic::LongOutputs,
            Traffic::Conversations,
        ]);
        let per_step_us = (1 + random.below(200)) as f64;
        let per_token_us = random.below(20) as f64;
        let cost = CostModel {
            per_step_us,
            per_token_us,
            per_decode_us: per_token_us,
            per_attended_kilotoken_us: random.below(100) as f64,
        };
        Self {
            alphabet: 2 + random.below(3) as u32,
            priorities: random.pick(&[1, 1, 3]),
            max_delay_us: random.pick(&[0, 0, 1000]),
            random,
            spill,
            scores: Random(seed ^ 0x5c0e),
            poolings: Random(seed ^ 0x9001),
            retaining: Some(retaining).filter(|_| has_retentions),
            fetching: Some(fetching).filter(|_| has_fetches),
            fetches: Vec::new(),
            config,
            traffic,
            known: vec![Default::default()],
            num_requests: 0,
            cost,
            pins: Vec::new(),
        }
    }

    fn write(mut self) -> Workload {
        let num_calls = 5 + self.random.below(60);
        let num_bursts = 1 + self.random.below(4);
        let mut at_us = 0;
        let mut calls = Vec::new();
        for index in 0..num_calls {
            at_us += match self.traffic {
                Traffic::Bursts if index % num_calls.div_ceil(num_bursts) != 0 => 0,
                Traffic::Bursts => self.random.below(20_000),
                Traffic::LongPrompts => self.random.below(100),
                _ => self.random.below(1 + (self.cost.per_step_us as u64) * 4),
            };
            calls.push(self.call(at_us));
            if self.config.max_pinned_pages > 0 && self.random.once_in(3) {
                self.pin(at_us);
            }
            self.fetch(at_us);
        }
        let num_resets = self.random.below(3);
        let step_us = self.cost.per_step_us as u64;
        let page_us = |random: &mut Random| random.pick(&[1, step_us, step_us * 10]);
        let max_page_us = self.fetching.as_mut().map_or(0, page_us);
        Workload {
            fails_once_in: self.random.pick(&[0, 0, 10, 40]),
            undrawn_once_in: self.random.pick(&[0, 0, 10, 40]),
            max_copy_us: self.spill.pick(&[0, 100, 5_000]),
            copies_fail_once_in: self.spill.pick(&[0, 0, 4]),
            resets_us: (0..num_resets)
                .map(|_| self.random.below(at_us * 2 + 1))
                .collect(),
            cost: self.cost,
            alphabet: self.alphabet,
            config: self.config,
            pins: self.pins,
            max_page_us,
            fetches: self.fetches,
            calls,
        }
    }

    /// Pins a beginning of an earlier sequence. The request of that sequence may still be running.
    fn pin(&mut self, at_us: u64) {
        let (namespace, known) = self.pick_known();
        let num_tokens = self.random.below(known.len() as u64 + 1) as usize;
        let tokens = known[..num_tokens].to_vec();
        let num_steps = self.random.pick(&[2, 20, 200]);
        let max_wait_us = self.cost.per_step_us as u64 * num_steps;
        self.pins.push(Pin {
            at_us: at_us + self.random.below(max_wait_us),
            namespace,
            tokens,
        });
    }

    /// Fetches the beginning of a sequence that a request will use or has used.
    fn fetch(&mut self, at_us: u64) {
        let Some(random) = &mut self.fetching else {
            return;
        };
        if random.once_in(2) {
            return;
        }
        let num_known = self.known.len() as u64;
        // Newer sequences are continued more often.
        let at = num_known - 1 - random.below(num_known.min(4));
        let (namespace, known) = &self.known[at as usize];
        let num_tokens = match random.once_in(2) {
            true => known.len() as u64,
            false => random.below(known.len() as u64 + 1),
        };
        let step_us = self.cost.per_step_us as u64;
        let wait_us = random.pick(&[0, 1, 10, 100]) * step_us;
        self.fetches.push(FetchPlan {
            at_us: at_us.saturating_sub(random.pick(&[0, 0, 1, 10]) * step_us),
            namespace: namespace.clone(),
            tokens: known[..num_tokens as usize].to_vec(),
            soft_us: random.below(wait_us + 1),
            late_us: random.below(wait_us + 1),
        });
    }

    fn pick_known(&mut self) -> (Namespace, Vec<TokenId>) {
        let at = self.random.below(self.known.len() as u64) as usize;
        self.known[at].clone()
    }

    fn call(&mut self, at_us: u64) -> Call {
        let prompt = self.prompt();
        let mut stopping = self.stopping();
        let prompt_logprobs = self.scores.once_in(4).then_some(0);
        if prompt_logprobs.is_some() && self.scores.once_in(3) {
            stopping.max_tokens = Some(0);
        }
        let pooling = self.poolings.once_in(8).then(|| {
            stopping.max_tokens = Some(0);
            self.poolings.pick(&[Pooling::LastToken, Pooling::Mean])
        });
        let namespace = self.namespace();
        let objectives = self.objectives();
        let arrival_us = at_us.saturating_sub(self.random.below(self.max_delay_us + 1));
        let priority = self.random.below(self.priorities) as i32;
        let num_choices = self.random.pick(&[1, 1, 1, 1, 2, 3]);
        let retentions = self.retentions(prompt.len() as u64);
        let answers = (0..num_choices).map(|choice| {
            let request = Request {
                id: RequestId(self.num_requests),
                prompt: prompt.clone(),
                output: Vec::new(),
                exports_kv: false,
                // A mask changes in which step a token is planned. It never changes the token.
                is_masked: self.num_requests % 5 == 3,
                sampling: SamplingParams {
                    choice,
                    prompt_logprobs: prompt_logprobs.filter(|_| pooling.is_none()),
                    pooling,
                    ..SamplingParams::GREEDY
                },
                stopping: stopping.clone(),
                priority,
                arrival_us,
                objectives,
                namespace: namespace.clone(),
                retentions: retentions.clone(),
            };
            self.num_requests += 1;
            self.answer(request)
        });
        Call {
            at_us,
            answers: answers.collect(),
        }
    }

    /// Draws the beginnings of a prompt to retain. Some retentions end during the run, and some would end after it. A
    /// beginning may be longer than the prompt.
    fn retentions(&mut self, num_prompt_tokens: u64) -> Vec<Retention> {
        let step_us = self.cost.per_step_us as u64;
        let Some(random) = self.retaining.as_mut() else {
            return Vec::new();
        };
        let num_marks = random.pick(&[0, 0, 1, 1, 2, 4]);
        let marks = (0..num_marks).map(|_| Retention {
            num_tokens: random.below(num_prompt_tokens + 2) as u32,
            ttl_us: random.pick(&[0, 2, 20, 200, 100_000]) * step_us,
        });
        marks.collect()
    }

    /// Draws a namespace. Adapters and salts have the same few names, so that checks notice if one is taken for the
    /// other.
    fn namespace(&mut self) -> Namespace {
        let mut name = || {
            let name = self.random.pick(&["name", ""]);
            self.random.once_in(6).then(|| name.into())
        };
        Namespace {
            lora: name(),
            cache_salt: name(),
            arithmetic: None,
        }
    }

    /// Draws objectives, from unattainable ones to ones that all requests meet.
    fn objectives(&mut self) -> LatencyObjectives {
        let step_us = self.cost.per_step_us as u64;
        let mut objective = |max_steps: u64| {
            let objective_us = self.random.below(1 + step_us * max_steps);
            self.random.once_in(3).then_some(objective_us)
        };
        LatencyObjectives {
            ttft_us: objective(100),
            tpot_us: objective(10),
        }
    }

    /// Draws a prompt: new tokens, often after a part of an earlier sequence.
    fn prompt(&mut self) -> Vec<TokenId> {
        let most = self.max_len();
        let (from_known, num_new) = match self.traffic {
            Traffic::LongPrompts => (self.random.once_in(4), self.random.below(most)),
            Traffic::LongOutputs => (false, 1 + self.random.below(4)),
            Traffic::Conversations => (true, self.random.below(1 + most / 8)),
            _ => (self.random.once_in(2), self.random.below(1 + most / 2)),
        };
        let mut prompt = Vec::new();
        if from_known {
            let (_, known) = self.pick_known();
            let keep = match self.random.below(3) {
                0 => self.random.below(known.len() as u64 + 1) as usize,
                _ => known.len(),
            };
            prompt.extend(&known[..keep]);
        }
        for _ in 0..num_new {
            prompt.push(self.random.below(self.alphabet.into()) as TokenId);
        }
        // Some prompts remain too long, and are refused.
        if !self.random.once_in(16) {
            prompt.truncate((most - self.random.below(1 + most / 4)) as usize);
        }
        prompt
    }

    /// The largest number of rows that one request can fill.
    fn max_len(&self) -> u64 {
        let config = &self.config;
        let has_no_window = |group: &KvGroup| group.window.is_none();
        let num_growing_groups = config.kv_groups.iter().filter(|group| has_no_window(group));
        let num_rows = config.num_pages * config.page_size;
        let num_rows = num_rows.checked_div(num_growing_groups.count() as u32);
        config
            .max_model_len
            .min(num_rows.unwrap_or(u32::MAX))
            .into()
    }

    fn stopping(&mut self) -> StoppingCriteria {
        let max_tokens = match self.traffic {
            Traffic::LongOutputs => None,
            _ if self.random.once_in(3) => None,
            _ => Some(1 + self.random.below(self.max_len().min(48) / 2) as u32),
        };
        let mut stopping = StoppingCriteria {
            max_tokens,
            min_tokens: self.random.pick(&[0, 0, 0, 1, 2, 5]),
            ..StoppingCriteria::default()
        };
        // Most requests without a limit have an end token.
        let may_end = match (self.traffic, max_tokens) {
            (Traffic::LongOutputs, _) | (_, Some(_)) => self.random.once_in(2),
            (_, None) => !self.random.once_in(4),
        };
        if may_end {
            stopping.end_token_ids.push(0);
        }
        if self.random.once_in(4) && self.alphabet > 2 {
            stopping.stop_token_ids.push(1);
        }
        stopping
    }

    /// Works out the output of the request when it runs alone. The output is empty if the request will be refused.
    fn answer(&mut self, request: Request) -> Answer {
        let num_tokens = self.config.check_request(&request).unwrap_or(0) as usize;
        let stopping = &request.stopping;
        let (end, stop) = (&stopping.end_token_ids, &stopping.stop_token_ids);
        let masked: Vec<_> = end.iter().chain(stop).copied().collect();
        let mut output = CheckingExecutor::lone_run(
            self.alphabet,
            root_row(&request.namespace),
            &request.prompt,
            num_tokens,
            &masked,
            stopping.min_tokens as usize,
        );
        let mut finish = FinishReason::Length;
        if let Some(at) = output.iter().position(|token| masked.contains(token)) {
            output.truncate(at + 1);
            finish = if end.contains(&output[at]) {
                FinishReason::EndToken
            } else {
                FinishReason::StopToken
            };
        }
        let mut whole = request.prompt.clone();
        whole.extend(&output);
        if whole.len() < self.config.max_model_len as usize {
            self.known.push((request.namespace.clone(), whole));
        }
        let abort = self.random.once_in(6);
        Answer {
            abort: abort.then(|| self.random.pick(&Station::ALL)),
            request,
            output,
            finish,
        }
    }
}

/// Limits with pools of a few pages and budgets of a few tokens, so that every limit is reached often.
fn tight_config(random: &mut Random) -> SchedulerConfig {
    let page_size = 1 + random.below(5) as u32;
    let num_pages = 3 + random.below(20) as u32;
    let max_model_len = (num_pages * page_size * (1 + random.below(2) as u32)).max(2);
    let mut config = SchedulerConfig::new(num_pages, page_size, max_model_len);
    config.max_num_seqs = 1 + random.below(6) as u32;
    config.max_num_batched_tokens = config.max_num_seqs + random.below(24) as u32;
    config.max_prefill_tokens = 1 + random.below(24) as u32;
    config.long_prefill_token_threshold = (random.below(2) * random.below(8)) as u32;
    config.max_queued_requests = 4 + random.below(60) as u32;
    config.max_queued_tokens = random.pick(&[u64::MAX, u64::MAX, 20, 100]);
    config.max_preemptions = random.pick(&[1, 100_000]);
    vary(&mut config, random);
    config
}

/// Limits with the proportions of a small server.
fn roomy_config(random: &mut Random) -> SchedulerConfig {
    let page_size = random.pick(&[8, 16]);
    let num_pages = 40 + random.below(200) as u32;
    let mut config = SchedulerConfig::new(num_pages, page_size, 512);
    config.max_num_seqs = 4 + random.below(28) as u32;
    config.max_num_batched_tokens = config.max_num_seqs + 16 + random.below(128) as u32;
    config.max_prefill_tokens = 16 + random.below(128) as u32;
    config.long_prefill_token_threshold = random.pick(&[0, 0, 8, 32]);
    vary(&mut config, random);
    config
}

/// Gives the model one to three KV groups, most of them with windows. The number of pages is multiplied by the number
/// of groups.
fn split_layers(config: &mut SchedulerConfig, random: &mut Random) {
    let num_groups = 1 + random.below(3) as u32;
    let max_window = u64::from(config.page_size) * 6;
    let groups = (0..num_groups).map(|_| KvGroup {
        window: (!random.once_in(3)).then(|| 1 + random.below(max_window) as u32),
    });
    config.kv_groups = groups.collect();
    config.num_pages *= num_groups;
}

fn vary(config: &mut SchedulerConfig, random: &mut Random) {
    config.max_inflight_steps = 1 + random.below(3) as u32;
    config.num_pipeline_stages = random.pick(&[1, 1, config.max_inflight_steps]);
    config.enable_prefix_caching = !random.once_in(6);
    config.enable_chunked_prefill = !random.once_in(5);
    config.max_passed_over = random.pick(&[1, 2, 3, 4, NEVER]);
    config.enable_slo_admission = random.once_in(4);
    if random.once_in(3) {
        config.max_pinned_pages = random.below((config.num_pages / 2).into()) as u32;
    }
    config.head_room = match random.below(5) {
        0 => HeadRoom::Limit,
        1 | 2 => {
            let share = HeadRoom::ONE / 3 * random.below(4) as u32;
            HeadRoom::Share {
                share,
                min_share: random.below(u64::from(share) + 1) as u32,
                num_decay_steps: random.pick(&[0, 1, 10, 100]),
            }
        }
        _ => HeadRoom::Estimate,
    };
    if random.once_in(3) {
        config.max_prefill_seqs = 1 + random.below(3) as u32;
    }
    if random.once_in(3) {
        config.max_decode_seqs = 1 + random.below(3) as u32;
    }
    if random.once_in(3) {
        config.scheduling_policy = SchedulingPolicy::Priority;
    } else if config.enable_prefix_caching && random.once_in(3) {
        config.scheduling_policy = SchedulingPolicy::LongestPrefix {
            lookahead: 1 + random.below(8) as u32,
        };
    } else if random.once_in(4) {
        config.scheduling_policy = SchedulingPolicy::ShortestFirst {
            lookahead: 1 + random.below(8) as u32,
        };
    } else if random.once_in(2) {
        config.prefill_admission_policy = PrefillAdmissionPolicy::Pack {
            lookahead: 1 + random.below(8) as u32,
            force_fifo_every: random.below(5) as u32,
        };
    }
    let plans_known_tokens = config.max_inflight_steps == 1 || config.num_pipeline_stages > 1;
    if plans_known_tokens && !random.once_in(3) {
        config.speculation = Speculation::Ngram;
        config.max_draft_tokens = 1 + random.below(8) as u32;
        if config.max_inflight_steps == 1 && random.once_in(2) {
            let draw_cost = random.below(SchedulerConfig::MAX_DRAW_COST.into()) as u32;
            config.speculation = Speculation::Draft { draw_cost };
        }
    }
    if random.once_in(4) {
        config.max_chunk_tokens = 1 + random.below(config.max_prefill_tokens.into()) as u32;
    }
}
