//! The JSON schemas of answers and errors.

use serde_json::{Map, Value, json};

use super::{ollama, reference};
use crate::batches::ENDPOINTS;

pub fn answer_schemas() -> Map<String, Value> {
    let token_ids = json!({"type": "array", "items": {"type": "integer"}});
    let finish_reason = json!({"enum": ["stop", "length", "tool_calls"]});
    let stop_reason = json!({"type": ["string", "integer", "null"]});
    let tool_call = json!({
        "type": "object", "required": ["id", "type", "function"], "properties": {
            "id": {"type": "string", "minLength": 1},
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name", "arguments"], "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": {"type": "string"},
            }},
        },
    });
    let chat_choice = strict(
        json!({
            "index": {"type": "integer"},
            "message": {"type": "object", "required": ["role", "content"], "properties": {
                "role": {"const": "assistant"},
                "content": {"type": ["string", "null"]},
                "reasoning_content": {"type": "string"},
                "tool_calls": {"type": "array", "minItems": 1, "items": tool_call},
            }},
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }),
        &["index", "message", "finish_reason"],
    );
    let choice = strict(
        json!({
            "index": {"type": "integer"},
            "text": {"type": "string"},
            "logprobs": {"type": ["object", "null"]},
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
            "token_ids": token_ids,
            "prompt_token_ids": token_ids,
        }),
        &["index", "text", "finish_reason"],
    );
    let completion = |object: &str, choice: Value| {
        strict(
            json!({
                "id": {"type": "string"},
                "object": {"const": object},
                "created": {"type": "integer"},
                "model": {"type": "string"},
                "choices": {"type": "array", "items": choice, "minItems": 1},
                "usage": reference("Usage"),
            }),
            &["id", "object", "created", "model", "choices", "usage"],
        )
    };
    let model = strict(
        json!({
            "id": {"type": "string"},
            "object": {"const": "model"},
            "created": {"type": "integer"},
            "owned_by": {"type": "string"},
            "max_model_len": {"type": "integer", "minimum": 1},
        }),
        &["id", "object", "created", "owned_by"],
    );
    let pairs = [
        ("ChatCompletion", completion("chat.completion", chat_choice)),
        ("Completion", completion("text_completion", choice)),
        (
            "Usage",
            strict(
                json!({
                    "prompt_tokens": {"type": "integer", "minimum": 0},
                    "completion_tokens": {"type": "integer", "minimum": 0},
                    "total_tokens": {"type": "integer", "minimum": 0},
                    "prompt_tokens_details": {"type": "object", "properties": {
                        "cached_tokens": {"type": "integer", "minimum": 0},
                    }},
                    "completion_tokens_details": {"type": "object", "properties": {
                        "reasoning_tokens": {"type": "integer", "minimum": 0},
                    }},
                }),
                &["prompt_tokens", "completion_tokens", "total_tokens"],
            ),
        ),
        ("OllamaMessageAnswer", ollama::answer("message")),
        ("OllamaTextAnswer", ollama::answer("response")),
        ("OllamaVectors", ollama::vectors()),
        ("OllamaVector", ollama::vector()),
        ("OllamaModelList", ollama::model_list()),
        ("OllamaModelInfo", ollama::model_info()),
        ("OllamaError", ollama::error()),
        (
            "Deleted",
            strict(
                json!({
                    "id": {"type": "string"},
                    "object": {"type": "string"},
                    "deleted": {"const": true},
                }),
                &["id", "object", "deleted"],
            ),
        ),
        (
            "ObjectList",
            strict(
                json!({
                    "object": {"const": "list"},
                    "data": {"type": "array", "items": {"type": "object", "required": ["id"]}},
                    "first_id": {"type": ["string", "null"]},
                    "last_id": {"type": ["string", "null"]},
                    "has_more": {"type": "boolean"},
                }),
                &["object", "data", "has_more"],
            ),
        ),
        ("File", file()),
        ("Batch", batch()),
        ("Response", response()),
        ("Message", message()),
        (
            "TokenCount",
            strict(
                json!({"input_tokens": {"type": "integer", "minimum": 1}}),
                &["input_tokens"],
            ),
        ),
        (
            "Embeddings",
            list(json!({
                "object": {"const": "embedding"},
                "index": {"type": "integer"},
                "embedding": {"anyOf": [
                    {"type": "array", "items": {"type": "number"}, "minItems": 1},
                    {"type": "string", "description": "Base64 of little-endian f32."},
                ]},
            })),
        ),
        (
            "Scores",
            list(json!({
                "object": {"const": "score"},
                "index": {"type": "integer"},
                "score": {"type": "number"},
            })),
        ),
        ("Reranked", reranked()),
        (
            "PoolingUsage",
            strict(
                json!({
                    "prompt_tokens": {"type": "integer", "minimum": 1},
                    "total_tokens": {"type": "integer", "minimum": 1},
                }),
                &["prompt_tokens", "total_tokens"],
            ),
        ),
        (
            "Tokenized",
            strict(
                json!({
                    "count": {"type": "integer", "minimum": 0},
                    "max_model_len": {"type": "integer", "minimum": 1},
                    "tokens": token_ids,
                    "token_strs": {"type": ["array", "null"], "items": {"type": ["string", "null"]}},
                }),
                &["count", "max_model_len", "tokens"],
            ),
        ),
        (
            "Detokenized",
            strict(json!({"prompt": {"type": "string"}}), &["prompt"]),
        ),
        ("Model", model),
        (
            "ModelList",
            strict(
                json!({
                    "object": {"const": "list"},
                    "data": {"type": "array", "items": reference("Model"), "minItems": 1},
                }),
                &["object", "data"],
            ),
        ),
        (
            "Role",
            strict(
                json!({
                    "role": {"type": "string"},
                    "changing_to": {"type": ["string", "null"]},
                }),
                &["role"],
            ),
        ),
        (
            "Version",
            strict(json!({"version": {"type": "string"}}), &["version"]),
        ),
        (
            "Document",
            json!({"type": "object", "required": ["openapi", "info", "paths"]}),
        ),
        (
            "Error",
            strict(
                json!({
                    "error": strict(json!({
                        "message": {"type": "string", "minLength": 1},
                        "type": {"type": "string", "minLength": 1},
                        "param": {"type": ["string", "null"], "description": "The field that is to blame."},
                        "code": {"type": ["string", "null"]},
                    }), &["message", "type", "param", "code"]),
                }),
                &["error"],
            ),
        ),
        (
            "AnthropicError",
            strict(
                json!({
                    "type": {"const": "error"},
                    "error": strict(json!({
                        "type": {"type": "string", "minLength": 1},
                        "message": {"type": "string", "minLength": 1},
                    }), &["type", "message"]),
                    "request_id": {"type": "string"},
                }),
                &["type", "error"],
            ),
        ),
    ];
    Map::from_iter(pairs.map(|(name, schema)| (name.to_owned(), schema)))
}

