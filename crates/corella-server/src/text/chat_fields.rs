//! A conversation of a request, as the model reads it.

use std::fmt;

use corella_core::{Retention, TokenId};
use corella_text::{ChatInput, ChatTemplate, ReplyContext, TextError, WantedCalls};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::config::serve_config::ServeConfig;
use crate::text::cache_mark::{CacheMarks, MarkedPrompt, num_head_bytes};
use crate::text::chat_call::fit_calls;
use crate::text::chat_message::{is_begun_answer, template_messages};
use crate::text::chat_role::fit_roles;
use crate::text::chat_tool::fit_tools;
use crate::text::chat_turn::fit_turns;
use crate::text::prompt_tokens::PromptTokens;
use crate::text::sampling_fields::check_logprobs;
use crate::text::sent_tokens::SentTokens;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::text::thinking_switch::effort_switch;
use crate::text::tool_fields::{OfferedTools, ToolFields};
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_check::FieldCheck;
use crate::wire::request_body::RequestBody;

/// The fields of a conversation. `/tokenize` reads them, too, and conversations of other APIs are converted to this
/// form.
#[derive(Default, Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct ChatFields {
    messages: Option<Vec<Map<String, Value>>>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
    add_special_tokens: Option<bool>,
    /// Used as the prompt. The template still tells the form of the reply.
    tokens: Option<SentTokens>,
    chat_template_kwargs: Option<Map<String, Value>>,
    reasoning_effort: Option<String>,
    pub echo: Option<bool>,
    tools: Option<Vec<Map<String, Value>>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    /// Set by endpoints whose requests have marks.
    #[serde(skip)]
    marks: Option<CacheMarks>,
}

/// A conversation in the form that the model reads, and the form of its reply.
pub struct ChatPrompt {
    pub tokens: Vec<TokenId>,
    pub reply: ReplyContext,
    /// The tool calls that the reply must make, if any.
    pub demanded_calls: Option<WantedCalls>,
    /// The names of all tools, in the request's order.
    pub tool_names: Vec<String>,
    /// The beginnings of the prompt that the cache retains.
    pub retentions: Vec<Retention>,
}

/// A conversation as its template writes it.
struct RenderedChat {
    text: String,
    /// The messages that the template accepted.
    messages: Vec<Value>,
    continue_final_message: bool,
    tools: Option<OfferedTools>,
    /// The length of the text that does not depend on the messages after the system prompt. 0 if no mark needs it.
    num_head_bytes: usize,
}

impl From<ChatPrompt> for PromptTokens {
    fn from(prompt: ChatPrompt) -> Self {
        Self {
            tokens: prompt.tokens,
            echo: None,
            reply: Some(prompt.reply),
            retentions: prompt.retentions,
        }
    }
}

/// Counts messages without storing them, so that too many are refused before they take memory.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct MessageCount {
    messages: Option<ItemCount>,
    input: Option<ItemCount>,
}

/// The number of items of an array; 0 for any other value.
struct ItemCount(usize);

impl<'de> Deserialize<'de> for ItemCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;

        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = ItemCount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array")
            }

            fn visit_str<E>(self, _: &str) -> Result<ItemCount, E> {
                Ok(ItemCount(0))
            }

            /// The field's own parser reports that this is no array.
            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<ItemCount, A::Error> {
                while fields.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(ItemCount(0))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ItemCount, A::Error> {
                let mut num_items = 0;
                while items.next_element::<IgnoredAny>()?.is_some() {
                    num_items += 1;
                }
                Ok(ItemCount(num_items))
            }
        }

        deserializer.deserialize_any(ItemVisitor)
    }
}

impl ChatFields {
    pub fn parse(body: &RequestBody, served: &ServedModel) -> Result<Self, ApiError> {
        Self::check_num_messages(body, served)?;
        body.parse()
    }

