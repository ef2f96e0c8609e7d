//! Fields that `/api/chat` and `/api/generate` share: the model, sampling, and the format of the answer.

use corella_engine::rare_line;
use corella_text::GrammarSource;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::keep_alive::keep_alive;
use crate::text::chat_fields::checked_logprobs;
use crate::text::output_format::{OutputFormat, json_schema};
use crate::text::prompt_tokens::PromptTokens;
use crate::text::sampling_fields::{EndpointFields, GenerationParams, SamplingFields, StopField};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::text::thinking_switch::thinking_switch;
use crate::wire::api_error::ApiError;
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table::Endpoint;
use crate::wire::field_table::ollama::OPTIONS;
use crate::wire::request_body::RequestBody;
use crate::wire::shallow_value::ShallowValue;

/// The fields as sent; `null` counts as absent.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct CommonFields {
    model: Option<String>,
    stream: Option<bool>,
    options: Option<OptionFields>,
    format: Option<Value>,
    think: Option<Value>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
}

/// The members of `options` that are read.
#[derive(Default, Deserialize)]
#[serde(expecting = "an object")]
struct OptionFields {
    num_predict: Option<i64>,
    num_ctx: Option<i64>,
    temperature: Option<f64>,
    top_k: Option<i64>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    seed: Option<i64>,
    stop: Option<StopField>,
    repeat_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
}

/// The names of `options`' members, for the check, and a field that another layer has read.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct OptionNames {
    keep_alive: Option<ShallowValue>,
    options: Option<Map<String, Value>>,
}

/// Fields of `SamplingFields`, and their names in Ollama's API.
const NAMES: &[(&str, &str)] = &[
    ("temperature", "options.temperature"),
    ("top_k", "options.top_k"),
    ("top_p", "options.top_p"),
    ("min_p", "options.min_p"),
    ("stop", "options.stop"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("presence_penalty", "options.presence_penalty"),
    ("frequency_penalty", "options.frequency_penalty"),
];

impl CommonFields {
    /// Parses the fields, and refuses a body with unread fields.
    pub fn parse(body: &RequestBody, check: FieldCheck) -> Result<Self, ApiError> {
        check_names(body, check)?;
        body.parse()
    }

    /// Ollama's names end in a tag, which defaults to `latest`.
    pub fn model(&self, served: &ServedModel) -> Result<String, ApiError> {
        served_model(served, self.model.as_deref())
    }

    /// Returns the parameters of a call that draws tokens. Answers are streamed by default.
    pub fn params(
        self,
        served: &ServedModel,
        caller: &Caller,
        own: EndpointFields,
    ) -> Result<GenerationParams, ApiError> {
        let options = self.options.unwrap_or_default();
        let own = EndpointFields {
            logprobs: checked_logprobs(self.logprobs, self.top_logprobs, &served.config)?,
            ..own
        };
        let format = output_format(self.format)?;
        let mut params = options.validate(served, caller, own)?;
        params.stream = self.stream.unwrap_or(true);
        params.output_format = format;
        Ok(params)
    }

    /// Returns the chat template's variables that switch thinking.
    pub fn template_kwargs(
        &self,
        served: &ServedModel,
    ) -> Result<Option<Map<String, Value>>, ApiError> {
        match &self.think {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(is_on)) => thinking_switch(served, "think", *is_on),
            Some(Value::String(effort)) => {
                let template = served.chat_template.as_ref();
                match template.is_some_and(|template| template.reads(EFFORT)) {
                    true => Ok(Some(Map::from_iter([(
                        EFFORT.to_owned(),
                        effort.as_str().into(),
                    )]))),
                    false => thinking_switch(served, "think", true),
                }
            }
            Some(_) => Err(ApiError::invalid(
                "think",
                "must be a boolean, or an effort such as \"high\"",
            )),
        }
    }

    pub fn wants_thoughts(&self) -> bool {
        !matches!(&self.think, None | Some(Value::Null | Value::Bool(false)))
    }
}

/// Refuses a body with unread fields, including ones in `options`.
fn check_names(body: &RequestBody, check: FieldCheck) -> Result<(), ApiError> {
    let names: OptionNames = body.parse()?;
    body.check_fields(check)?;
    keep_alive(names.keep_alive.as_ref())?;
    match &names.options {
        Some(options) => check.check(&OPTIONS, "options", options),
        None => Ok(()),
    }
}

