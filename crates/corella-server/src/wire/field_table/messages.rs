//! The fields of Anthropic's Messages API, and of the sampling that Corella adds to it.

use super::{FieldTable, instead, is_empty, is_false, is_true, never, refused};

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
        "tools",
        "tool_choice",
        "output_config",
        "min_p",
        "seed",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: &[
        (
            "they serve the caller's own accounting",
            &[
                "metadata",
                "service_tier",
                "inference_geo",
                "billing_policy",
                "fallback_credit_token",
            ],
        ),
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "the header names versions",
            &["anthropic_version", "anthropic_beta"],
        ),
        (
            "one model is served, and it declines no request",
            &["fallbacks"],
        ),
        (
            "only text is read: there are no features of images",
            &["mm_payload"],
        ),
        (
            "the model reads the whole conversation: nothing is cleared from it",
            &["context_management"],
        ),
        (
            "a server wrote it into an answer that is now sent back",
            &["diagnostics"],
        ),
    ],
    refused: &[
        refused("container", never),
        refused("mcp_servers", is_empty),
        instead("output_format", "use output_config.format"),
        refused("speed", |value| value == "standard"),
        instead("max_completion_tokens", "use max_tokens"),
        instead("stop", "use stop_sequences"),
        instead("prompt", "use messages"),
        instead("max_tokens_to_sample", "use max_tokens"),
        instead("compaction", "ask for a summary in a message"),
        instead("thread", "send the whole conversation"),
        // vLLM.
        instead(
            "chat_template_kwargs",
            "use thinking or output_config.effort",
        )
        .unless(is_empty),
        refused("kv_transfer_params", is_empty),
        refused("ec_transfer_params", is_empty),
        refused("return_mm_kwargs", is_true),
        refused("vllm_xargs", is_empty),
        refused("watermarking", is_false),
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
            "stop_details",
            "usage",
            "container",
            "context_management",
            "diagnostics",
            "input_transformations",
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
            &["citations", "parsed_output"],
        ),
    ],
    refused: &[],
};

/// The members of `thinking`.
pub static THINKING: FieldTable = FieldTable {
    read: &["type"],
    read_at: &[],
    no_effect: &[
        (
            "thoughts count to max_tokens, which bounds them too",
            &["budget_tokens"],
        ),
        // Claude Code sends "omitted". Without their text, the model would not see its thoughts after a call.
        ("thoughts are always sent, as a whole", &["display"]),
    ],
    refused: &[],
};

/// The members of `output_config`.
pub static OUTPUT_CONFIG: FieldTable = FieldTable {
    read: &["format", "effort"],
    read_at: &[],
    no_effect: &[],
    refused: &[refused("task_budget", never)],
};

/// A thought of the assistant. Its signature is for Anthropic's own servers.
pub static THINKING_BLOCK: FieldTable = FieldTable {
    read: &["type", "thinking"],
    read_at: &[],
    no_effect: &[("nobody checks it here", &["signature"])],
    refused: &[],
};

/// A tool call of the assistant.
pub static TOOL_USE: FieldTable = FieldTable {
    read: &["type", "id", "name", "input"],
    read_at: &[],
    no_effect: &[
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "a server wrote it into an answer that is now sent back",
            &["caller", "toolset_name"],
        ),
    ],
    refused: &[],
};

/// A tool's result.
pub static TOOL_RESULT: FieldTable = FieldTable {
    read: &["type", "tool_use_id", "content"],
    read_at: &[],
    no_effect: &[
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "chat templates do not tell errors from other results",
            &["is_error"],
        ),
        (
            "a server wrote it into an answer that is now sent back",
            &["toolset_name"],
        ),
    ],
    refused: &[],
};

/// An offered tool.
pub static TOOL: FieldTable = FieldTable {
    read: &["type", "name", "description", "input_schema"],
    read_at: &[],
    no_effect: &[
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "the schema of a call that the model is free to make is not enforced",
            &["strict"],
        ),
        ("the caller is who calls tools", &["allowed_callers"]),
        ("all tools are part of the prompt", &["defer_loading"]),
        (
            "arguments are sent as soon as they are known",
            &["eager_input_streaming"],
        ),
    ],
    refused: &[refused("input_examples", is_empty)],
};

pub static TOOL_CHOICE: FieldTable = FieldTable {
    read: &["type", "name", "disable_parallel_tool_use"],
    read_at: &[],
    no_effect: &[],
    refused: &[],
};
