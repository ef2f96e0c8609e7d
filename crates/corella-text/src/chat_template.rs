//! Chat templates: a Jinja template turns messages into a prompt, with the same text as in Transformers.
//!
//! minijinja renders the template. Where minijinja's output would differ from Transformers', `template_source` rewrites
//! the source, and functions of this crate replace minijinja's (`jinja_builtin`, `python_*`). `template_cost` bounds
//! work, memory and depth.

pub(crate) mod role_support;
pub(crate) mod special_tokens;
pub(crate) mod template_support;
pub(crate) mod tool_support;
pub(crate) mod turn_support;

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};

use crate::chat_template::special_tokens::{SpecialTokens, json_of};
use crate::chat_template::template_support::{RoleSupport, ToolSupport, TurnSupport};
use crate::error::TextError;
use crate::python::python_method::python_method;
use crate::python::python_number::value_of_number;
use crate::python::template_cost::add_checks;
use crate::python::{python_json, python_text};
use crate::template::jinja_builtin::add_builtins;
use crate::template::strftime::strftime;
use crate::template::template_source::rewritten_source;

/// The fuel that the template engine may spend on the steps and the memory of one conversation: a fixed amount, and
/// more for each byte of the conversation. A message or a tool takes some hundreds, but some templates look at all
/// messages again for each message.
const LEAST_FUEL: u64 = 1_000_000;
const FUEL_PER_BYTE: u64 = 200;
const MOST_FUEL: u64 = 20_000_000;

const DEFAULT: &str = "default";
/// The name of the template for conversations with tools, in checkpoints with several.
const TOOL_USE: &str = "tool_use";
/// The file of that template, in folders saved by Transformers.
pub const TOOL_USE_FILE: &str = "additional_chat_templates/tool_use.jinja";

/// A chat template, or the named templates of a checkpoint.
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The original template of conversations without tools.
    source: String,
    special: SpecialTokens,
    /// The name of the template's variable for tools: `tools`, or the one of SmolLM3.
    tools_name: &'static str,
    /// Default values of variables that a conversation does not set.
    default_kwargs: Map<String, Json>,
    has_tool_use: bool,
    /// Whether the template needs the arguments of calls as text. Found at the first query.
    needs_text_arguments: OnceLock<bool>,
    /// The accepted roles. Found at the first query.
    role_support: OnceLock<RoleSupport>,
    /// The accepted turns. Found at the first query.
    turn_support: OnceLock<TurnSupport>,
    /// The accepted tools. Found at the first query.
    tool_support: OnceLock<ToolSupport>,
}

/// The contents of the checkpoint files that may have a chat template.
#[derive(Debug, Clone, Copy, Default)]
pub struct TemplateFiles<'a> {
    pub tokenizer_config_json: Option<&'a [u8]>,
    pub special_tokens_map_json: Option<&'a [u8]>,
    pub chat_template_jinja: Option<&'a [u8]>,
    /// The older file of a processor, which prepares images and text.
    pub chat_template_json: Option<&'a [u8]>,
    /// `TOOL_USE_FILE`
    pub tool_use_jinja: Option<&'a [u8]>,
}

/// One conversation to render.
#[derive(Debug, Clone, Copy, Default)]
pub struct ChatInput<'a> {
    pub messages: &'a [Json],
    /// The list of tools. Templates see absent tools as `none`.
    pub tools: Option<&'a Json>,
    /// Whether the prompt ends with the opening of the assistant's answer.
    pub add_generation_prompt: bool,
    /// Whether the prompt ends within the last message, so that the model continues it.
    pub continue_final_message: bool,
    /// `chat_template_kwargs`: further names for the template, which override all others.
    pub kwargs: Option<&'a Map<String, Json>>,
}

/// The cost limits of rendering one conversation, besides the steps of the template engine.
#[derive(Clone, Copy)]
pub struct RenderLimit<'a> {
    pub max_bytes: usize,
    /// Called while the template prints. Returns true when the prompt is no longer wanted.
    pub is_abandoned: &'a dyn Fn() -> bool,
}

impl RenderLimit<'_> {
    /// No limit, for conversations of the program's own user.
    pub const NONE: RenderLimit<'static> = RenderLimit {
        max_bytes: usize::MAX,
        is_abandoned: &|| false,
    };
}

impl ChatTemplate {
    pub fn new(source: &str, special: SpecialTokens) -> Result<Self, TextError> {
        Self::with_named([(DEFAULT, source)], special)
    }

