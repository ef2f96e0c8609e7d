//! A call for hidden states of prompts, which submits a bounded number at a time.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use corella_core::{
    AdmissionError, FinishReason, HiddenState, Namespace, Pooling, RequestOutput, SamplingParams,
    StoppingCriteria, TokenId,
};
use corella_engine::{LoadedAdapter, StreamEvent, Submission, SubmitError, TokenStream};
use corella_text::ChatInput;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::auth::CallContext;
use crate::generation::{ended_early, submit_error};
use crate::metrics::CallTimer;
use crate::prompt::{Prompt, PromptField};
use crate::sampling_fields::{check_cache_salt, check_num_tokens, check_token_ids};
use crate::serve_config::ServeConfig;
use crate::server_state::ServerState;
use crate::text_thread::Caller;

/// Limits the prompts of one call, as OpenAI does.
pub const MAX_NUM_PROMPTS: usize = 2048;

/// The fields that all endpoints of this kind share.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct PoolingFields {
    pub model: Option<String>,
    pooling: Option<PoolingField>,
    pub add_special_tokens: Option<bool>,
    priority: Option<i32>,
    cache_salt: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PoolingField {
    Last,
    Mean,
    Cls,
    Max,
}

impl PoolingFields {
    pub fn params(&self, config: &ServeConfig) -> Result<PoolingParams, ApiError> {
        Ok(PoolingParams {
            pooling: match self.pooling {
                None => config.default_pooling(),
                Some(PoolingField::Last) => Pooling::LastToken,
                Some(PoolingField::Mean) => Pooling::Mean,
                Some(PoolingField::Cls | PoolingField::Max) if !config.is_encoder => {
                    let message = "cls and max are for encoders; this model reads from left to \
                                   right, so use last or mean";
                    return Err(ApiError::invalid("pooling", message));
                }
                Some(PoolingField::Cls) => Pooling::FirstToken,
                Some(PoolingField::Max) => Pooling::Max,
            },
            priority: self.priority.unwrap_or(0),
            namespace: Namespace {
                cache_salt: check_cache_salt(self.cache_salt.as_deref())?,
                ..Namespace::default()
            },
            adapter: None,
        })
    }
}

/// How a call's prompts are computed.
pub struct PoolingParams {
    pub pooling: Pooling,
    pub priority: i32,
    pub namespace: Namespace,
    pub adapter: Option<Arc<LoadedAdapter>>,
}

/// A tokenised prompt.
pub struct PooledPrompt {
    pub tokens: Vec<TokenId>,
    /// The start of its second text, if it has two and the tokenizer tells them apart.
    pub second_text: Option<u32>,
    /// The caller's field with the prompt, named in errors.
    field: String,
}

/// How texts become tokens.
#[derive(Clone, Copy)]
pub struct TextForm<'a> {
    pub add_special_tokens: Option<bool>,
    /// The text before each input. Prompts of tokens stay unchanged.
    pub prefix: &'a str,
}

/// Checks and tokenises the prompts of a field.
pub fn pooled_prompts(
    state: &ServerState,
    field: &str,
    PromptField(prompts): PromptField,
    form: TextForm<'_>,
    caller: &Caller,
) -> Result<Vec<PooledPrompt>, ApiError> {
    let num_prompts = prompts.len();
    check_num_prompts(field, num_prompts)?;
    let add_special_tokens = form.add_special_tokens.unwrap_or(true);
    let prompts = prompts.into_iter().enumerate().map(|(index, prompt)| {
        let field = name_of(field, index, num_prompts);
        let tokens = match prompt {
            Prompt::Text(text) if form.prefix.is_empty() => {
                state.encode(&field, &text, add_special_tokens, caller)?
            }
            Prompt::Text(text) => {
                let text = [form.prefix, &text].concat();
                state.encode(&field, &text, add_special_tokens, caller)?
            }
            Prompt::Tokens(tokens) => {
                check_num_tokens(&field, tokens.len(), &state.config)?;
                check_token_ids(&field, &tokens, state.config.vocab_size)?;
                tokens
            }
        };
        Ok(PooledPrompt {
            tokens,
            second_text: None,
            field,
        })
    });
    prompts.collect()
}

/// Tokenises pairs of texts for a model that reads both at once; `field` has the second ones.
pub fn paired_prompts(
    state: &ServerState,
    field: &str,
    pairs: &[(&str, &str)],
    add_special_tokens: Option<bool>,
    caller: &Caller,
) -> Result<Vec<PooledPrompt>, ApiError> {
    check_num_prompts(field, pairs.len())?;
    let add_special_tokens = add_special_tokens.unwrap_or(true);
    let prompts = pairs.iter().enumerate().map(|(index, &pair)| {
        let field = name_of(field, index, pairs.len());
        if !state.config.is_encoder {
            let text = pair_text(state, &field, pair, caller)?;
            return Ok(PooledPrompt {
                // The template has written the special tokens.
                tokens: state.encode(&field, &text, false, caller)?,
                second_text: None,
                field,
            });
        }
        let encoded = state.encode_pair(&field, pair, add_special_tokens, caller)?;
        Ok(PooledPrompt {
            tokens: encoded.tokens,
            second_text: encoded.second_text,
            field,
        })
    });
    prompts.collect()
}