/// An answer with one object for each input.
fn list(item: Value) -> Value {
    let names: Vec<&String> = item.as_object().into_iter().flat_map(Map::keys).collect();
    let item = strict(
        item.clone(),
        &names.iter().map(|name| name.as_str()).collect::<Vec<_>>(),
    );
    strict(
        json!({
            "id": {"type": "string"},
            "object": {"const": "list"},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "data": {"type": "array", "items": item, "minItems": 1},
            "usage": reference("PoolingUsage"),
        }),
        &["id", "object", "created", "model", "data", "usage"],
    )
}

fn reranked() -> Value {
    let result = strict(
        json!({
            "index": {"type": "integer"},
            "document": {"type": "object", "properties": {"text": {"type": "string"}}},
            "relevance_score": {"type": "number"},
        }),
        &["index", "relevance_score"],
    );
    strict(
        json!({
            "id": {"type": "string"},
            "model": {"type": "string"},
            "usage": reference("PoolingUsage"),
            "results": {"type": "array", "items": result, "minItems": 1},
        }),
        &["id", "model", "usage", "results"],
    )
}

/// An object that has all of `required`, and perhaps more than its `properties`.
pub fn strict(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required})
}

fn response() -> Value {
    let part = strict(
        json!({
            "type": {"enum": ["output_text", "reasoning_text"]},
            "text": {"type": "string"},
        }),
        &["type", "text"],
    );
    let item = strict(
        json!({
            "id": {"type": "string"},
            "type": {"enum": ["message", "reasoning", "function_call"]},
            "status": {"enum": ["in_progress", "completed", "incomplete"]},
            "content": {"type": "array", "items": part},
            "call_id": {"type": "string"},
            "name": {"type": "string", "minLength": 1},
            "arguments": {"type": "string"},
        }),
        &["id", "type", "status"],
    );
    strict(
        json!({
            "id": {"type": "string"},
            "object": {"const": "response"},
            "created_at": {"type": "integer"},
            "status": {"enum": ["completed", "incomplete"]},
            "error": {"type": "null"},
            "incomplete_details": {"type": ["object", "null"]},
            "model": {"type": "string"},
            "output": {"type": "array", "items": item},
            "usage": strict(json!({
                "input_tokens": {"type": "integer", "minimum": 1},
                "output_tokens": {"type": "integer", "minimum": 0},
                "total_tokens": {"type": "integer", "minimum": 1},
            }), &["input_tokens", "output_tokens", "total_tokens"]),
        }),
        &[
            "id",
            "object",
            "created_at",
            "status",
            "model",
            "output",
            "usage",
        ],
    )
}

