//! The fields that all generating endpoints share: sampling, stopping and reporting.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use corella_core::{LatencyObjectives, Namespace, SamplingParams, StoppingCriteria, TokenId};
use corella_engine::{LoadedAdapter, TokenConstraint};
use serde::Deserialize;
use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserializer, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::config::serve_config::ServeConfig;
use crate::text::grammar_constraint::GrammarConstraint;
use crate::text::output_format::{OutputFormat, OutputFormatFields};
use crate::text::prompt_tokens::check_token_ids;
use crate::text::resumed_answer::{self, check_drawn};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::text::token_rule::TokenRuleFields;
use crate::wire::api_error::ApiError;
use crate::wire::field_limit::{
    MAX_CACHE_SALT_BYTES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MIN_P, PENALTY,
    REPETITION_PENALTY, TEMPERATURE, TOP_P,
};
use crate::wire::number_range::NumberRange;
use crate::wire::usage::Usage;

/// The fields as sent; `null` counts as absent.
#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct SamplingFields {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<u32>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<i64>,
    pub min_p: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub logit_bias: Option<BTreeMap<String, f64>>,
    pub allowed_token_ids: Option<Vec<TokenId>>,
    pub bad_words: Option<Vec<String>>,
    pub seed: Option<i64>,
    pub resume_token_ids: Option<Vec<TokenId>>,
    pub max_tokens: Option<u32>,
    pub max_completion_tokens: Option<u32>,
    pub min_tokens: Option<u32>,
    pub stop: Option<StopField>,
    pub stop_token_ids: Option<Vec<TokenId>>,
    pub include_stop_str_in_output: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub ignore_eos: Option<bool>,
    pub priority: Option<i32>,
    pub ttft_slo_ms: Option<u32>,
    pub tpot_slo_ms: Option<u32>,
    pub cache_salt: Option<String>,
    pub kv_transfer_params: Option<Map<String, Value>>,
    pub prompt_logprobs: Option<u32>,
    pub response_format: Option<Value>,
    pub structured_outputs: Option<Value>,
    pub guided_json: Option<Value>,
    pub guided_json_object: Option<bool>,
    pub guided_regex: Option<String>,
    pub guided_choice: Option<Vec<String>>,
    pub guided_grammar: Option<String>,
    pub return_token_ids: Option<bool>,
    pub return_tokens_as_token_ids: Option<bool>,
    pub return_metrics: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
pub struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

/// The chunks of a stream that have `usage`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamUsage {
    Never,
    /// An additional last chunk, for the whole call.
    Last,
    /// All chunks: the additional last one for the whole call, the others for their choice so far.
    Every,
}

impl StreamUsage {
    /// The field `usage` of a chunk whose choice has used `usage` so far. OpenAI sends `null` in all chunks but the
    /// last.
    pub fn of_choice(self, usage: &Usage) -> Option<Option<&Usage>> {
        match self {
            Self::Never => None,
            Self::Last => Some(None),
            Self::Every => Some(Some(usage)),
        }
    }
}

/// The field `stop`, which is a string or an array of strings.
#[derive(Debug)]
pub struct StopField(Vec<String>);

/// Values of the fields that each endpoint parses itself.
#[derive(Clone, Debug, Default)]
pub struct EndpointFields {
    /// `max_tokens` of a request without the field. With `None`, only the context limits the answer.
    pub default_max_tokens: Option<u32>,
    /// The number of alternatives to each token that have log-probabilities. It has been checked.
    pub logprobs: Option<u32>,
    pub best_of: Option<u32>,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// Tokens that end an answer besides the model's end tokens.
    pub more_end_token_ids: Vec<TokenId>,
}

