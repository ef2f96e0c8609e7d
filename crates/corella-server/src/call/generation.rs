//! One API call in the engine: submits its prompts and reads its token streams as text.

use std::sync::Arc;
use std::task::{Context, Poll};

use corella_core::{
    CacheUse, FinishReason, Logprobs, RequestError, RequestOutput, Retention, TokenId,
};
use corella_engine::{Generate, StreamEvent, Submission, SubmitError, TokenStream};
use corella_text::{Detokenizer, ReplyParser, ReplyPart, TextStream};
use serde::Serialize;

use crate::call::call_engine::CallEngine;
use crate::call::metrics::{CallTimer, ChoiceTimes};
use crate::call::prompt_watch::PromptWatch;
use crate::call::request_id::RequestName;
use crate::text::prompt_tokens::PromptTokens;
use crate::text::resumed_answer;
use crate::text::sampling_fields::GenerationParams;
use crate::text::scored_prompt::ScoredPrompt;
use crate::wire::api_error::ApiError;
use crate::wire::cache_explanation::{CacheExplanation, CachedTokens};
use crate::wire::usage::{CacheCreation, Usage};

/// All choices of all prompts of one call. Dropping the generation aborts its running choices.
pub struct Generation {
    engine: Arc<CallEngine>,
    choices: Vec<Choice>,
    choices_per_prompt: usize,
    /// The number of choices that the answer has for each prompt.
    num_best: usize,
    num_unfinished: usize,
    /// The choice to poll first next time, so that no choice waits for the backlog of another.
    next: usize,
    timer: CallTimer,
}

/// New text of one choice. The last delta of a choice, and only the last, has `finish`.
#[derive(Debug, Default)]
pub struct ChoiceDelta {
    /// Index of the choice within the call: prompt × number of choices + choice.
    pub index: usize,
    /// The new text of a completion. In a reply of a conversation it is empty, and `parts` has the text.
    pub text: String,
    /// Whether the tokens of a resumed reply have begun a call, in the first delta of the choice.
    pub has_called: bool,
    /// New parts of a reply. Text that may still turn out to be markup is held back.
    pub parts: Vec<ReplyPart>,
    /// Log-probabilities of the tokens since the last delta; empty unless requested. The end token has one only with
    /// `each_token`.
    pub logprobs: Vec<(TokenId, Box<Logprobs>)>,
    /// The prompt's log-probabilities, if requested, in the first delta of the choice.
    pub prompt: Option<ScoredPrompt>,
    /// All tokens drawn since the last delta, including the end token; empty unless requested.
    pub tokens: Vec<TokenId>,
    /// The prompt's tokens, if token ids were requested, in the first delta of the choice.
    pub prompt_tokens: Option<Arc<[TokenId]>>,
    /// The numbers of tokens of the prompt and of this choice so far.
    pub usage: Usage,
    /// The durations of the choice's stages, in its last delta.
    pub times: Option<ChoiceTimes>,
    pub finish: Option<Finish>,
}

/// All choices of an answer.
pub struct Generated {
    pub choices: Vec<ChoiceDelta>,
    pub usage: Usage,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Finish {
    /// `stop` or `length`.
    pub reason: &'static str,
    pub stop_reason: Option<StopReason>,
}

/// The stop string or stop token of the caller that ended a choice.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Text(String),
    Token(TokenId),
}

/// The detokenizer reads this many tokens of the prompt's end before the output, so that the two texts join.
const PROMPT_TAIL_TOKENS: usize = 8;