/// Checks the fields of a body that draws no tokens. Its options have no effect, but options that no endpoint takes are
/// still refused.
pub fn check_options(
    body: &RequestBody,
    served: &ServedModel,
    caller: &Caller,
    endpoint: Endpoint,
) -> Result<(), ApiError> {
    #[derive(Deserialize)]
    #[serde(expecting = "a JSON object")]
    struct Fields {
        options: Option<OptionFields>,
    }
    check_names(body, served.field_check(endpoint))?;
    let fields: Fields = body.parse()?;
    let options = fields.options.unwrap_or_default();
    options.validate(served, caller, EndpointFields::default())?;
    Ok(())
}

/// The template's variable for the effort of thinking.
const EFFORT: &str = "reasoning_effort";

impl OptionFields {
    fn validate(
        self,
        served: &ServedModel,
        caller: &Caller,
        own: EndpointFields,
    ) -> Result<GenerationParams, ApiError> {
        self.note_context(served);
        let sampling = SamplingFields {
            max_tokens: self.max_tokens(),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            // As in Ollama, -1 means no seed.
            seed: self.seed.filter(|&seed| seed != -1),
            stop: self.stop,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            ..SamplingFields::default()
        };
        sampling.validate(served, caller, own).map_err(|error| {
            let renamed = NAMES.iter().find(|(from, _)| error.param() == Some(from));
            renamed.map_or(error.clone(), |(from, to)| error.renamed(from, to))
        })
    }

    /// Negative numbers and 0 mean no limit.
    fn max_tokens(&self) -> Option<u32> {
        let num_predict = self.num_predict.filter(|num_tokens| *num_tokens > 0)?;
        Some(u32::try_from(num_predict).unwrap_or(u32::MAX))
    }

    /// Logs a `num_ctx` above the server's context. The server's context applies. No request is refused for it: clients
    /// ask for more than they need, and a conversation that is too long is refused by its own length.
    fn note_context(&self, served: &ServedModel) {
        let max_model_len = served.config.max_model_len;
        if let Some(num_ctx) = self.num_ctx
            && num_ctx > i64::from(max_model_len)
        {
            rare_line!(
                info,
                "options.num_ctx {num_ctx} has no effect: the context has {max_model_len} tokens (--max-model-len)"
            );
        }
    }
}

/// `num_predict` is a limit and not a demand: an answer ends with the context at the latest.
pub fn end_with_context(
    params: &mut GenerationParams,
    served: &ServedModel,
    prompt: &PromptTokens,
) {
    let num_prompt_tokens = u32::try_from(prompt.tokens.len()).unwrap_or(u32::MAX);
    let rest = served
        .config
        .max_model_len
        .saturating_sub(num_prompt_tokens);
    let max_tokens = &mut params.stopping.max_tokens;
    *max_tokens = max_tokens.map(|max_tokens| max_tokens.min(rest.max(1)));
}

/// Returns the served name of a model. The caller's name may end in `:latest`.
pub fn served_model(served: &ServedModel, model: Option<&str>) -> Result<String, ApiError> {
    served.check_name(model).or_else(|error| {
        let untagged = model.and_then(|model| model.strip_suffix(":latest"));
        untagged.map_or(Err(error.clone()), |model| {
            served.check_name(Some(model)).map_err(|_| error)
        })
    })
}

/// `format`: nothing, any JSON, or a schema.
fn output_format(field: Option<Value>) -> Result<Option<OutputFormat>, ApiError> {
    const FIELD: &str = "format";
    let source = match field {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(name)) if name.is_empty() => return Ok(None),
        Some(Value::String(name)) if name == "json" => GrammarSource::JsonObject,
        Some(schema @ Value::Object(_)) => json_schema(FIELD, schema)?,
        Some(_) => {
            return Err(ApiError::invalid(
                FIELD,
                "must be \"json\" or a JSON schema, which is an object",
            ));
        }
    };
    Ok(Some(OutputFormat {
        source,
        field: FIELD.to_owned(),
    }))
}
