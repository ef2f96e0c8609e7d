//! The fields of OpenAI's Responses API, and of the sampling that Corella adds to it.

use super::{FieldTable, instead, is_empty, is_false, is_true, never, refused};

pub static BODY: FieldTable = FieldTable {
    read: &[
        "model",
        "input",
        "instructions",
        "max_output_tokens",
        "stream",
        "temperature",
        "top_p",
        "top_logprobs",
        "include",
        "reasoning",
        "text",
        "metadata",
        "previous_response_id",
        "store",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "seed",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "ignore_eos",
        "priority",
        "ttft_slo_ms",
        "tpot_slo_ms",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: &[
        (
            "they serve the caller's own accounting and moderation",
            &[
                "user",
                "safety_identifier",
                "service_tier",
                "moderation",
                "access_programs",
                "client_metadata",
            ],
        ),
        (
            "the prefix cache needs no hints, and never changes an answer",
            &[
                "prompt_cache_key",
                "prompt_cache_retention",
                "prompt_cache_options",
                "session_id",
            ],
        ),
        (
            "it counts calls of tools that the server calls itself, and there are none",
            &["max_tool_calls"],
        ),
        (
            "it pads events against eavesdroppers, and usage is always part of the last one",
            &["stream_options"],
        ),
        ("the header x-request-id names responses", &["request_id"]),
        (
            "only text is read: there are no features of images",
            &["mm_payload"],
        ),
        (
            "the tokenizers that are supported put no spaces between special tokens",
            &["spaces_between_special_tokens"],
        ),
    ],
    refused: &[
        instead(
            "conversation",
            "use previous_response_id, or send the whole conversation as input",
        ),
        refused("background", is_false),
        refused("truncation", |value| value == "disabled"),
        refused("prompt", never),
        refused("image", is_empty),
        refused("context_management", is_empty),
        instead("messages", "use input"),
        instead("max_tokens", "use max_output_tokens"),
        instead("max_completion_tokens", "use max_output_tokens"),
        instead("reasoning_effort", "use reasoning.effort"),
        instead("response_format", "use text.format"),
        // vLLM.
        instead("structured_outputs", "use text.format"),
        instead("previous_input_messages", "send them in input").unless(is_empty),
        refused("enable_response_messages", is_false),
        refused("include_reasoning", is_true),
        refused("kv_transfer_params", is_empty),
        refused("ec_transfer_params", is_empty),
        refused("mm_processor_kwargs", is_empty),
        refused("media_io_kwargs", is_empty),
        refused("return_mm_kwargs", is_true),
        refused("vllm_xargs", is_empty),
        refused("watermarking", is_false),
    ],
};

/// The members of `text`.
pub static TEXT: FieldTable = FieldTable {
    read: &["format"],
    read_at: &[],
    no_effect: &[],
    refused: &[refused("verbosity", |value| value == "medium")],
};

/// The members of `reasoning`.
pub static REASONING: FieldTable = FieldTable {
    read: &["effort"],
    read_at: &[],
    no_effect: &[],
    refused: &[
        refused("summary", |value| value == "auto"),
        refused("generate_summary", |value| value == "auto"),
        refused("encrypted_content", never),
        refused("context", |value| value == "auto"),
        refused("mode", |value| value == "standard"),
    ],
};

/// The members of a message among the input items.
pub static MESSAGE: FieldTable = FieldTable {
    read: &["type", "role", "content"],
    read_at: &[],
    no_effect: &[(
        "a server wrote it into an answer that is now sent back",
        &["id", "status", "phase"],
    )],
    refused: &[],
};

/// A part of a message's content.
pub static CONTENT: FieldTable = FieldTable {
    read: &["type", "text"],
    read_at: &[],
    no_effect: &[
        (
            "a server wrote it into an answer that is now sent back",
            &["annotations", "logprobs", "parsed"],
        ),
        (
            "the prefix cache needs no hints",
            &["prompt_cache_breakpoint"],
        ),
    ],
    refused: &[],
};

/// The members of an offered tool.
pub static TOOL: FieldTable = FieldTable {
    read: &["type", "name", "description", "parameters"],
    read_at: &[],
    no_effect: &[
        (
            "the schema of a call that the model is free to make is not enforced",
            &["strict"],
        ),
        ("all tools are part of the prompt", &["defer_loading"]),
        ("the caller is who calls tools", &["allowed_callers"]),
        ("a turn ends with its calls", &["async"]),
        (
            "chat templates describe what tools take, not what they return",
            &["output_schema"],
        ),
    ],
    refused: &[],
};

/// A tool call among the input items.
pub static CALL: FieldTable = FieldTable {
    read: &["type", "call_id", "name", "arguments"],
    read_at: &[],
    no_effect: &[(
        "a server wrote it into an answer that is now sent back",
        &[
            "id",
            "status",
            "namespace",
            "caller",
            "async",
            "async_",
            "created_by",
            "parsed_arguments",
        ],
    )],
    refused: &[],
};

/// A tool's result.
pub static CALL_OUTPUT: FieldTable = FieldTable {
    read: &["type", "call_id", "output"],
    read_at: &[],
    no_effect: &[(
        "a client library wrote it",
        &["id", "status", "caller", "created_by", "name", "namespace"],
    )],
    refused: &[],
};

/// An item of an earlier response.
pub static REFERENCE: FieldTable = FieldTable {
    read: &["type", "id"],
    read_at: &[],
    no_effect: &[],
    refused: &[],
};

/// A thought of the model. Encrypted thoughts belong to another server.
pub static THOUGHT: FieldTable = FieldTable {
    read: &["type", "content"],
    read_at: &[],
    no_effect: &[(
        "a server wrote it into an answer that is now sent back",
        &["id", "status", "summary", "encrypted_content"],
    )],
    refused: &[],
};
