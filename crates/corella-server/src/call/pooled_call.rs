//! A call for the hidden states of prompts. It submits a limited number of prompts at a time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use corella_core::{AdmissionError, FinishReason, HiddenState, RequestOutput, SamplingParams};
use corella_engine::{StreamEvent, Submission, SubmitError, TokenStream};
use serde::Serialize;

use crate::call::call_context::CallContext;
use crate::call::call_engine::CallEngine;
use crate::call::generation::{ended_early, submit_error};
use crate::call::metrics::CallTimer;
use crate::text::pooled_prompt::{PooledPrompt, PoolingParams};
use crate::wire::api_error::ApiError;

/// The cost of a call's prompts. A prompt used several times counts once.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PoolingUsage {
    pub prompt_tokens: u64,
    pub total_tokens: u64,
}

/// A call's prompts, checked and tokenised.
pub struct PooledTexts<F> {
    pub prompts: Vec<PooledPrompt>,
    /// The field with most of the prompts, named in errors.
    pub field: &'static str,
    pub params: PoolingParams,
    pub model: String,
    /// The endpoint's data for its answer.
    pub format: F,
}

/// The hidden states of a call's prompts, in their order.
pub struct PooledStates<F> {
    pub states: Vec<HiddenState>,
    pub usage: PoolingUsage,
    pub model: String,
    pub format: F,
}

/// Computes the hidden states of prompts. At most `max_num_choices` of them are in the engine at a time, so that a long
/// call leaves room in the queue. While the queue is full, a call with prompts in the engine waits for one of them;
/// only a call without prompts in the engine is refused. The caller's API key pays only for computed prompts.
pub async fn pool<F>(
    engine: &Arc<CallEngine>,
    context: &CallContext,
    texts: PooledTexts<F>,
    mut timer: CallTimer,
) -> Result<PooledStates<F>, ApiError> {
    let PooledTexts {
        prompts,
        field,
        mut params,
        model,
        format,
    } = texts;
    context.check_model(&engine.served.config, &model)?;
    timer.handle_model(&model);
    let adapter = engine.served.adapters.get(&model);
    params.adapter = adapter.map(|adapter| adapter.loaded);
    if params.adapter.is_some() {
        timer.count_adapter(engine.served.adapters.uses().begin(&model));
    }
    let account = context.account.as_ref();
    if let Some(priority) = context.priority() {
        params.priority = priority;
    }
    let num_tokens: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    if let Some(account) = account {
        account.take_prompt(num_tokens, field)?;
    }
    timer.handle_submission(num_tokens);
    let num_prompts = prompts.len();
    let mut call = PooledCall {
        engine: engine.clone(),
        params,
        trace_id: context.name.to_shared(),
        waiting: prompts.into_iter().enumerate().collect(),
        running: Vec::new(),
        max_num_running: engine.served.config.max_num_choices.max(1) as usize,
        states: vec![None; num_prompts],
        usage: PoolingUsage::default(),
        timer,
    };
    if context.is_only_check {
        return Err(call.check());
    }
    let result = poll_fn(|cx| call.poll(cx)).await;
    if let Err(error) = &result {
        call.timer.handle_failure(call.running.len(), error);
        call.running.clear();
        if let Some(account) = account {
            account.give_back_prompt(num_tokens - call.usage.prompt_tokens as usize);
        }
    }
    result?;
    call.timer.handle_end();
    Ok(PooledStates {
        states: std::mem::take(&mut call.states)
            .into_iter()
            .flatten()
            .collect(),
        usage: call.usage,
        model,
        format,
    })
}

struct PooledCall {
    engine: Arc<CallEngine>,
    params: PoolingParams,
    trace_id: Arc<str>,
    /// Prompts that are not in the engine, with their indices.
    waiting: VecDeque<(usize, PooledPrompt)>,
    running: Vec<Running>,
    max_num_running: usize,
    states: Vec<Option<HiddenState>>,
    usage: PoolingUsage,
    timer: CallTimer,
}

/// A prompt in the engine. The prompt's tokens are kept, because the engine may refuse the prompt temporarily.
struct Running {
    index: usize,
    prompt: PooledPrompt,
    stream: TokenStream,
    /// Whether no other prompt of its call was in the engine or was submitted with it. Only then does a full queue mean
    /// that this call has no room: otherwise its own prompts may have filled the queue.
    is_alone: bool,
}

/// The progress of a prompt in the engine.
enum Progress {
    Pending,
    Refused,
    Ended,
}