fn file() -> Value {
    strict(
        json!({
            "id": {"type": "string"},
            "object": {"const": "file"},
            "bytes": {"type": "integer", "minimum": 0},
            "created_at": {"type": "integer"},
            "expires_at": {"type": "integer"},
            "filename": {"type": "string"},
            "purpose": {"enum": ["batch", "batch_output"]},
            "status": {"const": "processed"},
        }),
        &[
            "id",
            "object",
            "bytes",
            "created_at",
            "filename",
            "purpose",
            "status",
        ],
    )
}

fn batch() -> Value {
    let time = json!({"type": ["integer", "null"]});
    let count = json!({"type": "integer", "minimum": 0});
    let mut properties = json!({
        "id": {"type": "string"},
        "object": {"const": "batch"},
        "endpoint": {"enum": ENDPOINTS},
        "errors": {"type": ["object", "null"]},
        "input_file_id": {"type": "string"},
        "completion_window": {"type": "string"},
        "status": {"enum": [
            "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
            "cancelled",
        ]},
        "output_file_id": {"type": ["string", "null"]},
        "error_file_id": {"type": ["string", "null"]},
        "created_at": {"type": "integer"},
        "request_counts": strict(
            json!({"total": count, "completed": count, "failed": count}),
            &["total", "completed", "failed"],
        ),
        "metadata": {"type": ["object", "null"]},
    });
    for name in [
        "in_progress_at",
        "expires_at",
        "finalizing_at",
        "completed_at",
        "failed_at",
        "expired_at",
        "cancelling_at",
        "cancelled_at",
    ] {
        properties[name] = time.clone();
    }
    strict(
        properties,
        &[
            "id",
            "object",
            "endpoint",
            "input_file_id",
            "completion_window",
            "status",
            "created_at",
        ],
    )
}

fn message() -> Value {
    let block = strict(
        json!({"type": {"enum": ["text", "thinking", "tool_use"]}}),
        &["type"],
    );
    strict(
        json!({
            "id": {"type": "string"},
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": {"type": "string"},
            "content": {"type": "array", "items": block},
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": strict(json!({
                "input_tokens": {"type": "integer", "minimum": 0},
                "output_tokens": {"type": "integer", "minimum": 0},
            }), &["input_tokens", "output_tokens"]),
        }),
        &[
            "id",
            "type",
            "role",
            "model",
            "content",
            "stop_reason",
            "usage",
        ],
    )
}