impl Generation {
    /// Returns when the engine has accepted every choice, so that a refusal can still become the
    /// status of the response. Either all choices are accepted or none.
    // Long: all choices begin before one is awaited, so that they are accepted or refused together.
    // Arguments: the parts of a call that its endpoint keeps apart until here.
    pub async fn start(
        engine: &Arc<CallEngine>,
        generator: &dyn Generate,
        prompts: Vec<PromptTokens>,
        params: &GenerationParams,
        prompt_field: &'static str,
        name: &RequestName,
        mut timer: CallTimer,
    ) -> Result<Self, ApiError> {
        timer.handle_params(params.num_choices, params.stopping.max_tokens);
        timer.handle_submission(prompts.iter().map(|prompt| prompt.tokens.len()).sum());
        let mut choices = Vec::with_capacity(prompts.len() * params.num_choices as usize);
        for (at, prompt) in prompts.into_iter().enumerate() {
            let mut sampling = params.sampling.clone();
            if !params.has_own_seed {
                // All prompts share the call's default seed. Each choice of the call has its own number, so that the
                // draws differ.
                sampling.choice = at as u32 * params.num_choices;
            }
            let tail = prompt.tokens.len().saturating_sub(PROMPT_TAIL_TOKENS);
            let reply = prompt.reply.as_ref();
            let markers = reply.map_or_else(Vec::new, |reply| reply.format.markers());
            let text = |_| {
                let detokenizer = Detokenizer::new(
                    engine.served.tokenizer.clone(),
                    params.skip_special_tokens,
                    &prompt.tokens[tail..],
                )
                .keeping(&markers);
                let text = TextStream::with_detokenizer(
                    detokenizer,
                    params.stop.clone(),
                    params.include_stop,
                );
                ChoiceText {
                    stream: text.with_min_tokens(params.stopping.min_tokens),
                    reply: reply.map(ReplyParser::new),
                    beginning: prompt.echo.clone().unwrap_or_default(),
                    resumed: Resumed::default(),
                }
            };
            let scored = params.sampling.prompt_logprobs.and(prompt.tokens.first());
            let scored = scored.map(|&first| ScoredPrompt {
                first,
                others: Vec::new(),
            });
            let mut texts: Vec<_> = (0..params.num_choices).map(text).collect();
            // A resumed answer has one choice.
            if let [text] = &mut texts[..] {
                text.resume(&params.drawn)?;
            }
            let returned = params.returns_token_ids;
            let returned = returned.then(|| Arc::<[TokenId]>::from(&prompt.tokens[..]));
            let key = timer.key();
            let mut watch = PromptWatch::new(&engine.prompts, key, params, &prompt.tokens);
            watch.resume(&params.drawn);
            let mut watch = Some(watch);
            let streams = generator
                .submit(Submission {
                    output: params.drawn.clone(),
                    sampling,
                    num_choices: params.num_choices,
                    stopping: params.stopping.clone(),
                    priority: params.priority,
                    objectives: params.objectives,
                    namespace: params.namespace.clone(),
                    retentions: prompt.retentions.clone(),
                    constraint: params.constraint.clone(),
                    adapter: params.adapter.clone(),
                    trace_id: Some(name.to_shared()),
                    trace: timer.trace().cloned(),
                    ..Submission::new(prompt.tokens, 0)
                })
                .map_err(|error| submit_error(error, prompt_field))?;
            for (stream, text) in streams.into_iter().zip(texts) {
                let mut choice = Choice::new(
                    choices.len(),
                    stream,
                    text,
                    params,
                    scored.clone(),
                    returned.clone(),
                );
                choice.watch = watch.take();
                choice.retentions.clone_from(&prompt.retentions);
                choices.push(choice);
            }
        }
        let mut generation = Self {
            engine: engine.clone(),
            // A refused call has not begun, so it does not count as aborted.
            num_unfinished: 0,
            choices_per_prompt: params.num_choices as usize,
            num_best: params.num_best as usize,
            choices,
            next: 0,
            timer,
        };
        for choice in &mut generation.choices {
            std::future::poll_fn(|cx| match engine.is_cutting_off() {
                true => Poll::Ready(Err(ApiError::cut_off())),
                false => choice.poll_accepted(cx, prompt_field),
            })
            .await?;
        }
        generation.num_unfinished = generation.choices.len();
        Ok(generation)
    }