    /// Refuses more messages, or items of `input`, than the context can hold.
    pub fn check_num_messages(body: &RequestBody, served: &ServedModel) -> Result<(), ApiError> {
        let count: MessageCount = body.count()?;
        // A chat template writes at least one token for each message.
        let max_model_len = served.config.max_model_len;
        for (field, items) in [("messages", count.messages), ("input", count.input)] {
            let num_items = items.map_or(0, |items| items.0);
            if num_items > max_model_len as usize {
                let error = ApiError::too_many_messages(num_items, max_model_len);
                return Err(error.renamed("messages", field));
            }
        }
        Ok(())
    }

    /// The conversation of another API's request, whose last message is continued if `is_begun`.
    pub fn conversation(
        messages: Vec<Map<String, Value>>,
        is_begun: bool,
        chat_template_kwargs: Option<Map<String, Value>>,
    ) -> Self {
        Self {
            messages: Some(messages),
            continue_final_message: Some(is_begun),
            chat_template_kwargs,
            ..Self::default()
        }
    }

    /// Adds the tools that another API's request offers.
    pub fn with_tools(
        mut self,
        tools: Option<Vec<Map<String, Value>>>,
        choice: Option<Value>,
        parallel: Option<bool>,
    ) -> Self {
        self.tools = tools;
        self.tool_choice = choice;
        self.parallel_tool_calls = parallel;
        self
    }

    pub fn with_marks(mut self, marks: Option<CacheMarks>) -> Self {
        self.marks = marks;
        self
    }

    /// Checks a request whose field `other` has a text in place of a conversation.
    pub fn check_beside(
        mut self,
        other: &str,
        served: &ServedModel,
        check: FieldCheck,
    ) -> Result<(), ApiError> {
        if self.messages.is_some() {
            let message = format!("cannot be combined with {other}");
            return Err(ApiError::invalid("messages", message));
        }
        self.check_tools(served, check)
    }

    /// Checks the tools of a request without a conversation.
    pub fn check_tools(&mut self, served: &ServedModel, check: FieldCheck) -> Result<(), ApiError> {
        self.offered_tools(served, check).map(drop)
    }

    fn offered_tools(
        &mut self,
        served: &ServedModel,
        check: FieldCheck,
    ) -> Result<Option<OfferedTools>, ApiError> {
        let tools = ToolFields {
            tools: self.tools.take().unwrap_or_default(),
            tool_choice: self.tool_choice.take(),
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
        };
        tools.offered(served, check)
    }

    /// Returns the conversation's text for the model.
    pub fn prompt_text(
        &mut self,
        served: &ServedModel,
        check: FieldCheck,
        caller: &Caller,
    ) -> Result<String, ApiError> {
        Ok(self.render(served, check, caller)?.text)
    }

