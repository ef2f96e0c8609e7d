//! The sampling fields of `/completion` and `/infill`, under llama-server's names.

use std::collections::BTreeMap;

use corella_text::GrammarSource;
use serde::Deserialize;
use serde_json::Value;

use super::answer::AnswerFormat;
use crate::text::output_format::{OutputFormat, json_schema};
use crate::text::sampling_fields::{
    EndpointFields, GenerationParams, SamplingFields, StopField, check_logprobs,
};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::llama_server::SAMPLERS;
use crate::wire::request_body::RequestBody;

/// The fields as sent; `null` counts as absent.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct DrawFields {
    model: Option<String>,
    stream: Option<bool>,
    n_predict: Option<i64>,
    max_tokens: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repeat_penalty: Option<f64>,
    repeat_last_n: Option<i64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    seed: Option<i64>,
    stop: Option<StopField>,
    ignore_eos: Option<bool>,
    logit_bias: Option<Value>,
    n_probs: Option<u32>,
    n_cmpl: Option<u32>,
    n: Option<u32>,
    n_indent: Option<usize>,
    json_schema: Option<Value>,
    grammar: Option<String>,
    return_tokens: Option<bool>,
    response_fields: Option<Vec<String>>,
    samplers: Option<Value>,
}

/// Fields of `SamplingFields`, and their names in llama-server.
const NAMES: &[(&str, &str)] = &[
    ("max_tokens", "n_predict"),
    ("prompt_logprobs", "n_predict"),
    ("repetition_penalty", "repeat_penalty"),
    ("n", "n_cmpl"),
];

/// llama-server's number for a random seed.
const RANDOM_SEED: i64 = 0xFFFF_FFFF;

impl DrawFields {
    /// Parses the fields, and refuses a body with fields that have no meaning at this endpoint.
    pub fn parse(body: &RequestBody, check: FieldCheck) -> Result<Self, ApiError> {
        body.check_fields(check)?;
        body.parse()
    }

    pub fn model(&self, served: &ServedModel) -> Result<String, ApiError> {
        served.check_name(self.model.as_deref())
    }

    /// Returns the parameters of the call, and the options of its answer.
    pub fn params(
        mut self,
        served: &ServedModel,
        caller: &Caller,
        more_end_token_ids: Vec<u32>,
    ) -> Result<(GenerationParams, AnswerFormat), ApiError> {
        self.apply_samplers()?;
        self.apply_repeat_window()?;
        let stream = self.stream.unwrap_or(false);
        let min_indent = self.n_indent.unwrap_or(0);
        if stream && min_indent > 0 {
            let message = "is available with stream = false only";
            return Err(ApiError::invalid("n_indent", message));
        }
        let num_probs = self.n_probs.filter(|&num_probs| num_probs > 0);
        let num_probs =
            num_probs.map(|num_probs| check_logprobs("n_probs", num_probs, &served.config));
        let own = EndpointFields {
            logprobs: num_probs.transpose()?,
            more_end_token_ids,
            ..EndpointFields::default()
        };
        let output_format = self.output_format()?;
        let num_predict = self.n_predict.or(self.max_tokens);
        let mut sampling = SamplingFields {
            n: self.n_cmpl.or(self.n),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed.filter(|&seed| seed != -1 && seed != RANDOM_SEED),
            stop: self.stop,
            ignore_eos: self.ignore_eos,
            logit_bias: biases(served, self.logit_bias, caller)?,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repetition_penalty: self.repeat_penalty,
            stream: Some(stream),
            return_token_ids: Some(stream || self.return_tokens == Some(true)),
            ..SamplingFields::default()
        };
        match num_predict {
            // Only the prompt is computed.
            Some(0) => {
                sampling.set_max_tokens(Some(0));
                sampling.prompt_logprobs = Some(0);
            }
            Some(num_predict) if num_predict > 0 => {
                sampling.set_max_tokens(Some(u32::try_from(num_predict).unwrap_or(u32::MAX)));
            }
            // Negative numbers mean no limit but the context.
            _ => {}
        }
        let validated = sampling.validate(served, caller, own).map_err(|error| {
            let renamed = NAMES.iter().find(|(from, _)| error.param() == Some(from));
            renamed.map_or(error.clone(), |(from, to)| error.renamed(from, to))
        });
        let mut params = validated?;
        params.output_format = output_format;
        let answer = AnswerFormat {
            prompts: Vec::new(),
            num_choices: params.num_choices as usize,
            settings: settings(&params, num_predict),
            has_probs: params.wants_logprobs,
            returns_tokens: params.returns_token_ids,
            response_fields: self.response_fields.unwrap_or_default(),
            min_indent,
        };
        Ok((params, answer))
    }

    fn output_format(&mut self) -> Result<Option<OutputFormat>, ApiError> {
        let schema = self.json_schema.take().filter(|schema| !schema.is_null());
        let grammar = self.grammar.take().filter(|grammar| !grammar.is_empty());
        let (field, source) = match (schema, grammar) {
            (None, None) => return Ok(None),
            (Some(schema), None) => ("json_schema", json_schema("json_schema", schema)?),
            (None, Some(grammar)) => ("grammar", GrammarSource::of_grammar(grammar)),
            (Some(_), Some(_)) => {
                let reason = "cannot be combined with json_schema";
                return Err(ApiError::invalid("grammar", reason));
            }
        };
        let field = field.to_owned();
        Ok(Some(OutputFormat { source, field }))
    }