    /// Returns `None` when every choice has finished. Nothing follows an error.
    pub fn poll_delta(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ChoiceDelta, ApiError>>> {
        if self.num_unfinished == 0 {
            return Poll::Ready(None);
        }
        if self.engine.is_cutting_off() {
            return Poll::Ready(Some(Err(self.fail(ApiError::cut_off()))));
        }
        let num_choices = self.choices.len();
        for _ in 0..num_choices {
            let choice = &mut self.choices[self.next];
            self.next = (self.next + 1) % num_choices;
            match choice.poll_delta(cx, &mut self.timer) {
                Poll::Pending => {}
                Poll::Ready(Ok(mut delta)) => {
                    if let Some(finish) = &delta.finish {
                        delta.times = self.timer.times(delta.index);
                        choice.explain(&self.engine, &mut delta.usage);
                        self.num_unfinished -= 1;
                        self.timer.handle_finish(delta.index, finish.reason);
                    }
                    if self.num_unfinished == 0 {
                        self.timer.handle_end();
                    }
                    return Poll::Ready(Some(Ok(delta)));
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Some(Err(self.fail(error)))),
            }
        }
        Poll::Pending
    }

    /// Aborts the running choices.
    fn fail(&mut self, error: ApiError) -> ApiError {
        self.timer.handle_failure(self.num_unfinished, &error);
        self.num_unfinished = 0;
        self.choices.clear();
        error
    }

    /// Waits for the end and returns the choices of the answer as one delta each, in order.
    pub async fn collect(&mut self) -> Result<Generated, ApiError> {
        let mut finished: Vec<_> = (0..self.choices.len())
            .map(|index| ChoiceDelta {
                index,
                ..ChoiceDelta::default()
            })
            .collect();
        while let Some(delta) = std::future::poll_fn(|cx| self.poll_delta(cx)).await {
            let delta = delta?;
            let choice = &mut finished[delta.index];
            choice.text.push_str(&delta.text);
            choice.has_called |= delta.has_called;
            for part in delta.parts {
                part.append_to(&mut choice.parts);
            }
            choice.logprobs.extend(delta.logprobs);
            choice.prompt = choice.prompt.take().or(delta.prompt);
            choice.tokens.extend(delta.tokens);
            choice.prompt_tokens = choice.prompt_tokens.take().or(delta.prompt_tokens);
            choice.usage = delta.usage;
            choice.times = delta.times;
            choice.finish = delta.finish;
        }
        if self.num_best < self.choices_per_prompt {
            finished = self.best(finished);
        }
        Ok(Generated {
            choices: finished,
            usage: self.usage(),
        })
    }

    /// Keeps the best choices of each prompt, the best one first: the ones with the highest mean log-probability per
    /// token, which is OpenAI's definition of `best_of`. (vLLM, before it dropped the field, compared sums, which
    /// favour short choices.)
    fn best(&self, choices: Vec<ChoiceDelta>) -> Vec<ChoiceDelta> {
        let mut best = Vec::with_capacity(choices.len());
        let mut choices = choices.into_iter();
        while best.len() < self.choices.len() / self.choices_per_prompt * self.num_best {
            let mut of_prompt: Vec<_> = choices.by_ref().take(self.choices_per_prompt).collect();
            let mean = |choice: &ChoiceDelta| self.choices[choice.index].mean_logprob();
            // The sort is stable, so equal choices keep their order.
            of_prompt.sort_by(|a, b| mean(b).total_cmp(&mean(a)));
            best.extend(of_prompt.into_iter().take(self.num_best));
        }
        for (index, choice) in best.iter_mut().enumerate() {
            choice.index = index;
        }
        best
    }

    /// A prompt's tokens count once for all of its choices. The tokens of choices outside the answer count, too, as in
    /// OpenAI's API.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage::default();
        for prompt in self.choices.chunks(self.choices_per_prompt) {
            usage.prompt_tokens += u64::from(prompt[0].num_prompt_tokens);
            usage.cache_creation.add(prompt[0].cache_creation());
            let details = &mut usage.prompt_tokens_details;
            details.cached_tokens += u64::from(prompt[0].cache_use.num_cached_tokens);
            let by_medium = &mut details.cached_tokens_by_medium;
            by_medium.add(prompt[0].cached_by_medium());
            for choice in prompt {
                usage.completion_tokens += u64::from(choice.num_output_tokens);
                usage.set_resumed(choice.resumed.num_tokens);
                if let Some(num_tokens) = choice.num_reasoning_tokens() {
                    let details = usage.completion_tokens_details.get_or_insert_default();
                    details.reasoning_tokens += u64::from(num_tokens);
                }
            }
        }
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens;
        let first = self.choices.first();
        usage.prefix_cache = first.and_then(|choice| choice.explanation(&self.engine));
        usage
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        if self.num_unfinished > 0 {
            self.timer.handle_abort(self.num_unfinished);
        }
    }
}

struct Choice {
    /// `None` when the choice has finished.
    stream: Option<TokenStream>,
    /// Only the first choice of a prompt has a watch.
    watch: Option<PromptWatch>,
    text: TextStream,
    reply: Option<ReplyParser>,
    stop: Vec<String>,
    wants_logprobs: bool,
    /// Sum and number of the log-probabilities of all drawn tokens, including the end token.
    logprob_sum: f64,
    num_logprobs: u32,
    returns_token_ids: bool,
    each_token: bool,
    /// The next delta, which collects output until it is returned.
    next: ChoiceDelta,
    num_prompt_tokens: u32,
    cache_use: CacheUse,
    /// The beginnings of the prompt that the cache retains.
    retentions: Vec<Retention>,
    /// The number of tokens that this server has drawn.
    num_output_tokens: u32,
    resumed: Resumed,
}

/// The part of a resumed answer that another server has drawn.
#[derive(Clone, Copy, Default)]
struct Resumed {
    num_tokens: u32,
    num_reasoning_tokens: u32,
    has_called: bool,
}

