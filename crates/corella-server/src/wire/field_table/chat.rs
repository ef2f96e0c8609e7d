//! The fields of chat, completions and tokenising, and of the objects within them.

use serde_json::{Value, json};

use super::sampling::{ANSWER, CONTROL, DRAW, MODEL, PENALTIES, QUEUE, STREAM};
use super::schema::{
    Limits, Schema, any_object, anything, boolean, constant, either, list, num_choices,
    num_logprobs, object, off, on, one_of, prompts, text, text_or, token, tokens,
};
use super::{Field, FieldTable, no_effect, read, refused};
use crate::wire::field_limit::MAX_TOOL_NAME_BYTES;

pub const CACHE_HINT: &str = "the prefix cache needs no hints";
pub const SENT_BACK: &str = "a server wrote it into an answer that is now sent back";
pub const NO_SCHEMA: &str = "the schema of a call that the model is free to make is not enforced";
pub const LIBRARY: &str =
    "a server or a client library wrote it into an answer that is now sent back";
const OWN_NOTE: &str = "client libraries store it with a message for themselves";
const FOR_TEMPLATE: &str = "Passed to the chat template as it is.";

pub static CHAT: FieldTable = FieldTable::body("ChatRequest").of(&[
    MESSAGES,
    CHAT_ONLY,
    MODEL,
    STREAM,
    DRAW,
    PENALTIES,
    QUEUE,
    CONTROL,
    ANSWER,
    TEMPLATE,
    refused::GENERATING,
]);

pub static COMPLETIONS: FieldTable = FieldTable::body("CompletionsRequest").of(&[
    COMPLETIONS_ONLY,
    MODEL,
    STREAM,
    DRAW,
    PENALTIES,
    QUEUE,
    CONTROL,
    ANSWER,
    refused::GENERATING,
]);

pub static TOKENIZE: FieldTable = FieldTable::body("TokenizeRequest")
    .beside(&[&CHAT, &COMPLETIONS])
    .of(&[TOKENIZE_ONLY, MODEL, TEMPLATE, refused::GENERATING]);

pub static DETOKENIZE: FieldTable = FieldTable::body("DetokenizeRequest").beside(&[&CHAT]).of(&[
    &[read("tokens", |limits| {
        list(token(limits)).sized(0..=limits.max_model_len as usize)
    })
    .required()],
    MODEL,
    refused::GENERATING,
]);

pub static APPLY_TEMPLATE: FieldTable = FieldTable::body("ApplyTemplateRequest")
    .beside(&[&CHAT])
    .of(&[MESSAGES, MODEL, TEMPLATE, refused::GENERATING]);

static MESSAGES: &[Field] = &[read("messages", conversation)
    .required()
    .about("The conversation so far.")];

/// Fields that decide how the chat template writes the conversation.
static TEMPLATE: &[Field] = &[
    read("add_generation_prompt", boolean).about(
        "Ends the prompt with the beginning of an assistant message. The default is true, unless \
         continue_final_message is.",
    ),
    read("continue_final_message", boolean).about(
        "The answer continues the last message. The default is whether this is of the assistant \
         and has \"prefix\": true or \"partial\": true.",
    ),
    CHAT_TEMPLATE_KWARGS,
    read("reasoning_effort", text).about(
        "A variable for the template. One that reads enable_thinking instead does not think with \
         \"none\".",
    ),
    read("tools", |_| list(object(&TOOL))).about("Functions that the model may call."),
    read("tool_choice", tool_choice)
        .about("Whether tools may or must be called. The default is \"auto\"."),
    PARALLEL_TOOL_CALLS,
];

pub const CHAT_TEMPLATE_KWARGS: Field = read("chat_template_kwargs", any_object)
    .about("Further variables for the template, such as {\"enable_thinking\": false}.");
pub const PARALLEL_TOOL_CALLS: Field =
    read("parallel_tool_calls", on).about("Without it, there is one call at most.");

static CHAT_ONLY: &[Field] = &[
    read("tokens", |_| object(&SENT_TOKENS))
        .about("The prompt as /v1/chat/completions/render has tokenised it. It is used as it is."),
    read("logprobs", off).about("Returns the log-probability of each token."),
    read("top_logprobs", num_logprobs)
        .about("With logprobs: also returns this many most likely alternatives."),
    read("echo", |_| one_of([false])).about("Only a prompt of /v1/completions can be repeated."),
];

pub static SENT_TOKENS: FieldTable = FieldTable::object("SentTokens").of(&[&[
    read("token_ids", tokens).required(),
    no_effect(
        "features",
        "models read text only, for which it has no members",
    ),
]]);

static COMPLETIONS_ONLY: &[Field] = &[
    read("prompt", |limits| {
        prompts(limits, limits.max_num_choices as usize)
    })
    .required()
    .about("Choices are in the order of the prompts."),
    read("best_of", num_choices).about(
        "Generates this many choices and returns the n with the highest mean log-probability of a \
         token, the best one first. The default is n, as it must be in a stream.",
    ),
    read("suffix", text).about(
        "The text behind the answer, for models whose vocabulary has tokens for it. Not with echo.",
    ),
    read("echo", off).about("The text begins with the prompt, and so does logprobs."),
    read("logprobs", num_logprobs)
        .about("Returns log-probabilities, with this many alternatives to each token."),
];