/// The parameters of one API call for the engine, without the prompts.
#[derive(Clone, Debug)]
pub struct GenerationParams {
    /// The number of choices generated for each prompt.
    pub num_choices: u32,
    /// The number of choices in the answer for each prompt. These are the most likely ones of `num_choices`.
    pub num_best: u32,
    /// Whether log-probabilities are part of the answer. They are also computed to rank choices.
    pub wants_logprobs: bool,
    pub sampling: SamplingParams,
    /// Whether the request has a seed, so that equal prompts of one call get equal answers.
    pub has_own_seed: bool,
    pub stopping: StoppingCriteria,
    /// The first tokens of the answer, which another server has drawn.
    pub drawn: Vec<TokenId>,
    pub stop: Vec<String>,
    pub include_stop: bool,
    pub skip_special_tokens: bool,
    pub priority: i32,
    pub objectives: LatencyObjectives,
    pub namespace: Namespace,
    /// The adapter that the caller named instead of the model.
    pub adapter: Option<Arc<LoadedAdapter>>,
    pub stream: bool,
    pub stream_usage: StreamUsage,
    /// Whether the token ids of prompt and output are part of the answer.
    pub returns_token_ids: bool,
    /// Whether each token makes a delta, with text or without, so that token ids and log-probabilities leave with their
    /// token. The end token's log-probability is part of the answer, too.
    pub each_token: bool,
    /// Whether log-probabilities name tokens by their ids.
    pub tokens_as_ids: bool,
    /// Whether the times of each choice are part of the answer.
    pub returns_metrics: bool,
    /// Whether the answer explains the prompt's hits and misses in the prefix cache.
    pub explains_cache: bool,
    /// Another server reads these parameters; `kv_transfer.rs` passes them on.
    pub kv_transfer_params: Option<Map<String, Value>>,
    /// The number of alternatives in the answer's `prompt_logprobs`; `None` if the answer lacks the field.
    pub prompt_logprobs: Option<u32>,
    /// The format of every answer's text.
    pub output_format: Option<OutputFormat>,
    /// The format of every answer as the engine's constraint.
    pub constraint: Option<Arc<dyn TokenConstraint>>,
}

/// The lowest temperature above 0. Lower ones make a softmax in f32 greedy or NaN. vLLM raises them to the same value.
const MIN_TEMPERATURE: f32 = 0.01;

impl GenerationParams {
    /// Constrains every answer to the request's format, if it has one, from the first token on. Compiling a format may
    /// take a second, so text threads do it. Compiling stops if the caller leaves.
    pub fn set_text_constraint(
        &mut self,
        served: &ServedModel,
        caller: &Caller,
    ) -> Result<(), ApiError> {
        if let Some(format) = &self.output_format {
            let grammar = served.grammars(caller)?.compile(&format.source);
            let grammar = grammar.map_err(|error| format.error(&error))?;
            self.constraint = Some(Arc::new(GrammarConstraint(grammar)));
        }
        self.check_first_token(served)
    }
}

impl SamplingFields {
    /// Sets the stop strings, which the request has under another name.
    pub fn set_stop(&mut self, stop: Option<Vec<String>>) {
        self.stop = stop.map(StopField);
    }

    /// Sets the limit of tokens, which the request has under another name.
    pub fn set_max_tokens(&mut self, max_tokens: Option<u32>) {
        self.max_tokens = max_tokens;
    }

