//! `/v1/responses`: OpenAI's Responses API.

mod event;
mod input;
mod kept;
mod object;
mod reference;
mod tool;

use std::sync::Arc;

use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::call::call_context::CallContext;
use crate::call::generation::Generated;
use crate::call::response_head::ResponseHead;
use crate::endpoint::generating_endpoint::{Call, CallRequest, Endpoint, StreamStart};
use crate::store::response_store::{KeptResponse, ResponseKey, ResponseStore, Turn};
use crate::text::chat_fields::ChatFields;
use crate::text::conversation_fields::ConversationFields;
use crate::text::output_format::text_format;
use crate::text::sampling_fields::{EndpointFields, check_logprobs};
use crate::text::served_model::ServedModel;
use crate::text::thinking_switch::effort_switch;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_check::FieldCheck;
use crate::wire::field_table;
use crate::wire::field_table::responses::{LOGPROBS, NEVER_THERE, REASONING, TEXT};
use crate::wire::json_response::json_response;

use event::ResponseEvents;
use input::{InputField, conversation};
use kept::Keeping;
use object::{Echo, Output, Status};
use reference::References;
use tool::{chat_tool_choice, chat_tools, in_own_names};

pub use kept::{delete_response, list_input_items, retrieve_response};

/// Fields that no other endpoint has, or that mean something else at others.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct ResponseFields {
    input: Option<InputField>,
    instructions: Option<String>,
    max_output_tokens: Option<u32>,
    include: Option<Vec<String>>,
    top_logprobs: Option<u32>,
    reasoning: Option<Map<String, Value>>,
    text: Option<Map<String, Value>>,
    metadata: Option<Map<String, Value>>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    chat_template_kwargs: Option<Map<String, Value>>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
}

impl ResponseFields {
    fn check(&self, check: FieldCheck) -> Result<(), ApiError> {
        if let Some(text) = &self.text {
            check.check(&TEXT, "text", text)?;
        }
        if let Some(reasoning) = &self.reasoning {
            check.check(&REASONING, "reasoning", reasoning)?;
        }
        let is_known = |name: &str| name == LOGPROBS || NEVER_THERE.contains(&name);
        let mut include = self.include.iter().flatten();
        match include.position(|name| !is_known(name)) {
            None => Ok(()),
            Some(at) => Err(ApiError::invalid(
                format!("include[{at}]"),
                format!(
                    "must be \"{LOGPROBS}\", or without effect one of \"{}\"",
                    NEVER_THERE.join("\", \"")
                ),
            )),
        }
    }

    /// Returns the earlier turns of the conversation that the request continues.
    fn before(
        &self,
        store: &ResponseStore,
        context: &CallContext,
    ) -> Result<Vec<Arc<Turn>>, ApiError> {
        let Some(id) = &self.previous_response_id else {
            return Ok(Vec::new());
        };
        let key = ResponseKey {
            owner: context.owner(),
            id: id.as_str().into(),
        };
        let found = store.find(&key);
        let KeptResponse { mut before, turn } =
            found.map_err(ApiError::into_previous_response_error)?;
        before.push(turn);
        Ok(before)
    }

    /// Returns the number of alternatives to each token of the answer, if requested.
    fn logprobs(&self, served: &ServedModel) -> Result<Option<u32>, ApiError> {
        let mut include = self.include.iter().flatten();
        let is_included = include.any(|name| name == LOGPROBS);
        let num_top = self.top_logprobs.unwrap_or(0);
        (is_included || num_top > 0)
            .then(|| check_logprobs("top_logprobs", num_top, &served.config))
            .transpose()
    }

    /// Returns the template's variables. An effort becomes the variable that the template reads, or an error if it
    /// reads none.
    fn template_kwargs(
        &mut self,
        served: &ServedModel,
    ) -> Result<Option<Map<String, Value>>, ApiError> {
        let mut kwargs = self.chat_template_kwargs.take();
        let effort = self
            .reasoning
            .as_ref()
            .and_then(|reasoning| reasoning.get("effort"));
        let Some(effort) = effort.filter(|effort| !effort.is_null()) else {
            return Ok(kwargs);
        };
        let Some(effort) = effort.as_str() else {
            return Err(ApiError::invalid("reasoning.effort", "must be a string"));
        };
        let (name, value) = effort_switch(served, "reasoning.effort", effort)?;
        kwargs
            .get_or_insert_default()
            .insert(name.to_owned(), value);
        Ok(kwargs)
    }
}

