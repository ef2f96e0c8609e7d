//! Constrains a conversation's reply to the request's demand: tool calls, a format of its text, or either.

use std::sync::Arc;

use corella_text::{GrammarOrigin, ReplyGrammarError, WantedCalls, WantedReply};

use crate::text::chat_fields::ChatPrompt;
use crate::text::grammar_constraint::GrammarConstraint;
use crate::text::output_format::OutputFormat;
use crate::text::sampling_fields::GenerationParams;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;

impl GenerationParams {
    /// Constrains every reply to `prompt` to the demanded calls, or to the requested format. With a format the model
    /// may call the offered tools instead of writing text. Compiling may take a second, so text threads do it.
    /// Compiling stops if the caller leaves.
    pub fn set_reply_constraint(
        &mut self,
        served: &ServedModel,
        prompt: &ChatPrompt,
        caller: &Caller,
    ) -> Result<(), ApiError> {
        let format = self.output_format.as_ref();
        let wanted = match (&prompt.demanded_calls, format) {
            (None, None) => return self.check_first_token(served),
            (Some(calls), _) => WantedReply {
                calls: Some(calls.clone()),
                text: None,
            },
            (None, Some(format)) => WantedReply {
                calls: prompt.reply.tools.is_some().then_some(WantedCalls::Any),
                text: Some(format.source.clone()),
            },
        };
        let tokenizer = &served.tokenizer;
        let grammars = served.grammars(caller)?;
        let grammar = grammars.compile_reply(tokenizer, &prompt.reply, wanted);
        let grammar = grammar.map_err(|error| grammar_error(&error, prompt, format))?;
        self.constraint = Some(Arc::new(GrammarConstraint(grammar)));
        self.check_first_token(served)
    }
}

fn grammar_error(
    ReplyGrammarError { origin, error }: &ReplyGrammarError,
    prompt: &ChatPrompt,
    format: Option<&OutputFormat>,
) -> ApiError {
    match (origin, format) {
        (GrammarOrigin::Tool(name), _) => {
            let index = prompt.tool_names.iter().position(|tool| tool == name);
            let field = format!("tools[{}].function.parameters", index.unwrap_or(0));
            let param = match error.place.is_empty() {
                true => field,
                false => format!("{field}.{}", error.place),
            };
            ApiError::invalid(param, &error.reason)
        }
        (GrammarOrigin::Whole, _) if !prompt.tool_names.is_empty() => {
            ApiError::invalid("tools", &error.reason)
        }
        (_, Some(format)) => format.error(error),
        (_, None) => ApiError::invalid("tool_choice", &error.reason),
    }
}