    /// Checks all fields. Formats are checked when the constraint is made.
    // Long: one check for each field.
    pub fn validate(
        mut self,
        served: &ServedModel,
        caller: &Caller,
        own: EndpointFields,
    ) -> Result<GenerationParams, ApiError> {
        let config = &served.config;
        let defaults = &config.generation_defaults;
        let num_best = self.n.unwrap_or(1);
        if num_best == 0 || num_best > config.max_num_choices {
            return Err(ApiError::invalid(
                "n",
                format!("must be between 1 and {}", config.max_num_choices),
            ));
        }
        let stream = self.stream.unwrap_or(false);
        let num_choices = own.best_of.unwrap_or(num_best);
        if num_choices < num_best || num_choices > config.max_num_choices {
            return Err(ApiError::invalid(
                "best_of",
                format!(
                    "must be between n, which is {num_best}, and {}",
                    config.max_num_choices
                ),
            ));
        }
        if stream && num_choices > num_best {
            return Err(ApiError::invalid(
                "best_of",
                "must not exceed n in a stream, since the best choices are known only at the end",
            ));
        }
        let prompt_logprobs = self.prompt_logprobs(config, stream)?;
        let may_draw_nothing = own.echo || prompt_logprobs.is_some();
        let mut stopping = self.stopping(config, own.default_max_tokens, may_draw_nothing)?;
        if self.ignore_eos != Some(true) {
            stopping.end_token_ids.extend(own.more_end_token_ids);
        }
        let drawn = self.drawn(may_draw_nothing)?;
        check_drawn(&drawn, num_choices, &stopping, config)?;
        let rules = TokenRuleFields {
            logit_bias: self.logit_bias.take(),
            allowed_token_ids: self.allowed_token_ids.take(),
            bad_words: self.bad_words.take(),
        };
        let mut sampling = SamplingParams {
            temperature: self.temperature(defaults.temperature)?,
            top_k: self.top_k(defaults.top_k)?,
            top_p: number("top_p", self.top_p, defaults.top_p, 1.0, TOP_P)?,
            min_p: number("min_p", self.min_p, defaults.min_p, 0.0, MIN_P)?,
            presence_penalty: penalty("presence_penalty", self.presence_penalty)?,
            frequency_penalty: penalty("frequency_penalty", self.frequency_penalty)?,
            repetition_penalty: number(
                "repetition_penalty",
                self.repetition_penalty,
                defaults.repetition_penalty,
                1.0,
                REPETITION_PENALTY,
            )?,
            seed: self.seed.map_or(caller.default_seed, |seed| seed as u64),
            choice: 0,
            logprobs: own.logprobs.or((num_choices > num_best).then_some(0)),
            rules: rules.checked(served, caller)?,
            prompt_logprobs: prompt_logprobs.max(own.logprobs.filter(|_| own.echo)),
            pooling: None,
            second_text: None,
        };
        if stopping.max_tokens == Some(0) {
            // The engine ends a request without a token only if the request has another output.
            sampling.prompt_logprobs = sampling.prompt_logprobs.or(Some(0));
        }
        if self.stream_options.is_some() && !stream {
            return Err(ApiError::invalid(
                "stream_options",
                "only allowed with stream = true",
            ));
        }
        let output_format = OutputFormatFields {
            response_format: self.response_format.take(),
            structured_outputs: self.structured_outputs.take(),
            guided_json: self.guided_json.take(),
            guided_json_object: self.guided_json_object,
            guided_regex: self.guided_regex.take(),
            guided_choice: self.guided_choice.take(),
            guided_grammar: self.guided_grammar.take(),
        };
        let output_format = output_format.checked()?;
        Ok(GenerationParams {
            num_choices,
            num_best,
            wants_logprobs: own.logprobs.is_some(),
            sampling,
            has_own_seed: self.seed.is_some(),
            stopping,
            drawn,
            include_stop: self.include_stop_str_in_output.unwrap_or(false),
            skip_special_tokens: self.skip_special_tokens.unwrap_or(true),
            priority: self.priority.unwrap_or(0),
            objectives: LatencyObjectives {
                ttft_us: objective_us("ttft_slo_ms", self.ttft_slo_ms)?,
                tpot_us: objective_us("tpot_slo_ms", self.tpot_slo_ms)?,
            },
            stream,
            stream_usage: stream_usage(self.stream_options.as_ref())?,
            returns_token_ids: self.return_token_ids.unwrap_or(false),
            each_token: false,
            tokens_as_ids: self.return_tokens_as_token_ids.unwrap_or(false),
            returns_metrics: self.return_metrics.unwrap_or(false),
            explains_cache: false,
            namespace: Namespace {
                cache_salt: check_cache_salt(self.cache_salt.as_deref())?,
                ..Namespace::default()
            },
            adapter: None,
            stop: match self.stop {
                None => defaults.stop.clone(),
                Some(stop) => stop_strings(stop)?,
            },
            kv_transfer_params: self.kv_transfer_params,
            prompt_logprobs,
            output_format,
            constraint: None,
        })
    }