    /// The chat template of a checkpoint folder: `chat_template.jinja`, or otherwise `chat_template` of
    /// tokenizer_config.json, or of chat_template.json. `None` if there is no template in any of them.
    pub fn from_files(files: TemplateFiles) -> Result<Option<Self>, TextError> {
        let config = json_of(files.tokenizer_config_json, "tokenizer_config.json")?;
        let of_processor = json_of(files.chat_template_json, "chat_template.json")?;
        let special = SpecialTokens::of_files(&config, files.special_tokens_map_json)?;
        let of_config = [&config, &of_processor].map(|config| &config["chat_template"]);
        let of_config = of_config.into_iter().find(|template| !template.is_null());
        let mut named = match (files.chat_template_jinja, of_config) {
            (Some(source), _) => vec![(DEFAULT, utf8_of(source, "chat_template.jinja")?)],
            (None, None) => return Ok(None),
            (None, Some(Json::String(source))) => vec![(DEFAULT, source.as_str())],
            (None, Some(Json::Array(entries))) => {
                let named = entries.iter().map(named_template);
                named.collect::<Option<Vec<_>>>().ok_or_else(|| {
                    TextError::TokenizerConfig(
                        "chat_template: each entry needs a name and a template".into(),
                    )
                })?
            }
            (None, Some(_)) => {
                return Err(TextError::TokenizerConfig(
                    "chat_template: it is neither a string nor a list of named templates".into(),
                ));
            }
        };
        if let Some(source) = files.tool_use_jinja {
            named.retain(|(name, _)| *name != TOOL_USE);
            named.push((TOOL_USE, utf8_of(source, TOOL_USE_FILE)?));
        }
        Self::with_named(named, special).map(Some)
    }