    fn render(
        &mut self,
        served: &ServedModel,
        check: FieldCheck,
        caller: &Caller,
    ) -> Result<RenderedChat, ApiError> {
        let messages = required("messages", self.messages.take())?;
        let mut tools = self.offered_tools(served, check)?;
        let template = served.chat_template.as_ref();
        let needs_text_arguments = template.is_some_and(ChatTemplate::needs_text_arguments);
        let messages = template_messages(messages, needs_text_arguments, check)?;
        let Some(template) = template else {
            return Err(ApiError::invalid(
                "messages",
                "this model has no chat template; use /v1/completions",
            ));
        };
        let messages = fit_calls(fit_roles(messages, template)?, template);
        let messages = fit_turns(messages, template);
        if let Some(tools) = &mut tools {
            fit_tools(&mut tools.list, template);
        }
        let continue_final_message = self
            .continue_final_message
            .unwrap_or_else(|| messages.last().is_some_and(is_begun_answer));
        if let Some(effort) = self.reasoning_effort.take() {
            let (name, value) = effort_switch(served, "reasoning_effort", &effort)?;
            let kwargs = self.chat_template_kwargs.get_or_insert_default();
            kwargs.insert(name.into(), value);
        }
        let is_abandoned = || caller.has_left();
        let input = ChatInput {
            messages: &messages,
            tools: tools.as_ref().map(|tools| &tools.list),
            add_generation_prompt: self
                .add_generation_prompt
                .unwrap_or(!continue_final_message),
            continue_final_message,
            kwargs: self.chat_template_kwargs.as_ref(),
        };
        let limit = served.render_limit(&is_abandoned);
        let text = template
            .render_within(input, limit)
            .map_err(|error| match error {
                TextError::PromptTooLarge { .. } => {
                    // The text was too long, so it has at least one token more than the context.
                    let max_model_len = served.config.max_model_len;
                    let at_least = max_model_len as usize + 1;
                    ApiError::prompt_too_long("messages", at_least, max_model_len)
                }
                TextError::ContinueFinalMessage(_) => {
                    ApiError::invalid("continue_final_message", error.to_string())
                }
                error => ApiError::invalid("messages", error.to_string()),
            })?;
        let num_head_bytes = match self.marks {
            Some(_) => num_head_bytes(template, input, &text, limit),
            None => 0,
        };
        Ok(RenderedChat {
            num_head_bytes,
            text,
            messages,
            continue_final_message,
            tools,
        })
    }

    pub fn tokenize(
        &mut self,
        served: &ServedModel,
        check: FieldCheck,
        caller: &Caller,
    ) -> Result<ChatPrompt, ApiError> {
        let RenderedChat {
            text: prompt,
            messages,
            continue_final_message,
            tools,
            num_head_bytes,
        } = self.render(served, check, caller)?;
        let add_special_tokens = self.add_special_tokens.unwrap_or(false);
        let format = served.reply_format;
        let within_reasoning = format.reasoning.is_some_and(|reasoning| {
            let last = messages.last().map(|message| &message["content"]);
            match last.and_then(Value::as_str) {
                Some(content) if continue_final_message => reasoning.is_open_at_end(content),
                _ => reasoning.is_opened_by(&prompt),
            }
        });
        let past_reasoning = match continue_final_message {
            true => !within_reasoning,
            false => { format.reasoning }.is_some_and(|reasoning| reasoning.is_closed_by(&prompt)),
        };
        let one_call = tools.as_ref().is_some_and(|tools| tools.one_call);
        let (tools, demanded_calls, tool_names) = match tools {
            Some(tools) => (Some(tools.set), tools.demanded_calls, tools.names),
            None => (None, None, Vec::new()),
        };
        let tokens = match self.tokens.take() {
            Some(sent) => sent.checked(&served.config)?,
            None => served.encode("messages", &prompt, add_special_tokens, caller)?,
        };
        let marked = MarkedPrompt {
            text: &prompt,
            tokens: &tokens,
            num_head_bytes,
        };
        let marks = self.marks.as_ref();
        let retentions = marks.map(|marks| marks.retentions(&marked, &served.tokenizer));
        Ok(ChatPrompt {
            retentions: retentions.unwrap_or_default(),
            tokens,
            reply: ReplyContext {
                format,
                tools,
                within_reasoning,
                past_reasoning,
                one_call,
            },
            demanded_calls,
            tool_names,
        })
    }

    pub fn logprobs(&self, config: &ServeConfig) -> Result<Option<u32>, ApiError> {
        checked_logprobs(self.logprobs, self.top_logprobs, config)
    }
}

/// Returns the number of alternatives to each token, if log-probabilities are requested.
pub fn checked_logprobs(
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    config: &ServeConfig,
) -> Result<Option<u32>, ApiError> {
    match (logprobs.unwrap_or(false), top_logprobs) {
        (true, top) => check_logprobs("top_logprobs", top.unwrap_or(0), config).map(Some),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid(
            "top_logprobs",
            "only allowed with logprobs = true",
        )),
    }
}