    /// Turns off the samplers that the field `samplers` leaves out.
    fn apply_samplers(&mut self) -> Result<(), ApiError> {
        let samplers = match &self.samplers {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::Array(samplers)) => samplers,
            Some(_) => return Err(ApiError::invalid("samplers", "must be an array of names")),
        };
        let is_known = |name: &&Value| name.as_str().is_some_and(|name| SAMPLERS.contains(&name));
        if let Some(unknown) = samplers.iter().find(|name| !is_known(name)) {
            let reason = format!(
                "has {unknown}, but llama.cpp's samplers are {}",
                SAMPLERS.join(", ")
            );
            return Err(ApiError::invalid("samplers", reason));
        }
        let names = samplers.iter().filter_map(Value::as_str).map(sampler_name);
        let has = |name: &str| names.clone().any(|sampler| sampler == name);
        let other = |field: &mut Option<f64>, name: &str, neutral: f64| {
            if !has(name) {
                *field = Some(neutral);
            }
        };
        // A temperature of 0 takes the most likely token, with or without the sampler `temperature`.
        if self.temperature != Some(0.0) {
            other(&mut self.temperature, "temperature", 1.0);
        }
        other(&mut self.top_p, "top_p", 1.0);
        other(&mut self.min_p, "min_p", 0.0);
        other(&mut self.repeat_penalty, "penalties", 1.0);
        other(&mut self.presence_penalty, "penalties", 0.0);
        other(&mut self.frequency_penalty, "penalties", 0.0);
        if !has("top_k") {
            self.top_k = Some(0);
        }
        Ok(())
    }

    /// Applies `repeat_last_n`: 0 turns penalties off. Other windows than -1 are refused beside a penalty, because
    /// penalties count the whole context.
    fn apply_repeat_window(&mut self) -> Result<(), ApiError> {
        let is = |field: Option<f64>, neutral: f64| field.is_none_or(|value| value == neutral);
        let has_penalty = !is(self.repeat_penalty, 1.0)
            || !is(self.presence_penalty, 0.0)
            || !is(self.frequency_penalty, 0.0);
        match self.repeat_last_n {
            None | Some(-1) => Ok(()),
            Some(0) => {
                self.repeat_penalty = Some(1.0);
                self.presence_penalty = Some(0.0);
                self.frequency_penalty = Some(0.0);
                Ok(())
            }
            Some(_) if !has_penalty => Ok(()),
            Some(_) => Err(ApiError::invalid(
                "repeat_last_n",
                "must be -1 beside a penalty: penalties count the whole context",
            )),
        }
    }
}

/// Reads `logit_bias`: an object of token ids and numbers, or an array of pairs, where a text stands for its tokens
/// and `false` forbids a token.
fn biases(
    served: &ServedModel,
    field: Option<Value>,
    caller: &Caller,
) -> Result<Option<BTreeMap<String, f64>>, ApiError> {
    const FIELD: &str = "logit_bias";
    const NEVER: f64 = -100.0;
    let wrong = || {
        ApiError::invalid(
            FIELD,
            "must be an object of token ids and numbers, or an array of pairs of a token id or text and a number or false",
        )
    };
    let bias = |value: &Value| match value {
        Value::Bool(false) => Ok(NEVER),
        value => value.as_f64().ok_or_else(wrong),
    };
    let mut biases = BTreeMap::new();
    match field {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Object(members)) => {
            for (token, value) in &members {
                biases.insert(token.clone(), bias(value)?);
            }
        }
        Some(Value::Array(pairs)) => {
            for pair in &pairs {
                let [token, value] = pair.as_array().map(Vec::as_slice).unwrap_or_default() else {
                    return Err(wrong());
                };
                let value = bias(value)?;
                match token {
                    Value::String(text) => {
                        for token in served.encode(FIELD, text, false, caller)? {
                            biases.insert(token.to_string(), value);
                        }
                    }
                    token => {
                        let token = token.as_u64().ok_or_else(wrong)?;
                        biases.insert(token.to_string(), value);
                    }
                }
            }
        }
        Some(_) => return Err(wrong()),
    }
    Ok(Some(biases))
}

/// Returns the sampling parameters, which answers repeat.
fn settings(params: &GenerationParams, num_predict: Option<i64>) -> Value {
    let sampling = &params.sampling;
    serde_json::json!({
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "n_predict": num_predict.unwrap_or(-1),
        "stop": params.stop,
        "ignore_eos": params.stopping.end_token_ids.is_empty(),
        "stream": params.stream,
        "n_probs": params.wants_logprobs.then_some(sampling.logprobs).flatten().unwrap_or(0),
    })
}

/// Resolves the other names that llama.cpp has for a sampler.
fn sampler_name(name: &str) -> &str {
    match name {
        "temp" => "temperature",
        "top-k" => "top_k",
        "top-p" | "nucleus" => "top_p",
        "min-p" => "min_p",
        _ => name,
    }
}