/// Converts a choice's tokens to text or to the parts of a reply.
struct ChoiceText {
    stream: TextStream,
    reply: Option<ReplyParser>,
    /// The prompt's text, if the answer echoes it.
    beginning: String,
    resumed: Resumed,
}

impl ChoiceText {
    /// Reads the answer's tokens that another server has drawn. The caller has their text, except for an end that may
    /// begin a stop string or markup.
    fn resume(&mut self, drawn: &[TokenId]) -> Result<(), ApiError> {
        for (at, &token) in drawn.iter().enumerate() {
            let delta = self.stream.push(token);
            if delta.stopped.is_some() {
                return Err(resumed_answer::ends_answer(at));
            }
            if let Some(reply) = &mut self.reply {
                let parts = reply.push_token(&delta.text);
                let is_call = |part: &ReplyPart| matches!(part, ReplyPart::CallStart { .. });
                self.resumed.has_called |= parts.iter().any(is_call);
            }
        }
        let reply = self.reply.as_ref();
        self.resumed.num_tokens = drawn.len() as u32;
        self.resumed.num_reasoning_tokens = reply.map_or(0, ReplyParser::num_reasoning_tokens);
        Ok(())
    }
}

impl Choice {
    fn new(
        index: usize,
        stream: TokenStream,
        text: ChoiceText,
        params: &GenerationParams,
        prompt: Option<ScoredPrompt>,
        prompt_tokens: Option<Arc<[TokenId]>>,
    ) -> Self {
        Self {
            stream: Some(stream),
            watch: None,
            text: text.stream,
            reply: text.reply,
            stop: params.stop.clone(),
            wants_logprobs: params.wants_logprobs,
            logprob_sum: 0.0,
            num_logprobs: 0,
            returns_token_ids: params.returns_token_ids,
            each_token: params.each_token,
            next: ChoiceDelta {
                index,
                text: text.beginning,
                has_called: text.resumed.has_called,
                prompt,
                prompt_tokens,
                ..ChoiceDelta::default()
            },
            num_prompt_tokens: 0,
            cache_use: CacheUse::default(),
            retentions: Vec::new(),
            num_output_tokens: 0,
            resumed: text.resumed,
        }
    }

    fn poll_accepted(
        &mut self,
        cx: &mut Context<'_>,
        prompt_field: &str,
    ) -> Poll<Result<(), ApiError>> {
        let Some(stream) = &mut self.stream else {
            return Poll::Ready(Err(ended_early()));
        };
        stream.poll_next(cx).map(|event| match event {
            Some(StreamEvent::Accepted) => Ok(()),
            Some(StreamEvent::Refused(error)) => Err(ApiError::admission(&error, prompt_field)),
            Some(StreamEvent::Output(output)) => match output.finish {
                Some(FinishReason::Error(error)) => Err(ApiError::request(&error)),
                _ => Err(ended_early()),
            },
            None => Err(ended_early()),
        })
    }