    /// Returns the drawn tokens of the answer. A node that only computes the prompt does not need them.
    fn drawn(&mut self, answers_prompt: bool) -> Result<Vec<TokenId>, ApiError> {
        let drawn = self.resume_token_ids.take().unwrap_or_default();
        if drawn.is_empty() || self.is_first_of_two() {
            return Ok(Vec::new());
        }
        match answers_prompt {
            false => Ok(drawn),
            true => Err(ApiError::invalid(
                resumed_answer::FIELD,
                "is not available with echo or prompt_logprobs",
            )),
        }
    }

    fn prompt_logprobs(&self, config: &ServeConfig, stream: bool) -> Result<Option<u32>, ApiError> {
        let Some(num_logprobs) = self.prompt_logprobs else {
            return Ok(None);
        };
        if stream {
            let reason = "is not available with stream = true";
            return Err(ApiError::invalid("prompt_logprobs", reason));
        }
        check_logprobs("prompt_logprobs", num_logprobs, config).map(Some)
    }

    fn temperature(&self, default: Option<f32>) -> Result<f32, ApiError> {
        let temperature = number("temperature", self.temperature, default, 1.0, TEMPERATURE)?;
        Ok(if temperature == 0.0 {
            0.0
        } else {
            temperature.max(MIN_TEMPERATURE)
        })
    }

    /// Both −1 and 0 keep all tokens, as in vLLM.
    fn top_k(&self, default: Option<u32>) -> Result<u32, ApiError> {
        match self.top_k {
            None => Ok(default.unwrap_or(0)),
            Some(-1) => Ok(0),
            Some(top_k) => u32::try_from(top_k).map_err(|_| {
                ApiError::invalid(
                    "top_k",
                    "must be -1 or 0 (all tokens), or a positive number",
                )
            }),
        }
    }

    fn stopping(
        &self,
        config: &ServeConfig,
        default_max_tokens: Option<u32>,
        may_draw_nothing: bool,
    ) -> Result<StoppingCriteria, ApiError> {
        let (max_tokens_field, max_tokens) = match self.max_completion_tokens {
            Some(max_tokens) => ("max_completion_tokens", Some(max_tokens)),
            None => ("max_tokens", self.max_tokens.or(default_max_tokens)),
        };
        if max_tokens == Some(0) && !may_draw_nothing {
            return Err(ApiError::invalid(max_tokens_field, "must be at least 1"));
        }
        let mut min_tokens = self.min_tokens.unwrap_or(0);
        if self.is_first_of_two() {
            // A proxy has set `max_tokens` to 1 and left the rest of its client's request unchanged.
            min_tokens = min_tokens.min(max_tokens.unwrap_or(min_tokens));
        }
        if min_tokens > max_tokens.unwrap_or(config.max_model_len) {
            return Err(ApiError::invalid(
                "min_tokens",
                format!("must not exceed {max_tokens_field} or the model's context"),
            ));
        }
        let stop_token_ids = self.stop_token_ids.clone().unwrap_or_default();
        if stop_token_ids.len() > MAX_STOP_TOKEN_IDS {
            return Err(ApiError::invalid(
                "stop_token_ids",
                format!("at most {MAX_STOP_TOKEN_IDS} are allowed"),
            ));
        }
        check_token_ids("stop_token_ids", &stop_token_ids, config.vocab_size)?;
        Ok(StoppingCriteria {
            max_tokens,
            min_tokens,
            end_token_ids: if self.ignore_eos.unwrap_or(false) {
                Vec::new()
            } else {
                config.end_token_ids.clone()
            },
            stop_token_ids,
        })
    }

