//! Times a call for its metrics, its trace and the account of its API key.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use corella_core::{FinishReason, RequestOutput};
use corella_engine::TraceScope;

use crate::adapter::adapter_use::AdapterCall;
use crate::call::account::Account;
use crate::call::call_context::CallContext;
use crate::call::request_line::RequestLine;
use crate::wire::api_error::ApiError;
use crate::wire::cache_explanation::MissCause;

use super::Metrics;
use super::output::TokenTimes;

/// Times one API call, from the arrival of its request.
pub struct CallTimer {
    metrics: Arc<Metrics>,
    /// The account that pays for the tokens.
    account: Option<Arc<Account>>,
    trace: Option<TraceScope>,
    adapter: Option<AdapterCall>,
    line: Option<Arc<RequestLine>>,
    arrival: Instant,
    arrival_time: SystemTime,
    submission: Instant,
    /// The number of choices for each prompt, and `max_tokens`. `None` if the call generates no text.
    params: Option<(u32, Option<u32>)>,
    /// Times of the choices, by index.
    choices: Vec<Choice>,
    first_token_seen: bool,
}

/// The durations of a finished choice's stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceTimes {
    pub arrival_time: SystemTime,
    /// From the arrival of the request to the end of the choice.
    pub total: Duration,
    /// From the submission to the start of the prompt's computation.
    pub queue: Duration,
    /// From the start of the prompt's computation to the choice's first token.
    pub prefill: Duration,
    /// From the arrival of the request to the choice's first token.
    pub first_token: Duration,
    /// From the choice's first token to its last.
    pub decode: Duration,
}

#[derive(Clone, Copy, Default)]
struct Choice {
    queue: Duration,
    prefill: Duration,
    /// `None` before the choice's first token.
    tokens: Option<TokenTimes>,
}

impl CallTimer {
    pub fn new(metrics: Arc<Metrics>, context: &CallContext) -> Self {
        let arrival = Instant::now();
        Self {
            metrics,
            account: context.account.clone(),
            trace: context.trace.clone(),
            adapter: None,
            line: context.line.clone(),
            arrival,
            arrival_time: SystemTime::now(),
            submission: arrival,
            params: None,
            choices: Vec::new(),
            first_token_seen: false,
        }
    }

    /// Returns the span of the call, if it is traced.
    pub fn trace(&self) -> Option<&TraceScope> {
        self.trace.as_ref()
    }

    /// The name of the caller's API key.
    pub fn key(&self) -> Option<&str> {
        self.account.as_ref().map(|account| account.name())
    }

    /// Counts prompt tokens that were computed.
    pub fn count_miss(&self, cause: MissCause, num_tokens: u32) {
        self.metrics.prefix_cache_misses[cause as usize].inc_by(num_tokens.into());
    }

    /// Counts the call as a use of its adapter until the timer is dropped.
    pub fn count_adapter(&mut self, adapter: AdapterCall) {
        self.adapter = Some(adapter);
    }

    /// Records the model or adapter of a permitted call.
    pub fn handle_model(&self, model: &str) {
        if let Some(line) = &self.line {
            line.set_model(model);
        }
    }

    /// Records the parameters that `handle_end` observes.
    pub fn handle_params(&mut self, num_choices: u32, max_tokens: Option<u32>) {
        self.params = Some((num_choices, max_tokens));
    }

    /// Records that the prompts are tokenised and submitted to the engine.
    pub fn handle_submission(&mut self, num_prompt_tokens: usize) {
        if let Some(line) = &self.line {
            line.add_prompt(num_prompt_tokens);
        }
        self.submission = Instant::now();
        let took = self.submission - self.arrival;
        self.metrics.tokenize_seconds.observe(took.as_secs_f64());
        if let Some(trace) = &self.trace {
            trace
                .child()
                .finish("tokenize", self.arrival, self.submission, |span| span);
        }
    }