    fn poll_delta(
        &mut self,
        cx: &mut Context<'_>,
        timer: &mut CallTimer,
    ) -> Poll<Result<ChoiceDelta, ApiError>> {
        while let Some(stream) = &mut self.stream {
            let Poll::Ready(event) = stream.poll_next(cx) else {
                return Poll::Pending;
            };
            let Some(StreamEvent::Output(mut output)) = event else {
                return Poll::Ready(Err(ended_early()));
            };
            // The cache may also have tokens of a resumed answer. They are no part of the prompt.
            let num_cached = &mut output.cache_use.num_cached_tokens;
            *num_cached = output.num_prompt_tokens.min(*num_cached);
            timer.handle_output(self.next.index, &output);
            if let Some(watch) = &mut self.watch {
                watch.handle_output(&output, timer);
            }
            match self.handle_output(output) {
                Ok(None) => {}
                Ok(Some(delta)) => return Poll::Ready(Ok(delta)),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Pending
    }

    fn num_reasoning_tokens(&self) -> Option<u32> {
        let reply = self.reply.as_ref()?;
        Some(reply.num_reasoning_tokens() - self.resumed.num_reasoning_tokens)
    }

    fn cached_by_medium(&self) -> CachedTokens {
        CachedTokens::new(self.cache_use)
    }

    fn explanation(&self, engine: &CallEngine) -> Option<Arc<CacheExplanation>> {
        let explanation = self.watch.as_ref()?.explanation(&engine.served.tokenizer)?;
        Some(Arc::new(explanation))
    }

    fn cache_creation(&self) -> CacheCreation {
        CacheCreation::new(self.cache_use, &self.retentions)
    }

    /// Completes the usage of a finished choice.
    fn explain(&self, engine: &CallEngine, usage: &mut Usage) {
        usage.prompt_tokens_details.cached_tokens_by_medium = self.cached_by_medium();
        usage.prefix_cache = self.explanation(engine);
    }

    fn mean_logprob(&self) -> f64 {
        self.logprob_sum / f64::from(self.num_logprobs.max(1))
    }

    // Long: text, log-probabilities and the end of an output depend on each other.
    fn handle_output(&mut self, output: RequestOutput) -> Result<Option<ChoiceDelta>, ApiError> {
        self.num_prompt_tokens = output.num_prompt_tokens;
        self.cache_use = output.cache_use;
        let num_output_tokens = output.num_output_tokens;
        self.num_output_tokens = num_output_tokens.saturating_sub(self.resumed.num_tokens);
        if let Some(prompt) = &mut self.next.prompt {
            prompt.others.extend(output.prompt_logprobs);
        }
        if output.sample.is_none() && output.finish.is_none() {
            return Ok(None);
        }
        let mut finish = match output.finish {
            None => None,
            Some(FinishReason::EndToken) => Some(Finish {
                reason: "stop",
                stop_reason: None,
            }),
            Some(FinishReason::StopToken) => Some(Finish {
                reason: "stop",
                stop_reason: output
                    .sample
                    .as_ref()
                    .map(|sample| StopReason::Token(sample.token)),
            }),
            Some(FinishReason::Length) => Some(Finish {
                reason: "length",
                stop_reason: None,
            }),
            Some(FinishReason::Aborted) => {
                return Err(ApiError::engine("The server has aborted the request."));
            }
            Some(FinishReason::Error(error)) => return Err(ApiError::request(&error)),
        };
        let logprobs = output
            .sample
            .iter()
            .filter_map(|sample| sample.logprobs.as_ref());
        for logprobs in logprobs {
            self.logprob_sum += f64::from(logprobs.token);
            self.num_logprobs += 1;
        }
        if self.returns_token_ids {
            let drawn = output.sample.iter().map(|sample| sample.token);
            self.next.tokens.extend(drawn);
        }
        // The end token or stop token itself is not part of the text.
        let ended_by_token = finish
            .as_ref()
            .is_some_and(|finish| finish.reason == "stop");
        let mut has_token = false;
        if let Some(sample) = output.sample {
            if !ended_by_token {
                has_token = true;
                let delta = self.text.push(sample.token);
                self.next.text.push_str(&delta.text);
            }
            if let Some(logprobs) = sample.logprobs
                && self.wants_logprobs
                && (has_token || self.each_token)
            {
                self.next.logprobs.push((sample.token, logprobs));
            }
        }
        if finish.is_some() {
            let rest = self.text.finish();
            self.next.text.push_str(&rest);
        }
        if let Some(stop) = self.text.stopped() {
            finish = Some(Finish {
                reason: "stop",
                stop_reason: Some(StopReason::Text(self.stop[stop].clone())),
            });
        }
        if finish.is_some() {
            self.stream = None;
        }
        if let Some(reply) = &mut self.reply {
            let text = std::mem::take(&mut self.next.text);
            self.next.parts = match has_token {
                true => reply.push_token(&text),
                false => reply.push(&text),
            };
            if let Some(finish) = &finish {
                for part in reply.finish(finish.reason == "length") {
                    part.append_to(&mut self.next.parts);
                }
            }
        }
        let has_text = !self.next.text.is_empty() || !self.next.parts.is_empty();
        if finish.is_none() && !has_text && !self.each_token {
            return Ok(None);
        }
        let after = ChoiceDelta {
            index: self.next.index,
            ..ChoiceDelta::default()
        };
        let mut usage = Usage::new(
            self.num_prompt_tokens,
            self.cache_use.num_cached_tokens,
            self.num_output_tokens,
            self.num_reasoning_tokens(),
        );
        usage.set_resumed(self.resumed.num_tokens);
        usage.cache_creation = self.cache_creation();
        Ok(Some(ChoiceDelta {
            usage,
            finish,
            ..std::mem::replace(&mut self.next, after)
        }))
    }
}

pub fn submit_error(error: SubmitError, prompt_field: &str) -> ApiError {
    match error {
        SubmitError::Draining => ApiError::draining(),
        SubmitError::Lost(reason) => ApiError::not_ready(&reason),
        SubmitError::Refused(error) => ApiError::admission(&error, prompt_field),
    }
}

pub fn ended_early() -> ApiError {
    ApiError::request(&RequestError::from("the engine ended the stream early"))
}

#[cfg(test)]
mod tests;