pub struct Responses {
    /// The request's fields that the answer repeats.
    echo: Echo,
    /// The data for keeping the response, if it is to be kept.
    keeping: Option<Keeping>,
}

impl Endpoint for Responses {
    type Encoder = ResponseEvents;
    const ID_PREFIX: &'static str = "resp_";
    const PROMPT_FIELD: &'static str = "input";

    // Long: one step for each group of fields; the last one moves the fields that the answer repeats.
    fn prepare(request: CallRequest<'_>) -> Result<Call<Self>, ApiError> {
        let (served, body, caller) = (request.served, request.body, request.caller);
        let (responses, context) = (request.responses, request.context);
        let ConversationFields::<ResponseFields> {
            mut sampling,
            mut fields,
            check,
            model,
        } = ConversationFields::parse(served, body, field_table::Endpoint::Responses)?;
        fields.check(check)?;
        sampling.set_max_tokens(fields.max_output_tokens);
        let own = EndpointFields {
            logprobs: fields.logprobs(served)?,
            ..EndpointFields::default()
        };
        let params = sampling.validate(served, caller, own);
        let mut params =
            params.map_err(|error| error.renamed("max_tokens", "max_output_tokens"))?;
        let format = fields.text.as_mut().and_then(|text| text.remove("format"));
        if let Some(format) = text_format(format.clone())? {
            params.output_format = Some(format);
        }
        let template_kwargs = fields.template_kwargs(served)?;
        let before = fields.before(responses, context)?;
        let mut input = required("input", fields.input)?;
        if let InputField::Items(items) = &mut input {
            References::new(responses, context, served.server.max_body_bytes)
                .resolve(items, check)?;
        }
        let messages = conversation(&before, &input, fields.instructions.as_deref(), check)?;
        let tools = fields.tools.unwrap_or_default();
        let choice = fields
            .tool_choice
            .as_ref()
            .map(chat_tool_choice)
            .transpose()?;
        let kept_tools = chat_tools(&tools, check)?;
        let mut chat = ChatFields::conversation(messages, false, template_kwargs).with_tools(
            Some(kept_tools.list),
            choice,
            fields.parallel_tool_calls,
        );
        let prompt = chat.tokenize(served, check, caller);
        let in_own_names = |error| in_own_names(error, &kept_tools.places);
        let prompt = prompt.map_err(in_own_names)?;
        let held = params.set_reply_constraint(served, &prompt, caller);
        held.map_err(in_own_names)?;
        let is_kept = fields.store != Some(false) && responses.is_on();
        let keeping = is_kept.then(|| Keeping {
            store: responses.clone(),
            owner: context.owner(),
            before,
            input: input.into_items(),
        });
        let echo = Echo {
            previous_response_id: fields.previous_response_id,
            is_kept,
            instructions: fields.instructions,
            max_output_tokens: fields.max_output_tokens,
            metadata: fields.metadata.unwrap_or_default(),
            reasoning: fields.reasoning.unwrap_or_default(),
            format: format.unwrap_or_else(|| json!({"type": "text"})),
            temperature: params.sampling.temperature,
            top_p: params.sampling.top_p,
            top_logprobs: fields.top_logprobs.unwrap_or(0),
            tools,
            tool_choice: fields.tool_choice,
            parallel_tool_calls: fields.parallel_tool_calls.unwrap_or(true),
        };
        Ok(Call {
            prompts: vec![prompt.into()],
            params,
            model,
            format: Self { echo, keeping },
        })
    }

    fn encoder(self, stream: StreamStart) -> ResponseEvents {
        ResponseEvents::new(stream.served, stream.head, self.echo, self.keeping)
    }

    fn response(self, served: &ServedModel, head: ResponseHead, mut answer: Generated) -> Response {
        let mut output = Output::new(served.reply_format.calls);
        let mut status = Status::Completed;
        if let Some(choice) = answer.choices.pop() {
            output.push_logprobs(served, &choice.logprobs);
            for part in &choice.parts {
                output.push(part);
            }
            status = Status::of(choice.finish.as_ref());
        }
        let items = output.items(&head, status);
        let object = self.echo.object(&head, status, items, Some(&answer.usage));
        if let Some(keeping) = self.keeping {
            keeping.keep(&head.id, &object);
        }
        json_response(&object)
    }
}