/// Renders a pair of texts for a decoder that reranks: a conversation of a query and a document, after the model's
/// instruction.
fn pair_text(
    state: &ServerState,
    field: &str,
    (first, second): (&str, &str),
    caller: &Caller,
) -> Result<String, ApiError> {
    let Some(template) = &state.text.chat_template else {
        return Err(ApiError::no_pairs(state.config.model_name()));
    };
    let sentence = &state.config.sentence;
    let instruction = sentence.default_prompt.as_ref();
    let instruction = instruction.and_then(|name| sentence.prompts.get(name));
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let mut messages: Vec<Value> = { instruction.into_iter() }
        .map(|text| message("system", text))
        .collect();
    messages.extend([message("query", first), message("document", second)]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: sentence.adds_generation_prompt,
        continue_final_message: false,
        kwargs: None,
    };
    let is_abandoned = || caller.has_left();
    let text = template.render_within(input, state.render_limit(&is_abandoned));
    text.map_err(|error| ApiError::invalid(field, error.to_string()))
}

fn check_num_prompts(field: &str, num_prompts: usize) -> Result<(), ApiError> {
    match num_prompts > MAX_NUM_PROMPTS {
        false => Ok(()),
        true => Err(ApiError::invalid(
            field,
            format!("{num_prompts} inputs are more than {MAX_NUM_PROMPTS}, the most of a call"),
        )),
    }
}

/// Names one of the prompts of a field.
fn name_of(field: &str, index: usize, num_prompts: usize) -> String {
    match num_prompts {
        1 => field.to_owned(),
        _ => format!("{field}[{index}]"),
    }
}

/// The cost of a call's prompts. A prompt used several times counts once.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct PoolingUsage {
    pub prompt_tokens: u64,
    pub total_tokens: u64,
}

/// The hidden states of a call's prompts, in their order.
pub struct PooledStates {
    pub states: Vec<HiddenState>,
    pub usage: PoolingUsage,
}

/// Computes the hidden states of prompts; `field` has most of them and is named in errors. At most `max_num_choices` of
/// them are in the engine at a time, so that a long call leaves room in the queue. While the queue is full, a call with
/// prompts in the engine waits for one of them; only a call without any is refused. A key pays for the computed
/// prompts.
pub async fn pool(
    state: &Arc<ServerState>,
    context: &CallContext,
    (prompts, field): (Vec<PooledPrompt>, &'static str),
    model: &str,
    mut params: PoolingParams,
    mut timer: CallTimer,
) -> Result<PooledStates, ApiError> {
    context.check_model(state, model)?;
    timer.handle_model(model);
    params.adapter = { state.adapters.get(model) }.map(|adapter| adapter.loaded);
    if params.adapter.is_some() {
        timer.count_adapter(state.adapters.uses().begin(model));
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
        state: state.clone(),
        params,
        trace_id: context.name.to_shared(),
        waiting: prompts.into_iter().enumerate().collect(),
        running: Vec::new(),
        max_num_running: state.config.max_num_choices.max(1) as usize,
        states: vec![None; num_prompts],
        usage: PoolingUsage::default(),
        timer,
    };
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
    })
}

struct PooledCall {
    state: Arc<ServerState>,
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

/// A prompt in the engine. It is kept, because the engine may refuse it temporarily.
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
            if self.state.is_cutting_off() {
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

    /// Submits prompts as long as the queue has room.
    fn submit(&mut self) -> Result<(), ApiError> {
        let num_running = self.running.len();
        while self.running.len() < self.max_num_running
            && let Some((index, prompt)) = self.waiting.pop_front()
        {
            match self.state.generator.submit(self.submission(&prompt)) {
                Ok(mut streams) => self.running.push(Running {
                    index,
                    prompt,
                    stream: streams.pop().ok_or_else(ended_early)?,
                    is_alone: false,
                }),
                Err(SubmitError::QueueFull { .. }) if !self.running.is_empty() => {
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
            prompt: prompt.tokens.clone(),
            output: Vec::new(),
            exports_kv: false,
            sampling: SamplingParams {
                pooling: Some(params.pooling),
                second_text: prompt.second_text,
                ..SamplingParams::GREEDY
            },
            num_choices: 1,
            stopping: StoppingCriteria {
                max_tokens: Some(0),
                ..StoppingCriteria::default()
            },
            priority: params.priority,
            objectives: Default::default(),
            namespace: params.namespace.clone(),
            constraint: None,
            adapter: params.adapter.clone(),
            trace_id: Some(self.trace_id.clone()),
            trace: self.timer.trace().cloned(),
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

/// A client that leaves drops the call, and with it the streams, which aborts their requests.
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