    /// Returns whether only the prompt is computed, because another server will answer.
    fn is_first_of_two(&self) -> bool {
        let params = self.kv_transfer_params.as_ref();
        params.is_some_and(|params| params.get("do_remote_decode") == Some(&Value::Bool(true)))
    }
}

pub fn check_cache_salt(salt: Option<&str>) -> Result<Option<Arc<str>>, ApiError> {
    match salt {
        Some(salt) if salt.is_empty() || salt.len() > MAX_CACHE_SALT_BYTES => {
            Err(ApiError::invalid(
                "cache_salt",
                format!("must have between 1 and {MAX_CACHE_SALT_BYTES} bytes"),
            ))
        }
        salt => Ok(salt.map(Into::into)),
    }
}

fn stream_usage(options: Option<&StreamOptions>) -> Result<StreamUsage, ApiError> {
    let is_set =
        |option: fn(&StreamOptions) -> Option<bool>| options.and_then(option) == Some(true);
    let in_last = is_set(|options| options.include_usage);
    let in_every = is_set(|options| options.continuous_usage_stats);
    match (in_last, in_every) {
        (false, false) => Ok(StreamUsage::Never),
        (true, false) => Ok(StreamUsage::Last),
        (true, true) => Ok(StreamUsage::Every),
        (false, true) => Err(ApiError::invalid(
            "stream_options.continuous_usage_stats",
            "only allowed with include_usage = true",
        )),
    }
}

/// Checks the number of alternatives. `param` is the field's name at this endpoint.
pub fn check_logprobs(
    param: &str,
    num_logprobs: u32,
    config: &ServeConfig,
) -> Result<u32, ApiError> {
    if num_logprobs <= config.max_logprobs {
        Ok(num_logprobs)
    } else {
        Err(ApiError::invalid(
            param,
            format!("must be at most {}", config.max_logprobs),
        ))
    }
}

fn penalty(param: &str, value: Option<f64>) -> Result<f32, ApiError> {
    number(param, value, None, 0.0, PENALTY)
}

/// Returns the field, or else the model's default, or else `default`. A number outside the range is an error.
fn number(
    param: &str,
    field: Option<f64>,
    of_model: Option<f32>,
    default: f64,
    range: NumberRange,
) -> Result<f32, ApiError> {
    let number = field.or(of_model.map(f64::from)).unwrap_or(default);
    match range.contains(number) {
        true => Ok(number as f32),
        false => {
            let message = format!("must be {range}, not {number}");
            Err(ApiError::invalid(param, message))
        }
    }
}

fn stop_strings(StopField(stop): StopField) -> Result<Vec<String>, ApiError> {
    if stop.len() > MAX_STOP_STRINGS {
        return Err(ApiError::invalid(
            "stop",
            format!("at most {MAX_STOP_STRINGS} stop strings are allowed"),
        ));
    }
    if stop
        .iter()
        .any(|stop| stop.is_empty() || stop.len() > MAX_STOP_BYTES)
    {
        return Err(ApiError::invalid(
            "stop",
            format!("a stop string must have between 1 and {MAX_STOP_BYTES} bytes"),
        ));
    }
    Ok(stop)
}

fn objective_us(field: &str, ms: Option<u32>) -> Result<Option<u64>, ApiError> {
    match ms {
        Some(0) => Err(ApiError::invalid(field, "must be at least 1")),
        ms => Ok(ms.map(|ms| u64::from(ms) * 1000)),
    }
}

impl<'de> Deserialize<'de> for StopField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StopVisitor;

        impl<'de> Visitor<'de> for StopVisitor {
            type Value = StopField;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or an array of strings")
            }

            fn visit_str<E>(self, stop: &str) -> Result<StopField, E> {
                Ok(StopField(vec![stop.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<StopField, A::Error> {
                Vec::deserialize(SeqAccessDeserializer::new(items)).map(StopField)
            }
        }

        deserializer.deserialize_any(StopVisitor)
    }
}
