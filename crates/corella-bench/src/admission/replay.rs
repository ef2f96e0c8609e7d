//! One run of the scheduler in virtual time, without an executor.

use std::time::Duration;

use corella_core::{
    Batch, BatchOutput, FinishReason, Request, RequestId, Sample, Scheduler, SchedulerConfig,
    SlotId, TokenId,
};

use super::workload::{Item, Workload};
use super::{AdmissionOptions, GivenLimit, Rule};
use crate::BenchError;
use crate::sample::summary::Summary;

const END_TOKEN: TokenId = 0;
const TOKEN: TokenId = 1;
/// Drawn tokens have smaller ids than the tokens of prompts.
const FIRST_PROMPT_TOKEN: TokenId = 2;

/// The scheduler counts as stuck after this many plans in a row that give no step, although requests wait and nothing
/// is in flight. A few such plans are normal, because all running requests may have been preempted.
const MAX_IDLE_PLANS: usize = 1000;

/// The result of one rule.
#[derive(Debug, Clone)]
pub struct Replay {
    pub rule: &'static Rule,
    pub makespan_s: f64,
    /// Output tokens per second of the requests that finished.
    pub output_tokens_per_s: f64,
    pub num_steps: u64,
    pub num_preemptions: u64,
    pub num_finished: usize,
    /// The number of requests that ended with an error.
    pub num_failed: usize,
    pub ttft_ms: Summary,
    /// The longest time between two tokens of one request.
    pub worst_gap_ms: f64,
    /// The share of pages in use, averaged over the time of all steps.
    pub pool_share: f64,
    /// The numbers of running and of waiting requests, averaged over the time of all steps.
    pub mean_running: f64,
    pub mean_waiting: f64,
    /// The share of the time of all steps in which only pages were missing: requests waited although slots were free
    /// and the step had room for prompts.
    pub page_limited_share: f64,
}

/// The state of a running request.
#[derive(Debug, Clone, Default)]
struct Progress {
    num_tokens: u32,
    first_token: Option<Duration>,
    last_token: Option<Duration>,
    is_finished: bool,
}

/// Sums over all steps, each weighted by the seconds that the step took.
#[derive(Debug, Default)]
struct StepSums {
    step_s: f64,
    page_s: f64,
    running_s: f64,
    waiting_s: f64,
    page_limited_s: f64,
}

struct Player<'a> {
    scheduler: Scheduler,
    options: &'a AdmissionOptions,
    items: &'a [Item],
    now: Duration,
    progress: Vec<Progress>,
    /// The request that holds each slot.
    tenants: Vec<RequestId>,
    sums: StepSums,
    worst_gap: Duration,
    end: Duration,
    num_failed: usize,
}

impl Replay {
    pub fn run(
        rule: &'static Rule,
        workload: &Workload,
        options: &AdmissionOptions,
    ) -> Result<Self, BenchError> {
        let mut config = options.config.clone();
        config.max_queued_requests = (workload.items.len() as u32).max(1);
        (rule.configure)(&mut config);
        let num_slots = config.max_num_seqs as usize;
        let scheduler = Scheduler::new(config).map_err(BenchError::Config)?;
        let mut player = Player {
            scheduler,
            options,
            items: &workload.items,
            now: Duration::ZERO,
            progress: vec![Progress::default(); workload.items.len()],
            tenants: vec![RequestId(0); num_slots],
            sums: StepSums::default(),
            worst_gap: Duration::ZERO,
            end: Duration::ZERO,
            num_failed: 0,
        };
        player.play(rule)?;
        Ok(player.replay(rule))
    }
}

