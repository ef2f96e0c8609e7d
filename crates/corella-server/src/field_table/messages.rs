//! The fields of Anthropic's Messages API, and of the sampling that Corella adds to it.

use super::{FieldTable, instead, is_empty, refused};

pub static BODY: FieldTable = FieldTable {
    read: &[
        "model",
        "messages",
        "system",
        "max_tokens",
        "stop_sequences",
        "stream",
        "temperature",
        "top_p",
        "top_k",
        "thinking",
        "min_p",
        "seed",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: &[
        (
            "they serve the caller's own accounting",
            &["metadata", "service_tier", "inference_geo"],
        ),
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "the header names versions",
            &["anthropic_version", "anthropic_beta"],
        ),
    ],
    refused: &[
        refused("tools", is_empty),
        refused("tool_choice", |choice| {
            choice["type"] == "none" || choice["type"] == "auto"
        }),
        refused("container", |_| false),
        refused("context_management", is_empty),
        refused("mcp_servers", is_empty),
        refused("output_config", is_empty),
        refused("output_format", |_| false),
        refused("speed", |value| value == "standard"),
        refused("diagnostics", is_empty),
        instead("max_completion_tokens", "use max_tokens"),
        instead("stop", "use stop_sequences"),
        instead("prompt", "use messages"),
        instead("max_tokens_to_sample", "use max_tokens"),
    ],
};

pub static MESSAGE: FieldTable = FieldTable {
    read: &["role", "content"],
    read_at: &[],
    no_effect: &[(
        "a server wrote it into an answer that is now sent back",
        &[
            "id",
            "type",
            "model",
            "stop_reason",
            "stop_sequence",
            "usage",
            "container",
        ],
    )],
    refused: &[],
};

/// A block of text.
pub static BLOCK: FieldTable = FieldTable {
    read: &["type", "text"],
    read_at: &[],
    no_effect: &[
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "a server wrote it into an answer that is now sent back",
            &["citations"],
        ),
    ],
    refused: &[],
};