    pub fn handle_output(&mut self, choice: usize, output: &RequestOutput) {
        if let Some(adapter) = &mut self.adapter {
            adapter.handle_output();
        }
        if output.sample.is_none() {
            if output.finish == Some(FinishReason::Length) {
                // The call asked for log-probabilities of its prompt and for no token.
                let num_prompt_tokens = u64::from(output.num_prompt_tokens);
                self.metrics.prompt_tokens.inc_by(num_prompt_tokens);
            }
            return;
        }
        let now = Instant::now();
        let metrics = &self.metrics;
        if let Some(account) = &self.account {
            account.handle_token();
        }
        if let Some(line) = &self.line {
            line.add_output_token();
        }
        if self.choices.len() <= choice {
            self.choices.resize(choice + 1, Choice::default());
        }
        let timed = &mut self.choices[choice];
        if metrics.outputs.handle_token(&mut timed.tokens, now) {
            metrics
                .prompt_tokens
                .inc_by(u64::from(output.num_prompt_tokens));
            let num_prompt_tokens = f64::from(output.num_prompt_tokens);
            metrics.request_prompt_tokens.observe(num_prompt_tokens);
            // The choices of a prompt find the same cached tokens, which count once.
            let num_choices = self
                .params
                .map_or(1, |(num_choices, _)| num_choices as usize);
            if let Some(line) = &self.line
                && choice.is_multiple_of(num_choices)
            {
                line.add_cached(output.cache_use.num_cached_tokens);
            }
            let queue = Duration::from_micros(output.queue_us);
            metrics.queue_seconds.observe(queue.as_secs_f64());
            let prefill = (now - self.submission).saturating_sub(queue);
            (timed.queue, timed.prefill) = (queue, prefill);
            metrics.prefill_seconds.observe(prefill.as_secs_f64());
            if let Some(trace) = &self.trace {
                let started = (self.submission + queue).min(now);
                let choice = choice as u32;
                trace
                    .child()
                    .finish("queue", self.submission, started, |span| {
                        span.with("corella.choice", choice)
                    });
                trace.child().finish("prefill", started, now, |span| {
                    span.with("corella.choice", choice)
                        .with("gen_ai.usage.input_tokens", output.num_prompt_tokens)
                        .with("corella.cached_tokens", output.cache_use.num_cached_tokens)
                });
            }
        }
        if !self.first_token_seen {
            self.first_token_seen = true;
            let latency = now - self.arrival;
            metrics.time_to_first_token.observe(latency.as_secs_f64());
            if let Some(line) = &self.line {
                line.set_time_to_first_token(latency);
            }
            if let Some(recent) = metrics.outputs.recent_latency.watched() {
                recent.time_to_first_token.observe(latency);
            }
        }
    }

    /// Returns the times of a choice so far; `None` before its first token.
    pub fn times(&self, choice: usize) -> Option<ChoiceTimes> {
        let choice = self.choices.get(choice)?;
        let tokens = choice.tokens?;
        Some(ChoiceTimes {
            arrival_time: self.arrival_time,
            total: self.arrival.elapsed(),
            queue: choice.queue,
            prefill: choice.prefill,
            first_token: tokens.first - self.arrival,
            decode: tokens.last - tokens.first,
        })
    }

    pub fn handle_finish(&self, choice: usize, reason: &'static str) {
        self.count(reason, 1);
        if let Some(line) = &self.line {
            line.set_finish(reason);
        }
        let Some(timed) = self.choices.get(choice) else {
            return;
        };
        let Some(tokens) = &timed.tokens else {
            return;
        };
        if let Some(trace) = &self.trace {
            trace
                .child()
                .finish("decode", tokens.first, tokens.last, |span| {
                    span.with("corella.choice", choice as u32)
                        .with("gen_ai.usage.output_tokens", tokens.num_tokens)
                        .with("gen_ai.response.finish_reason", reason)
                });
        }
        self.metrics.outputs.handle_finish(tokens);
        let inference = timed.prefill + (tokens.last - tokens.first);
        self.metrics
            .inference_seconds
            .observe(inference.as_secs_f64());
    }

    /// Records the end of the last choice.
    pub fn handle_end(&self) {
        let metrics = &self.metrics;
        metrics
            .latency
            .observe(self.arrival.elapsed().as_secs_f64());
        let Some((num_choices, max_tokens)) = self.params else {
            return;
        };
        metrics.request_params_n.observe(num_choices.into());
        if let Some(max_tokens) = max_tokens {
            metrics.request_params_max_tokens.observe(max_tokens.into());
        }
        let longest = self
            .choices
            .iter()
            .map(|choice| choice.tokens.map_or(0, |tokens| tokens.num_tokens));
        let longest = longest.max().unwrap_or(0);
        metrics
            .request_max_num_generation_tokens
            .observe(longest.into());
    }

    pub fn handle_failure(&self, num_choices: usize, error: &ApiError) {
        self.count("error", num_choices);
        if let Some(line) = &self.line {
            line.set_failure(error);
        }
    }

    pub fn handle_abort(&self, num_choices: usize) {
        self.count("abort", num_choices);
        if let Some(line) = &self.line {
            line.set_finish("abort");
        }
    }

    fn count(&self, finished_reason: &'static str, num_choices: usize) {
        self.metrics
            .outputs
            .count_ends(finished_reason, num_choices);
    }
}