    fn with_named<'s>(
        named: impl IntoIterator<Item = (&'s str, &'s str)>,
        special: SpecialTokens,
    ) -> Result<Self, TextError> {
        let mut environment = environment();
        let mut default_source = String::new();
        for (name, source) in named {
            if name == DEFAULT {
                default_source = source.to_owned();
            }
            environment
                .add_template_owned(
                    name.to_owned(),
                    rewritten_source(source).map_err(TextError::TemplateSyntax)?,
                )
                .map_err(|error| TextError::TemplateSyntax(reason(&error)))?;
        }
        let has_tool_use = environment.get_template(TOOL_USE).is_ok();
        if environment.get_template(DEFAULT).is_err() {
            return Err(TextError::TokenizerConfig(
                "chat_template: no template is named \"default\"".into(),
            ));
        }
        let mut template = Self {
            environment,
            source: default_source,
            special,
            tools_name: "tools",
            default_kwargs: Map::new(),
            has_tool_use,
            needs_text_arguments: OnceLock::new(),
            role_support: OnceLock::new(),
            turn_support: OnceLock::new(),
            tool_support: OnceLock::new(),
        };
        if !template.reads("tools") && template.reads("xml_tools") {
            template.tools_name = "xml_tools";
        }
        Ok(template)
    }

    /// Sets default variables of conversations.
    pub fn with_default_kwargs(mut self, kwargs: Map<String, Json>) -> Self {
        self.default_kwargs = kwargs;
        self
    }

    /// The original template of conversations without tools. Parts of it are rewritten before rendering.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The special tokens that the template knows by name.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// Whether a template reads tools: a separate one for conversations with tools, or the only one.
    pub fn reads_tools(&self) -> bool {
        self.has_tool_use || self.reads(self.tools_name)
    }

    /// The name by which `chat_template_kwargs` switch thinking on or off, if the template reads one of the common
    /// names.
    pub fn thinking_switch(&self) -> Option<&'static str> {
        const SWITCHES: [&str; 5] = [
            "enable_thinking",
            "thinking",
            "reasoning_effort",
            "thinking_budget",
            "reasoning_strategy",
        ];
        SWITCHES.into_iter().find(|name| self.reads(name))
    }

    /// The sources of all templates for conversations.
    pub(crate) fn sources(&self) -> String {
        let named = [TOOL_USE, DEFAULT].into_iter();
        let templates = named.filter_map(|name| self.environment.get_template(name).ok());
        templates
            .map(|template| template.source().to_owned())
            .collect()
    }

    /// Whether the arguments of a call in an earlier message must be JSON within a string. Most templates write an
    /// object as JSON; some join strings, and fail on an object. Rendering a call in both ways shows which.
    pub fn needs_text_arguments(&self) -> bool {
        const KEY: &str = "probe_key";
        let writes = |arguments: Json| {
            // Some templates accept only ids of nine letters and digits.
            let call = json!({
                "id": "call12345", "type": "function",
                "function": {"name": "probe", "arguments": arguments},
            });
            let messages = [
                json!({"role": "user", "content": "probe"}),
                json!({"role": "assistant", "content": null, "tool_calls": [call]}),
            ];
            let rendered = self.render(ChatInput {
                messages: &messages,
                ..ChatInput::default()
            });
            rendered.is_ok_and(|prompt| prompt.contains(KEY))
        };
        *self.needs_text_arguments.get_or_init(|| {
            let object = json!({KEY: "value"});
            let text = Json::from(object.to_string());
            !writes(object) && writes(text)
        })
    }

    /// Whether the template reads a variable of this name.
    pub fn reads(&self, name: &str) -> bool {
        let default = self.environment.get_template(DEFAULT);
        default.is_ok_and(|template| template.undeclared_variables(false).contains(name))
    }

    /// Renders a conversation as a prompt. The prompt already contains its special tokens, so encode it without adding
    /// special tokens.
    pub fn render(&self, input: ChatInput) -> Result<String, TextError> {
        self.render_within(input, RenderLimit::NONE)
    }

    /// Like `render`, but stops as soon as the template has printed too much or the prompt is no longer wanted.
    pub fn render_within(&self, input: ChatInput, limit: RenderLimit) -> Result<String, TextError> {
        if input.continue_final_message && input.add_generation_prompt {
            return Err(TextError::ContinueFinalMessage(
                "cannot be combined with add_generation_prompt".into(),
            ));
        }
        let marked;
        let input = if input.continue_final_message {
            marked = with_end_mark(input.messages)?;
            ChatInput {
                messages: &marked,
                ..input
            }
        } else {
            input
        };
        let name = if input.tools.is_some() && self.has_tool_use {
            TOOL_USE
        } else {
            DEFAULT
        };
        let mut writer = PromptWriter {
            prompt: Vec::new(),
            limit,
            refusal: None,
        };
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel_of(&input)));
        let render = || {
            let template = environment.get_template(name)?;
            template
                .render_captured_to(self.context(&input), &mut writer)
                .map(drop)
        };
        // The engine can panic for valid templates: version 3.0 did when one reversed an empty list.
        let rendered = catch_unwind(AssertUnwindSafe(render)).map_err(|_| {
            TextError::TemplateRender("the template engine failed in it".to_owned())
        })?;
        if let Some(refusal) = writer.refusal {
            return Err(refusal);
        }
        rendered.map_err(|error| match raised(&error) {
            Some(message) => TextError::TemplateRaised(message.to_owned()),
            None if is_out_of_fuel(&error) => TextError::TemplateTooExpensive,
            None => TextError::TemplateRender(reason(&error)),
        })?;
        let rendered = String::from_utf8(writer.prompt)
            .map_err(|error| TextError::TemplateRender(error.to_string()))?;
        if input.continue_final_message {
            return cut_at_end_mark(rendered);
        }
        Ok(rendered)
    }

    fn context(&self, input: &ChatInput) -> Value {
        let special = [
            ("bos_token", &self.special.bos_token),
            ("eos_token", &self.special.eos_token),
            ("unk_token", &self.special.unk_token),
            ("pad_token", &self.special.pad_token),
        ];
        let special = special
            .into_iter()
            .filter_map(|(name, token)| Some((name, Value::from(token.as_deref()?))));
        let others = self.special.others.iter();
        let others = others.map(|(name, token)| (name.as_str(), Value::from(token.as_str())));
        let given = [
            ("messages", input.messages.iter().map(value_of).collect()),
            (
                self.tools_name,
                input.tools.map_or(Value::from(()), value_of),
            ),
            ("documents", Value::from(())),
            (
                "add_generation_prompt",
                Value::from(input.add_generation_prompt),
            ),
        ];
        let pair = |(name, value)| (String::as_str(name), value_of(value));
        let defaults = self.default_kwargs.iter().map(pair);
        let kwargs = input.kwargs.into_iter().flatten().map(pair);
        Value::from_pairs(
            special
                .chain(others)
                .chain(defaults)
                .chain(given)
                .chain(kwargs),
        )
    }
}

/// Collects the prompt that a template prints, within its limit.
struct PromptWriter<'a> {
    prompt: Vec<u8>,
    limit: RenderLimit<'a>,
    /// The reason for which the template was stopped.
    refusal: Option<TextError>,
}

