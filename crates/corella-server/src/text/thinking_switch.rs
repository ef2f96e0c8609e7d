//! Switches a model's thinking on or off, by a variable of its chat template.

use serde_json::{Map, Value};

use crate::text::served_model::ServedModel;
use crate::wire::api_error::ApiError;

/// Returns the template's variables. `field` is the request's field, for errors. Switching thinking on is an error for
/// a model that never thinks. Switching thinking off is never an error.
pub fn thinking_switch(
    served: &ServedModel,
    field: &str,
    is_on: bool,
) -> Result<Option<Map<String, Value>>, ApiError> {
    let template = served.chat_template.as_ref();
    match template.and_then(|template| template.thinking_switch()) {
        Some(switch @ ("enable_thinking" | "thinking")) => {
            Ok(Some(Map::from_iter([(switch.to_owned(), is_on.into())])))
        }
        _ if is_on && served.reply_format.reasoning.is_none() => {
            Err(ApiError::invalid(field, "this model does not think"))
        }
        _ => Ok(None),
    }
}

/// Returns the template's variable for an effort, in the terms of OpenAI's APIs, and its value. For a template without
/// efforts but with a switch, every effort but "none" switches thinking on.
pub fn effort_switch(
    served: &ServedModel,
    field: &str,
    effort: &str,
) -> Result<(&'static str, Value), ApiError> {
    const EFFORT: &str = "reasoning_effort";
    let template = served.chat_template.as_ref();
    if template.is_some_and(|template| template.reads(EFFORT)) {
        return Ok((EFFORT, effort.into()));
    }
    match template.and_then(|template| template.thinking_switch()) {
        Some(switch @ ("enable_thinking" | "thinking")) => Ok((switch, (effort != "none").into())),
        _ => Err(ApiError::unsupported(
            field,
            "this model's chat template does not read an effort; leave it out",
        )),
    }
}
