//! The fields of Anthropic's Messages API, and of the objects within them.

use super::chat::{NO_SCHEMA, SENT_BACK, name, tool_name};
use super::sampling::{DRAW, MODEL, QUEUE, STREAM, schema_format};
use super::schema::{
    Limits, Schema, any_object, boolean, constant, count, either, list, object, one_of, text,
    text_of, text_or,
};
use super::{Field, FieldTable, no_effect, read, refused};
use crate::wire::field_limit::{MAX_STOP_BYTES, MAX_STOP_STRINGS};

const MARK: &str = "The prefix cache retains the prompt up to the end of this block; at most four blocks have one.";

pub static BODY: FieldTable = FieldTable::body("MessagesRequest").of(&[
    CONVERSATION,
    &[
        read("max_tokens", count).required(),
        read("stop_sequences", |_| {
            list(text_of(1..=MAX_STOP_BYTES)).sized(0..=MAX_STOP_STRINGS)
        })
        .about("The first of these texts to appear ends the answer, and is not part of it."),
    ],
    MODEL,
    STREAM,
    DRAW,
    QUEUE,
    WITHOUT_EFFECT,
    refused::MESSAGES,
]);

pub static COUNT_TOKENS: FieldTable = FieldTable::body("CountTokensRequest")
    .beside(&[&BODY])
    .of(&[CONVERSATION, MODEL, WITHOUT_EFFECT, refused::MESSAGES]);

/// The fields that a prompt is made of.
static CONVERSATION: &[Field] = &[
    read("messages", |limits| {
        list(object(&MESSAGE)).sized(1..=limits.max_model_len as usize)
    })
    .required()
    .about("The conversation so far. An answer continues a last message of the assistant."),
    read("system", |_| text_or(&BLOCK)).about(
        "The first message, with the role \"system\", without the x-anthropic-billing-header of \
         Claude Code.",
    ),
    read("tools", |_| list(object(&TOOL))).about(
        "Functions that the model may call. Tools that Anthropic's servers call are refused.",
    ),
    read("tool_choice", |_| object(&TOOL_CHOICE)),
    read("thinking", |_| object(&THINKING)),
    read("output_config", |_| object(&OUTPUT_CONFIG)),
    read("cache_control", |_| object(&CACHE_CONTROL)).about("A mark after the last block."),
];

static WITHOUT_EFFECT: &[Field] = &[
    no_effect("inference_geo", "it serves the caller's own accounting"),
    no_effect("billing_policy", "it serves the caller's own accounting"),
    no_effect(
        "fallback_credit_token",
        "it serves the caller's own accounting",
    ),
    no_effect("anthropic_version", "the header names versions"),
    no_effect("anthropic_beta", "the header names versions"),
    no_effect(
        "fallbacks",
        "one model is served, and it declines no request",
    ),
    no_effect(
        "context_management",
        "the model reads the whole conversation: nothing is cleared from it",
    ),
    no_effect("diagnostics", SENT_BACK),
];

pub static MESSAGE: FieldTable = FieldTable::object("InputTurn").of(&[&[
    read("role", |_| one_of(["user", "assistant", "system"])).required(),
    read("content", content).required(),
    no_effect("id", SENT_BACK),
    no_effect("type", SENT_BACK),
    no_effect("model", SENT_BACK),
    no_effect("stop_reason", SENT_BACK),
    no_effect("stop_sequence", SENT_BACK),
    no_effect("stop_details", SENT_BACK),
    no_effect("usage", SENT_BACK),
    no_effect("container", SENT_BACK),
    no_effect("context_management", SENT_BACK),
    no_effect("diagnostics", SENT_BACK),
    no_effect("input_transformations", SENT_BACK),
]]);

fn content(limits: &Limits) -> Schema {
    let blocks = [&BLOCK, &TOOL_USE, &TOOL_RESULT, &THINKING_BLOCK];
    either([text(limits), list(either(blocks.map(object)))])
}