static TOKENIZE_ONLY: &[Field] = &[
    read("prompt", text).about("The text, unless there are messages or content."),
    read("messages", conversation).about("A conversation, which the chat template writes."),
    read("content", text).about("The text under llama-server's name, which is answered as there."),
    read("add_special_tokens", boolean).about(
        "Whether the tokenizer adds its special tokens. The default is true for a prompt, else \
         false.",
    ),
    read("return_token_strs", off).about("Returns the text of each token."),
    read("add_special", boolean)
        .about("With content: whether the tokenizer adds its special tokens."),
    read("with_pieces", off).about("With content: whether each token comes with its text."),
];

pub static MESSAGE: FieldTable = FieldTable::object("ChatMessage").of(&[
    &[
        read("role", text).required(),
        read("content", |_| text_or(&CONTENT_PART)).about(
            "A text, or parts that are joined by line breaks. The assistant's may be missing.",
        ),
        read("tool_calls", |_| list(object(&CALL))),
        read("name", anything).about(FOR_TEMPLATE),
        read("tool_call_id", anything).about(FOR_TEMPLATE),
        read("reasoning", anything).about(FOR_TEMPLATE),
        read("reasoning_content", anything).about(FOR_TEMPLATE),
        read("thinking", anything).about(FOR_TEMPLATE),
        read("prefix", anything).about("With true, the answer continues the message."),
        read("partial", anything).about("With true, the answer continues the message."),
        no_effect("refusal", SENT_BACK),
        no_effect("annotations", SENT_BACK),
        no_effect("id", SENT_BACK),
        no_effect("index", SENT_BACK),
        no_effect("weight", SENT_BACK),
        no_effect("stop_reason", SENT_BACK),
        no_effect("cache_control", CACHE_HINT),
        no_effect("provider_specific_fields", OWN_NOTE),
        no_effect("additional_kwargs", OWN_NOTE),
        no_effect("thinking_blocks", OWN_NOTE),
        no_effect("parsed", OWN_NOTE),
        no_effect("thread", OWN_NOTE),
    ],
    refused::IN_MESSAGE,
]);

/// The code that reads content parts checks `type`.
pub static CONTENT_PART: FieldTable = FieldTable::object("ChatText").of(&[
    &[
        read("type", |_| constant("text")).required(),
        read("text", text).required(),
        no_effect("cache_control", CACHE_HINT),
        no_effect("prompt_cache_breakpoint", CACHE_HINT),
        no_effect("annotations", SENT_BACK),
        no_effect("id", SENT_BACK),
        no_effect("index", SENT_BACK),
        no_effect("extras", SENT_BACK),
    ],
    refused::IN_CONTENT_PART,
]);

pub static CALL: FieldTable = FieldTable::object("ToolCall").of(&[&[
    read("type", |_| constant("function")),
    read("id", anything).about(FOR_TEMPLATE),
    read("function", |_| object(&CALLED_FUNCTION)).required(),
    no_effect("index", LIBRARY),
    no_effect("parsed_arguments", LIBRARY),
    no_effect("extra_content", LIBRARY),
]]);

pub static CALLED_FUNCTION: FieldTable = FieldTable::object("CalledFunction").of(&[&[
    read("name", name).required(),
    read("arguments", |_| {
        Schema::of(json!({"type": ["string", "object"]}))
    })
    .about("JSON, as an answer has it."),
    no_effect("parsed_arguments", LIBRARY),
]]);

pub static TOOL: FieldTable = FieldTable::object("Tool").of(&[&[
    read("type", |_| constant("function")).required(),
    read("function", |_| object(&FUNCTION)).required(),
    no_effect("cache_control", CACHE_HINT),
]]);

/// The chat template sees all members of a function.
pub static FUNCTION: FieldTable = FieldTable::object("Function").of(&[&[
    read("name", tool_name).required(),
    read("description", text),
    read("parameters", any_object).about("A JSON schema."),
    read("return", anything).about(FOR_TEMPLATE),
    no_effect("strict", NO_SCHEMA),
]]);

fn conversation(limits: &Limits) -> Schema {
    list(object(&MESSAGE)).sized(1..=limits.max_model_len as usize)
}

/// A name that is not empty.
pub fn name(_: &Limits) -> Schema {
    Schema::of(json!({"type": "string", "minLength": 1}))
}

pub fn tool_name(_: &Limits) -> Schema {
    Schema::of(json!({
        "type": "string",
        "minLength": 1,
        "maxLength": MAX_TOOL_NAME_BYTES,
        "pattern": "^[a-zA-Z0-9_.-]+$",
    }))
}

fn tool_choice(limits: &Limits) -> Schema {
    let named = json!({
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": tool_name(limits).into_json()},
            },
        },
    });
    either([
        one_of(["auto", "none", "required"]),
        Schema::of(named.clone()),
        Schema::of(json!({
            "type": "object",
            "required": ["type", "allowed_tools"],
            "properties": {
                "type": {"const": "allowed_tools"},
                "allowed_tools": {
                    "type": "object",
                    "required": ["mode", "tools"],
                    "properties": tools_allowed(named),
                },
            },
        })),
    ])
}

/// The members of `allowed_tools`. `named` is the schema of one tool in it.
pub fn tools_allowed(named: Value) -> Value {
    json!({
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": named},
    })
}