impl PooledCall {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ApiError>> {
        loop {
            if self.engine.is_cutting_off() {
                return Poll::Ready(Err(ApiError::cut_off()));
            }
            self.submit()?;
            if self.running.is_empty() {
                return Poll::Ready(Ok(()));
            }
            let num_running = self.running.len();
            let mut num_refused = 0;
            let mut at = 0;
            while at < self.running.len() {
                match self.poll_one(at, cx)? {
                    Progress::Pending => at += 1,
                    Progress::Ended => drop(self.running.swap_remove(at)),
                    Progress::Refused => {
                        let refused = self.running.swap_remove(at);
                        self.waiting.push_front((refused.index, refused.prompt));
                        num_refused += 1;
                    }
                }
            }
            if self.running.len() == num_running {
                return Poll::Pending;
            }
            if num_refused > 0 {
                self.max_num_running = (num_running - num_refused).max(1);
            }
        }
    }

    /// Checks all prompts, and computes none.
    fn check(&self) -> ApiError {
        let check = |(_, prompt): &(usize, PooledPrompt)| {
            let checked = self.engine.generator.check(self.submission(prompt));
            checked.map_err(|error| submit_error(error, &prompt.field))
        };
        let checked = self.waiting.iter().try_for_each(check);
        checked.err().unwrap_or_else(ApiError::only_checked)
    }

    /// Submits prompts as long as the queue has room.
    fn submit(&mut self) -> Result<(), ApiError> {
        let num_running = self.running.len();
        while self.running.len() < self.max_num_running
            && let Some((index, prompt)) = self.waiting.pop_front()
        {
            match self.engine.generator.submit(self.submission(&prompt)) {
                Ok(mut streams) => self.running.push(Running {
                    index,
                    prompt,
                    stream: streams.pop().ok_or_else(ended_early)?,
                    is_alone: false,
                }),
                Err(SubmitError::Refused(error)) if is_full(&error) && !self.running.is_empty() => {
                    self.waiting.push_front((index, prompt));
                    self.max_num_running = self.running.len();
                }
                Err(error) => return Err(submit_error(error, &prompt.field)),
            }
        }
        if num_running == 0
            && let [alone] = &mut self.running[..]
        {
            alone.is_alone = true;
        }
        Ok(())
    }

    fn submission(&self, prompt: &PooledPrompt) -> Submission {
        let params = &self.params;
        Submission {
            sampling: SamplingParams {
                pooling: Some(params.pooling),
                second_text: prompt.second_text,
                ..SamplingParams::GREEDY
            },
            priority: params.priority,
            namespace: params.namespace.clone(),
            adapter: params.adapter.clone(),
            trace_id: Some(self.trace_id.clone()),
            trace: self.timer.trace().cloned(),
            ..Submission::new(prompt.tokens.clone(), 0)
        }
    }

    /// Reads the available events of one prompt.
    fn poll_one(&mut self, at: usize, cx: &mut Context<'_>) -> Result<Progress, ApiError> {
        let running = &mut self.running[at];
        while let Poll::Ready(event) = running.stream.poll_next(cx) {
            let output = match event {
                Some(StreamEvent::Accepted) => continue,
                Some(StreamEvent::Refused(error)) if is_full(&error) && !running.is_alone => {
                    return Ok(Progress::Refused);
                }
                Some(StreamEvent::Refused(error)) => {
                    return Err(ApiError::admission(&error, &running.prompt.field));
                }
                Some(StreamEvent::Output(output)) => output,
                None => return Err(ended_early()),
            };
            self.timer.handle_output(running.index, &output);
            let RequestOutput {
                hidden_state,
                finish,
                num_prompt_tokens,
                ..
            } = output;
            if hidden_state.is_some() {
                self.states[running.index] = hidden_state;
            }
            match finish {
                None => {}
                Some(FinishReason::Length) if self.states[running.index].is_some() => {
                    self.timer.handle_finish(running.index, "pooled");
                    self.usage.prompt_tokens += u64::from(num_prompt_tokens);
                    self.usage.total_tokens += u64::from(num_prompt_tokens);
                    return Ok(Progress::Ended);
                }
                Some(FinishReason::Error(error)) => return Err(ApiError::request(&error)),
                Some(FinishReason::Aborted) => {
                    return Err(ApiError::engine("The server has aborted the request."));
                }
                Some(_) => return Err(ended_early()),
            }
        }
        Ok(Progress::Pending)
    }
}

/// If the client leaves, the call and its streams are dropped, which aborts their requests.
impl Drop for PooledCall {
    fn drop(&mut self) {
        if !self.running.is_empty() {
            self.timer.handle_abort(self.running.len());
        }
    }
}

/// Returns whether a request is refused only temporarily.
fn is_full(error: &AdmissionError) -> bool {
    matches!(
        error,
        AdmissionError::QueueFull { .. } | AdmissionError::QueuedTokensFull { .. }
    )
}
