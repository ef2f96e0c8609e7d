//! Switches the thinking of a model on or off, by the variable that its chat template has for that.

use serde_json::{Map, Value};

use crate::api_error::ApiError;
use crate::server_state::ServerState;

/// The template's variables; `field` is the one that asks for it. A model that thinks whatever it is told
/// may be asked not to, and one that never does may not be asked to.
pub fn thinking_switch(
    state: &ServerState,
    field: &str,
    is_on: bool,
) -> Result<Option<Map<String, Value>>, ApiError> {
    let template = state.text.chat_template.as_ref();
    match template.and_then(|template| template.thinking_switch()) {
        Some(switch @ ("enable_thinking" | "thinking")) => {
            Ok(Some(Map::from_iter([(switch.to_owned(), is_on.into())])))
        }
        _ if is_on && state.text.reply_format.reasoning.is_none() => {
            Err(ApiError::invalid(field, "this model does not think"))
        }
        _ => Ok(None),
    }
}

/// The template's variable for an effort, as OpenAI's APIs name it, and its value. A template that knows no
/// efforts, but a switch, thinks or does not.
pub fn effort_switch(
    state: &ServerState,
    field: &str,
    effort: &str,
) -> Result<(&'static str, Value), ApiError> {
    const EFFORT: &str = "reasoning_effort";
    let template = state.text.chat_template.as_ref();
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
