//! The fields of OpenAI's Responses API, and of the objects within them.

use serde_json::json;

use super::chat::{
    CACHE_HINT, CHAT_TEMPLATE_KWARGS, NO_SCHEMA, PARALLEL_TOOL_CALLS, SENT_BACK, name, tool_name,
    tools_allowed,
};
use super::sampling::{CONTROL, DRAW, MODEL, PENALTIES, QUEUE, STREAM, free_format, schema_format};
use super::schema::{
    Limits, Schema, any_object, constant, count, either, list, num_logprobs, object, on, one_of,
    text, text_or,
};
use super::{Field, FieldTable, no_effect, read, refused};

/// The value of `include` that asks for log-probabilities.
pub const LOGPROBS: &str = "message.output_text.logprobs";
/// Values of `include` without effect: they ask for members that no answer of this server has. Thoughts are never
/// encrypted.
pub const NEVER_THERE: [&str; 7] = [
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
];
const LIBRARY: &str = "a client library wrote it";

pub static BODY: FieldTable = FieldTable::body("ResponsesRequest").of(&[
    OWN,
    MODEL,
    STREAM,
    DRAW,
    PENALTIES,
    QUEUE,
    CONTROL,
    refused::RESPONSES,
]);

static OWN: &[Field] = &[
    read("input", input)
        .required()
        .about("A message of the user, or items of a conversation."),
    read("instructions", text).about("The first message, with the role \"system\"."),
    read("max_output_tokens", count).about("The default is the rest of the context."),
    read("include", |_| {
        list(one_of([LOGPROBS].into_iter().chain(NEVER_THERE))).sized(0..=16)
    })
    .about("Only log-probabilities have an effect: no answer has the other members."),
    read("top_logprobs", num_logprobs)
        .about("Returns log-probabilities, with this many alternatives to each token."),
    read("reasoning", |_| object(&REASONING)),
    read("text", |_| object(&TEXT)),
    read("metadata", any_object).about("Repeated in the answer."),
    read("previous_response_id", text).about(
        "Goes on behind this answer, and the conversation before it. Its instructions are not \
         carried over.",
    ),
    read("store", on).about("Whether the answer is kept, as far as there is memory."),
    read("tools", |_| list(object(&TOOL))).about(
        "Functions that the model may call. Tools that OpenAI's servers run, and custom ones, are \
         left out.",
    ),
    read("tool_choice", tool_choice)
        .about("Whether tools may or must be called. The default is \"auto\"."),
    PARALLEL_TOOL_CALLS,
    CHAT_TEMPLATE_KWARGS,
    no_effect("access_programs", "it serves the caller's own accounting"),
    no_effect("client_metadata", "it serves the caller's own accounting"),
    no_effect(
        "max_tool_calls",
        "it counts calls of tools that the server calls itself, and there are none",
    ),
    no_effect(
        "stream_options",
        "it pads events against eavesdroppers, and usage is always part of the last one",
    ),
];

pub static TEXT: FieldTable = FieldTable::object("TextOptions").of(&[
    &[read("format", |_| either([free_format(), schema_format()]))
        .about("The form of the answer's text.")],
    refused::IN_TEXT,
]);

pub static REASONING: FieldTable = FieldTable::object("Reasoning").of(&[
    &[read("effort", text).about("As reasoning_effort of a chat.")],
    refused::IN_REASONING,
]);

pub static MESSAGE: FieldTable = FieldTable::object("InputMessage").of(&[&[
    read("type", |_| constant("message")),
    read("role", |_| {
        one_of(["user", "assistant", "system", "developer"])
    })
    .required(),
    read("content", |_| text_or(&CONTENT)).required(),
    no_effect("id", SENT_BACK),
    no_effect("status", SENT_BACK),
    no_effect("phase", SENT_BACK),
]]);

pub static CONTENT: FieldTable = FieldTable::object("InputText").of(&[&[
    read("type", |_| one_of(["input_text", "output_text", "text"])).required(),
    read("text", text).required(),
    no_effect("annotations", SENT_BACK),
    no_effect("logprobs", SENT_BACK),
    no_effect("parsed", SENT_BACK),
    no_effect("prompt_cache_breakpoint", CACHE_HINT),
]]);

pub static TOOL: FieldTable = FieldTable::object("ResponseTool").of(&[&[
    read("type", |_| constant("function")).required(),
    read("name", tool_name).required(),
    read("description", text),
    read("parameters", any_object).about("A JSON schema."),
    no_effect("strict", NO_SCHEMA),
    no_effect("defer_loading", "all tools are part of the prompt"),
    no_effect("allowed_callers", "only the caller calls tools"),
    no_effect("async", "a turn ends with its calls"),
    no_effect(
        "output_schema",
        "chat templates describe what tools take, not what they return",
    ),
]]);

pub static CALL: FieldTable = FieldTable::object("InputCall").of(&[&[
    read("type", |_| constant("function_call")).required(),
    read("call_id", text).required(),
    read("name", name).required(),
    read("arguments", text).required().about("JSON."),
    no_effect("id", SENT_BACK),
    no_effect("status", SENT_BACK),
    no_effect("namespace", SENT_BACK),
    no_effect("caller", SENT_BACK),
    no_effect("async", SENT_BACK),
    no_effect("async_", SENT_BACK),
    no_effect("created_by", SENT_BACK),
    no_effect("parsed_arguments", SENT_BACK),
]]);

pub static CALL_OUTPUT: FieldTable = FieldTable::object("InputCallOutput").of(&[&[
    read("type", |_| constant("function_call_output")).required(),
    read("call_id", text).required(),
    read("output", |_| text_or(&CONTENT)).required(),
    no_effect("id", LIBRARY),
    no_effect("status", LIBRARY),
    no_effect("caller", LIBRARY),
    no_effect("created_by", LIBRARY),
    no_effect("name", LIBRARY),
    no_effect("namespace", LIBRARY),
]]);

/// A reference to an item of an earlier response.
pub static REFERENCE: FieldTable = FieldTable::object("InputReference").of(&[&[
    read("type", |_| constant("item_reference")).required(),
    read("id", text).required(),
]]);

/// A thought of the model. Encrypted thoughts come from another server and have no effect.
pub static THOUGHT: FieldTable = FieldTable::object("InputThought").of(&[&[
    read("type", |_| constant("reasoning")).required(),
    read("content", |_| {
        list(Schema::of(json!({
            "type": "object",
            "required": ["type", "text"],
            "additionalProperties": false,
            "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}},
        })))
    }),
    no_effect("id", SENT_BACK),
    no_effect("status", SENT_BACK),
    no_effect("summary", SENT_BACK),
    no_effect("encrypted_content", SENT_BACK),
]]);

fn input(limits: &Limits) -> Schema {
    let items = [&MESSAGE, &CALL, &CALL_OUTPUT, &THOUGHT, &REFERENCE];
    let items = list(either(items.map(object))).sized(1..=limits.max_model_len as usize);
    either([text(limits), items])
}

fn tool_choice(limits: &Limits) -> Schema {
    let named = json!({
        "type": "object",
        "required": ["type", "name"],
        "properties": {"type": {"const": "function"}, "name": tool_name(limits).into_json()},
    });
    let mut allowed = tools_allowed(named.clone());
    allowed["type"] = json!({"const": "allowed_tools"});
    either([
        one_of(["auto", "none", "required"]),
        Schema::of(named),
        Schema::of(json!({
            "type": "object",
            "required": ["type", "mode", "tools"],
            "properties": allowed,
        })),
    ])
}