impl Write for PromptWriter<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if text.len() > self.limit.max_bytes.saturating_sub(self.prompt.len()) {
            self.refusal = Some(TextError::PromptTooLarge {
                max_bytes: self.limit.max_bytes,
            });
        } else if (self.limit.is_abandoned)() {
            self.refusal = Some(TextError::Abandoned);
        } else {
            self.prompt.extend_from_slice(text);
            return Ok(text.len());
        }
        Err(io::Error::other("the template is stopped"))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn fuel_of(input: &ChatInput) -> u64 {
    let kwargs = input.kwargs.into_iter().flatten().map(|(_, value)| value);
    let num_bytes: u64 = input
        .messages
        .iter()
        .chain(input.tools)
        .chain(kwargs)
        .map(num_bytes)
        .sum();
    (LEAST_FUEL + FUEL_PER_BYTE * num_bytes).min(MOST_FUEL)
}

/// About the size of a value as JSON.
fn num_bytes(json: &Json) -> u64 {
    const EACH: u64 = 4;
    let inner = match json {
        Json::String(text) => text.len() as u64,
        Json::Array(items) => items.iter().map(num_bytes).sum(),
        Json::Object(members) => { members.iter() }
            .map(|(key, value)| key.len() as u64 + num_bytes(value))
            .sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    };
    EACH + inner
}

fn value_of(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => value_of_number(number),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value_of).collect(),
        Json::Object(entries) => Value::from_pairs(
            entries
                .iter()
                .map(|(key, value)| (key.as_str(), value_of(value))),
        ),
    }
}

/// A template engine with the settings of Jinja2 in Transformers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.expect("the default delimiters are not distinct"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(python_method);
    environment.add_filter("tojson", python_json::filter);
    environment.set_formatter(python_text::print);
    add_builtins(&mut environment);
    add_checks(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: &str| {
        strftime(format, SystemTime::now())
    });
    environment
}

fn utf8_of<'s>(source: &'s [u8], file: &str) -> Result<&'s str, TextError> {
    std::str::from_utf8(source)
        .map_err(|_| TextError::TemplateSyntax(format!("{file} is not UTF-8")))
}

fn named_template(entry: &Json) -> Option<(&str, &str)> {
    Some((entry["name"].as_str()?, entry["template"].as_str()?))
}

/// The message given to `raise_exception`, carried through the template engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(
        Error::new(ErrorKind::InvalidOperation, "raised by the template")
            .with_source(Raised(message)),
    )
}

fn raised(error: &Error) -> Option<&str> {
    causes(error).find_map(|cause| {
        let Raised(message) = cause.downcast_ref()?;
        Some(message.as_str())
    })
}

fn is_out_of_fuel(error: &Error) -> bool {
    let is_one = |error: &Error| error.kind() == ErrorKind::OutOfFuel;
    is_one(error) || causes(error).any(|cause| cause.downcast_ref().is_some_and(is_one))
}

fn causes(error: &Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    std::iter::successors(std::error::Error::source(error), |cause| cause.source())
}

/// Describes an error in one line: the error, and its place in the template.
fn reason(error: &Error) -> String {
    let what = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}

/// Marks the end of a message that is continued. A template that trims contents removes the space at the end of the
/// mark.
const END_MARK: &str = "corella_message_ends_here ";

/// The conversation with the mark after the last message's text. The mark shows where the message ends in the prompt,
/// as in Transformers. A search for the message's text could find the same text in a part that the template adds after
/// the message.
fn with_end_mark(messages: &[Json]) -> Result<Vec<Json>, TextError> {
    let mut messages = messages.to_vec();
    let Some(last) = messages.last_mut() else {
        return Err(TextError::ContinueFinalMessage(
            "there are no messages".into(),
        ));
    };
    let text = match last.get_mut("content") {
        Some(Json::String(text)) => Some(text),
        Some(Json::Array(parts)) => {
            parts
                .iter_mut()
                .rev()
                .find_map(|part| match part.get_mut("text") {
                    Some(Json::String(text)) => Some(text),
                    _ => None,
                })
        }
        _ => None,
    };
    match text {
        Some(text) => text.push_str(END_MARK),
        None => {
            return Err(TextError::ContinueFinalMessage(
                "the last message has no text".into(),
            ));
        }
    }
    Ok(messages)
}

/// Ends the prompt at the mark.
fn cut_at_end_mark(mut rendered: String) -> Result<String, TextError> {
    let Some(end) = rendered.rfind(END_MARK.trim_end()) else {
        return Err(TextError::ContinueFinalMessage(
            "the chat template does not print the last message as it is".into(),
        ));
    };
    let is_trimmed = !rendered[end..].starts_with(END_MARK);
    rendered.truncate(end);
    if is_trimmed {
        rendered.truncate(rendered.trim_end().len());
    }
    Ok(rendered)
}
