//! The fields of Ollama's API, and of the objects within them.

use serde_json::json;

use super::chat::{LIBRARY, TOOL};
use super::sampling::{DRAW, MODEL, PENALTIES, repetition_penalty};
use super::schema::{
    Limits, Schema, any_integer, any_object, either, integer, list, num_logprobs, object, off, on,
    one_of, text, tokens,
};
use super::{Field, FieldTable, no_effect, read, refused};
use crate::wire::field_limit::MAX_NUM_PROMPTS;

pub static CHAT: FieldTable = FieldTable::body("OllamaChatRequest").of(&[
    &[
        read("messages", |limits| {
            list(object(&MESSAGE)).sized(0..=limits.max_model_len as usize)
        })
        .about("The conversation so far."),
        read("tools", |_| list(object(&TOOL))).about("Functions that the model may call."),
    ],
    MODEL,
    ANSWER,
    refused::OLLAMA_CHAT,
    refused::OLLAMA_GENERATING,
]);

pub static GENERATE: FieldTable = FieldTable::body("OllamaGenerateRequest").of(&[
    &[
        read("prompt", text).about("A message of the user; with raw or suffix, a text."),
        read("suffix", text).about("The text behind the answer."),
        read("system", text).about("The first message, with the role \"system\"."),
        read("raw", off).about("Leaves the chat template out."),
    ],
    MODEL,
    ANSWER,
    refused::OLLAMA_GENERATE,
    refused::OLLAMA_GENERATING,
]);

pub static EMBED: FieldTable = FieldTable::body("OllamaEmbedRequest").of(&[
    &[
        read("input", input).about("A text or several. Without any, there is no vector."),
        read("dimensions", |limits| integer(1..=limits.vector_len as i64))
            .about("Keeps this many values of each vector."),
    ],
    MODEL,
    OPTIONS_FIELD,
    refused::OLLAMA_EMBED,
]);

/// The older form of `EMBED`.
pub static EMBEDDINGS: FieldTable = FieldTable::body("OllamaEmbeddingsRequest").of(&[
    &[read("prompt", text).about("A text. Without it, there is no vector.")],
    MODEL,
    OPTIONS_FIELD,
    refused::OLLAMA_EMBEDDINGS,
]);

pub static SHOW: FieldTable = FieldTable::body("OllamaShowRequest").of(&[
    MODEL,
    &[
        read("name", text).about("The older name of model."),
        no_effect("verbose", "all that is known is always told"),
    ],
    refused::OLLAMA_SHOW,
]);

pub static PULL: FieldTable = FieldTable::body("OllamaPullRequest").of(&[
    MODEL,
    &[
        read("name", text).about("The older name of model."),
        LINES,
        no_effect("insecure", "nothing is fetched"),
    ],
]);

const KEEP_ALIVE: Field = read("keep_alive", |_| {
    const DURATION: &str = "^[+-]?([0-9]+([.][0-9]+)?(ns|us|ms|s|m|h))+$";
    Schema::of(json!({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DURATION}]}))
})
.about(
    "How long the model stays loaded afterwards, in seconds or as a duration such as \"5m\". A negative one means for \
     ever, and 0 unloads the model. Without effect if the model stays loaded in any case.",
);

const LINES: Field = read("stream", on).about("Whether the answer comes as lines of JSON.");

static OPTIONS_FIELD: &[Field] = &[KEEP_ALIVE, read("options", |_| object(&OPTIONS))];

static ANSWER: &[Field] = &[
    KEEP_ALIVE,
    LINES,
    read("options", |_| object(&OPTIONS)),
    read("format", |limits| {
        either([one_of(["", "json"]), any_object(limits)])
    })
    .about("The form of the answer's text: any JSON, or a JSON schema."),
    read("think", |_| {
        Schema::of(json!({"type": ["boolean", "string"]}))
    })
    .about("Whether the model thinks, or an effort such as \"high\"."),
    read("logprobs", off).about("Returns the log-probability of each token."),
    read("top_logprobs", num_logprobs)
        .about("With logprobs: also returns this many most likely alternatives."),
];

pub static OPTIONS: FieldTable = FieldTable::body("OllamaOptions").of(&[
    &[
        read("num_predict", any_integer)
            .about("The most tokens, as far as they fit. 0 and negative numbers are no limit."),
        read("num_ctx", any_integer)
            .about("The context is the server's: less or more changes nothing."),
        read("repeat_penalty", repetition_penalty)
            .about("As repetition_penalty of the other endpoints, over the whole context."),
        no_effect("num_keep", "nothing is dropped from a context that is full"),
    ],
    DRAW,
    PENALTIES,
    refused::IN_OLLAMA_OPTIONS,
]);

/// Most clients send calls of tools without ids.
pub static MESSAGE: FieldTable = FieldTable::object("OllamaMessage").of(&[
    &[
        read("role", |_| one_of(["user", "assistant", "system", "tool"])).required(),
        read("content", text),
        read("thinking", text),
        read("tool_calls", |_| list(object(&CALL))),
        read("tool_name", text),
        read("tool_call_id", text),
    ],
    refused::IN_OLLAMA_MESSAGE,
]);

pub static CALL: FieldTable = FieldTable::object("OllamaCall").of(&[&[
    read("id", text),
    read("function", |_| object(&CALLED_FUNCTION)).required(),
    no_effect("type", LIBRARY),
    no_effect("index", LIBRARY),
]]);

pub static CALLED_FUNCTION: FieldTable = FieldTable::object("OllamaFunction").of(&[&[
    read("name", text).required(),
    read("arguments", any_object),
    no_effect("index", LIBRARY),
    no_effect("description", LIBRARY),
]]);

/// Empty inputs only ask to load the model.
fn input(limits: &Limits) -> Schema {
    let tokens = || tokens(limits).sized(0..=limits.max_model_len as usize);
    let several = list(either([text(limits), tokens()])).sized(0..=MAX_NUM_PROMPTS);
    either([text(limits), tokens(), several])
}
