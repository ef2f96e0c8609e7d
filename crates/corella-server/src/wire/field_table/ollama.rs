//! The fields of Ollama's API.

use serde_json::Value;

use super::{FieldTable, instead, is_empty, is_false, is_one, is_zero, never, refused};

const KEEP_ALIVE: (&str, &[&str]) = (
    "the model stays loaded for as long as the server runs",
    &["keep_alive"],
);

pub static CHAT: FieldTable = FieldTable {
    read: &[
        "model",
        "messages",
        "tools",
        "stream",
        "options",
        "format",
        "think",
        "logprobs",
        "top_logprobs",
    ],
    read_at: &[],
    no_effect: &[KEEP_ALIVE],
    refused: &[
        // A prompt that is too long is refused, so the switches change nothing.
        refused("truncate", Value::is_boolean),
        refused("shift", Value::is_boolean),
        refused("images", is_empty),
        refused("template", |value| value == ""),
        instead("prompt", "use messages, or /api/generate"),
        instead("system", "use a message with the role \"system\""),
        instead("temperature", "put it in options"),
        instead("seed", "put it in options"),
        instead("stop", "put it in options"),
        instead("max_tokens", "use options.num_predict"),
        instead("tool_choice", "leave it out, or use /v1/chat/completions"),
        instead("response_format", "use format"),
    ],
};

pub static GENERATE: FieldTable = FieldTable {
    read: &[
        "model",
        "prompt",
        "suffix",
        "system",
        "raw",
        "stream",
        "options",
        "format",
        "think",
        "logprobs",
        "top_logprobs",
    ],
    read_at: &[],
    no_effect: &[KEEP_ALIVE],
    refused: &[
        // A prompt that is too long is refused, so the switches change nothing.
        refused("truncate", Value::is_boolean),
        refused("shift", Value::is_boolean),
        refused("images", is_empty),
        refused("template", |value| value == ""),
        instead("context", "send the whole conversation to /api/chat").unless(is_empty),
        refused("width", never),
        refused("height", never),
        refused("steps", never),
        instead("messages", "use prompt, or /api/chat"),
        instead("tools", "use /api/chat").unless(is_empty),
        instead("temperature", "put it in options"),
        instead("seed", "put it in options"),
        instead("stop", "put it in options"),
        instead("max_tokens", "use options.num_predict"),
        instead("response_format", "use format"),
    ],
};

pub static EMBED: FieldTable = FieldTable {
    read: &["model", "input", "dimensions", "options"],
    read_at: &[],
    no_effect: &[KEEP_ALIVE],
    refused: &[
        refused("truncate", Value::is_boolean),
        instead("prompt", "use input, or /api/embeddings"),
        instead("encoding_format", "use /v1/embeddings").unless(|value| value == "float"),
    ],
};

/// The older form of `EMBED`.
pub static EMBEDDINGS: FieldTable = FieldTable {
    read: &["model", "prompt", "options"],
    read_at: &[],
    no_effect: &[KEEP_ALIVE],
    refused: &[
        refused("truncate", Value::is_boolean),
        instead("input", "use prompt, or /api/embed"),
        instead("dimensions", "use /api/embed"),
    ],
};

pub static SHOW: FieldTable = FieldTable {
    read: &["model", "name"],
    read_at: &[],
    no_effect: &[("all that is known is always told", &["verbose"])],
    refused: &[
        refused("system", |value| value == ""),
        refused("template", |value| value == ""),
        refused("options", is_empty),
    ],
};

pub static PULL: FieldTable = FieldTable {
    read: &["model", "name", "stream"],
    read_at: &[],
    no_effect: &[("nothing is fetched", &["insecure"])],
    refused: &[],
};

/// The members of `options`.
pub static OPTIONS: FieldTable = FieldTable {
    read: &[
        "num_predict",
        "num_ctx",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "seed",
        "stop",
        "repeat_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
    read_at: &[],
    no_effect: &[
        (
            "they say how the machine computes, which is set when the server starts",
            &[
                "num_gpu",
                "main_gpu",
                "num_thread",
                "num_batch",
                "use_mmap",
                "use_mlock",
                "numa",
                "low_vram",
                "f16_kv",
            ],
        ),
        (
            "they adjust a feature whose own field is refused",
            &["mirostat_tau", "mirostat_eta", "penalize_newline"],
        ),
        (
            "nothing is dropped from a context that is full",
            &["num_keep"],
        ),
    ],
    refused: &[
        instead(
            "repeat_last_n",
            "penalties count the whole context, which is -1; 64, Ollama's default, is taken as unset",
        )
        .unless(|value| *value == -1 || *value == 64),
        refused("mirostat", is_zero),
        refused("tfs_z", is_one),
        refused("typical_p", is_one),
        refused("vocab_only", is_false),
        refused("logits_all", is_false),
        refused("embedding_only", is_false),
    ],
};

/// A message. Calls of tools have no ids in most clients.
pub static MESSAGE: FieldTable = FieldTable {
    read: &[
        "role",
        "content",
        "thinking",
        "tool_calls",
        "tool_name",
        "tool_call_id",
    ],
    read_at: &[],
    no_effect: &[],
    refused: &[refused("images", is_empty)],
};

/// A tool call in an earlier message.
pub static CALL: FieldTable = FieldTable {
    read: &["id", "function"],
    read_at: &[],
    no_effect: &[(
        "a server or a client library wrote it into an answer that is now sent back",
        &["type", "index"],
    )],
    refused: &[],
};

/// The function of a tool call.
pub static CALLED_FUNCTION: FieldTable = FieldTable {
    read: &["name", "arguments"],
    read_at: &[],
    no_effect: &[(
        "a server or a client library wrote it into an answer that is now sent back",
        &["index", "description"],
    )],
    refused: &[],
};