pub static BLOCK: FieldTable = FieldTable::object("TextBlock").of(&[&[
    read("type", |_| constant("text")).required(),
    read("text", text).required(),
    read("cache_control", |_| object(&CACHE_CONTROL)).about(MARK),
    no_effect("citations", SENT_BACK),
    no_effect("parsed_output", SENT_BACK),
]]);

/// A mark after a block.
pub static CACHE_CONTROL: FieldTable = FieldTable::object("CacheControl").of(&[&[
    read("type", |_| constant("ephemeral")).required(),
    read("ttl", |_| one_of(["5m", "1h"]).or("5m"))
        .about("The time for which the prefix cache retains the prompt after each use."),
    no_effect("scope", "the cache salt says who shares a prefix"),
]]);

pub static THINKING: FieldTable = FieldTable::object("Thinking").of(&[&[
    read("type", |_| one_of(["enabled", "adaptive", "disabled"]))
        .required()
        .about(
            "Sets the variable by which a chat template switches thinking; \"adaptive\" \
                 leaves it to the model.",
        ),
    no_effect(
        "budget_tokens",
        "thoughts count to max_tokens, which bounds them too",
    ),
    // Claude Code sends "omitted". If answers omitted the text of thoughts, the model would not see its thoughts
    // after a call.
    no_effect("display", "thoughts are always sent, as a whole"),
]]);

pub static OUTPUT_CONFIG: FieldTable = FieldTable::object("OutputConfig").of(&[
    &[
        read("format", |_| schema_format()).about("The form of the answer's text."),
        read("effort", text).about(
            "Passed to a chat template that reads reasoning_effort, with \"xhigh\" and \
                 \"max\" as \"high\".",
        ),
    ],
    refused::IN_OUTPUT_CONFIG,
]);

/// A thought of the assistant. The signature is for Anthropic's own servers.
pub static THINKING_BLOCK: FieldTable = FieldTable::object("ThinkingBlock").of(&[&[
    read("type", |_| constant("thinking")).required(),
    read("thinking", text).required(),
    no_effect("signature", "it is not checked here"),
]]);

/// A tool call of the assistant.
pub static TOOL_USE: FieldTable = FieldTable::object("ToolUse").of(&[&[
    read("type", |_| constant("tool_use")).required(),
    read("id", text).required(),
    read("name", name).required(),
    read("input", any_object).required(),
    read("cache_control", |_| object(&CACHE_CONTROL)).about(MARK),
    no_effect("caller", SENT_BACK),
    no_effect("toolset_name", SENT_BACK),
]]);

pub static TOOL_RESULT: FieldTable = FieldTable::object("ToolResult").of(&[&[
    read("type", |_| constant("tool_result")).required(),
    read("tool_use_id", text).required(),
    read("content", |_| text_or(&BLOCK)),
    read("cache_control", |_| object(&CACHE_CONTROL)).about(MARK),
    no_effect(
        "is_error",
        "chat templates do not tell errors from other results",
    ),
    no_effect("toolset_name", SENT_BACK),
]]);

/// A tool that the request offers.
pub static TOOL: FieldTable = FieldTable::object("MessageTool").of(&[
    &[
        read("type", |_| constant("custom")),
        read("name", tool_name).required(),
        read("description", text),
        read("input_schema", any_object)
            .required()
            .about("A JSON schema."),
        read("cache_control", |_| object(&CACHE_CONTROL)).about(MARK),
        no_effect("strict", NO_SCHEMA),
        no_effect("allowed_callers", "only the caller calls tools"),
        no_effect("defer_loading", "all tools are part of the prompt"),
        no_effect(
            "eager_input_streaming",
            "arguments are sent as soon as they are known",
        ),
    ],
    refused::IN_MESSAGE_TOOL,
]);

pub static TOOL_CHOICE: FieldTable = FieldTable::object("MessageToolChoice").of(&[&[
    read("type", |_| one_of(["auto", "none", "any", "tool"]))
        .required()
        .about("\"any\" demands a call, and \"tool\" a call of the named tool."),
    read("name", text).about("The tool's name, with the type \"tool\"."),
    read("disable_parallel_tool_use", boolean).about("Permits at most one call."),
]]);