impl Player<'_> {
    fn play(&mut self, rule: &Rule) -> Result<(), BenchError> {
        let mut num_added = 0;
        let mut num_idle_plans = 0;
        loop {
            while let Some(item) = self.items.get(num_added)
                && item.at <= self.now
            {
                let request = request(num_added, item, rule.limit, self.scheduler.config());
                let refused =
                    |error| BenchError::Option(format!("{}: a request: {error}", rule.name));
                self.scheduler
                    .add_requests(vec![request])
                    .map_err(refused)?;
                num_added += 1;
            }
            let now_us = self.now.as_micros() as u64;
            if let Some(batch) = self.scheduler.schedule(now_us) {
                num_idle_plans = 0;
                self.take_outputs();
                self.compute(batch);
            } else if !self.scheduler.has_unfinished() {
                let Some(next) = self.items.get(num_added) else {
                    break;
                };
                self.now = next.at;
            } else {
                num_idle_plans += 1;
                if num_idle_plans > MAX_IDLE_PLANS {
                    let stuck = format!("{}: requests wait and nothing is planned", rule.name);
                    return Err(BenchError::Worker(stuck));
                }
            }
            self.take_outputs();
        }
        Ok(())
    }

    /// Lets the time of a step pass, and draws its tokens.
    fn compute(&mut self, batch: Batch) {
        let duration = self.options.cost.step_duration(&batch);
        self.count(&batch, duration.as_secs_f64());
        self.now += duration;
        for start in &batch.started {
            self.tenants[start.slot.0 as usize] = start.request;
        }
        let sampled = batch.spans.iter().filter(|span| span.yields.draws());
        let samples = sampled.map(|span| (span.slot, self.draw(span.slot)));
        let output = BatchOutput {
            step: batch.step,
            samples: samples.collect(),
            ..BatchOutput::default()
        };
        self.scheduler.update_from_output(&output);
    }

    fn draw(&self, slot: SlotId) -> Sample {
        let at = self.tenants[slot.0 as usize].0 as usize;
        let is_last = self.progress[at].num_tokens + 1 == self.items[at].num_output_tokens;
        Sample {
            token: if is_last { END_TOKEN } else { TOKEN },
            logprobs: None,
        }
    }

    fn count(&mut self, batch: &Batch, seconds: f64) {
        let stats = self.scheduler.stats();
        let config = self.scheduler.config();
        let prompt_spans = batch.spans.iter().filter(|span| span.tokens.len() > 1);
        let num_prefill_tokens: usize = prompt_spans.map(|span| span.tokens.len()).sum();
        let has_room = stats.num_running < config.max_num_seqs as usize
            && batch.num_tokens() < config.max_num_batched_tokens as usize
            && num_prefill_tokens < config.max_prefill_tokens as usize;
        let sums = &mut self.sums;
        sums.step_s += seconds;
        sums.page_s += seconds * stats.num_in_use_pages as f64;
        sums.running_s += seconds * stats.num_running as f64;
        sums.waiting_s += seconds * stats.num_waiting as f64;
        if has_room && stats.num_waiting > 0 {
            sums.page_limited_s += seconds;
        }
    }

    fn take_outputs(&mut self) {
        while let Some(output) = self.scheduler.poll_output() {
            let progress = &mut self.progress[output.request.0 as usize];
            if output.sample.is_some() {
                progress.num_tokens += 1;
                progress.first_token.get_or_insert(self.now);
                if let Some(last) = progress.last_token.replace(self.now) {
                    self.worst_gap = self.worst_gap.max(self.now - last);
                }
            }
            match output.finish {
                None => continue,
                Some(FinishReason::EndToken | FinishReason::Length) => progress.is_finished = true,
                Some(_) => self.num_failed += 1,
            }
            self.end = self.now;
        }
    }

    fn replay(self, rule: &'static Rule) -> Replay {
        let finished = self.progress.iter().filter(|progress| progress.is_finished);
        let num_tokens: f64 = finished
            .clone()
            .map(|progress| f64::from(progress.num_tokens))
            .sum();
        let started = self.items.first().map_or(Duration::ZERO, |item| item.at);
        let makespan_s = (self.end.saturating_sub(started)).as_secs_f64();
        let waits = self.items.iter().zip(&self.progress);
        let waits = waits.filter_map(|(item, progress)| Some(progress.first_token? - item.at));
        let stats = self.scheduler.stats();
        let sums = &self.sums;
        let mean = |sum: f64| sum / sums.step_s.max(f64::MIN_POSITIVE);
        Replay {
            rule,
            makespan_s,
            output_tokens_per_s: num_tokens / makespan_s.max(f64::MIN_POSITIVE),
            num_steps: stats.num_steps,
            num_preemptions: stats.num_preemptions,
            num_finished: finished.count(),
            num_failed: self.num_failed,
            ttft_ms: Summary::new(waits.map(|wait| wait.as_secs_f64() * 1e3).collect()),
            worst_gap_ms: self.worst_gap.as_secs_f64() * 1e3,
            pool_share: mean(sums.page_s) / stats.num_pages as f64,
            mean_running: mean(sums.running_s),
            mean_waiting: mean(sums.waiting_s),
            page_limited_share: mean(sums.page_limited_s),
        }
    }
}

/// Makes a request whose prompt begins with a unique token.
fn request(index: usize, item: &Item, limit: GivenLimit, config: &SchedulerConfig) -> Request {
    let token = FIRST_PROMPT_TOKEN + index as TokenId;
    let prompt = vec![token; item.num_prompt_tokens as usize];
    let id = RequestId(index as u64);
    let mut request = Request::greedy(id, prompt, item.num_output_tokens);
    let pool_len = u64::from(config.num_pages) * u64::from(config.page_size);
    let max_len = pool_len.min(config.max_model_len.into()) as u32;
    let stopping = &mut request.stopping;
    match limit {
        GivenLimit::Exact => {}
        GivenLimit::AtMost(most) => {
            let fits = most.min(max_len - item.num_prompt_tokens);
            stopping.max_tokens = Some(fits.max(item.num_output_tokens));
            stopping.end_token_ids = vec![END_TOKEN];
        }
        GivenLimit::None => {
            stopping.max_tokens = None;
            stopping.end_token_ids = vec![END_TOKEN];
        }
    }
    request.arrival_us = item.at.as_micros() as u64;
    request
}
