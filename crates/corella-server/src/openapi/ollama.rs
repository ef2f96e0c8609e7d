//! The JSON schemas of answers in Ollama's shape.

use serde_json::{Value, json};

use super::answer_schema::strict;

/// An answer whose content is in the member `content`.
pub fn answer(content: &str) -> Value {
    let call = strict(
        json!({
            "id": {"type": "string"},
            "function": strict(json!({
                "index": {"type": "integer", "minimum": 0},
                "name": {"type": "string", "minLength": 1},
                "arguments": {"type": "object"},
            }), &["name", "arguments"]),
        }),
        &["function"],
    );
    let count = json!({"type": "integer", "minimum": 0});
    let mut properties = json!({
        "model": {"type": "string"},
        "created_at": {"type": "string", "format": "date-time"},
        "thinking": {"type": "string"},
        "done": {"const": true},
        "done_reason": {"enum": ["stop", "length", "load"]},
        "total_duration": count,
        "load_duration": count,
        "prompt_eval_count": count,
        "prompt_eval_duration": count,
        "eval_count": count,
        "eval_duration": count,
        "logprobs": {"type": "array", "items": {"type": "object"}},
    });
    properties[content] = match content {
        "message" => strict(
            json!({
                "role": {"const": "assistant"},
                "content": {"type": "string"},
                "thinking": {"type": "string"},
                "tool_calls": {"type": "array", "minItems": 1, "items": call},
            }),
            &["role", "content"],
        ),
        _ => json!({"type": "string"}),
    };
    strict(
        properties,
        &["model", "created_at", content, "done", "done_reason"],
    )
}

fn details() -> Value {
    strict(
        json!({
            "parent_model": {"type": "string"},
            "format": {"type": "string"},
            "family": {"type": "string"},
            "families": {"type": "array", "items": {"type": "string"}},
            "parameter_size": {"type": "string"},
            "quantization_level": {"type": "string"},
        }),
        &["parent_model", "format", "family"],
    )
}

pub fn model_list() -> Value {
    let model = strict(
        json!({
            "name": {"type": "string"},
            "model": {"type": "string"},
            "modified_at": {"type": "string", "format": "date-time"},
            "size": {"type": "integer", "minimum": 0},
            "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            "details": details(),
            "expires_at": {"type": "string", "format": "date-time"},
            "size_vram": {"type": "integer", "minimum": 0},
            "context_length": {"type": "integer", "minimum": 1},
        }),
        &["name", "model", "modified_at", "size", "digest", "details"],
    );
    strict(
        json!({"models": {"type": "array", "items": model}}),
        &["models"],
    )
}

pub fn model_info() -> Value {
    strict(
        json!({
            "modelfile": {"type": "string"},
            "parameters": {"type": "string"},
            "template": {"type": "string"},
            "details": details(),
            "model_info": {"type": "object"},
            "capabilities": {"type": "array", "items": {"enum": [
                "completion", "tools", "thinking", "insert",
            ]}},
            "modified_at": {"type": "string", "format": "date-time"},
        }),
        &["details", "model_info", "capabilities"],
    )
}

fn numbers() -> Value {
    json!({"type": "array", "items": {"type": "number"}})
}

pub fn vectors() -> Value {
    let count = json!({"type": "integer", "minimum": 0});
    strict(
        json!({
            "model": {"type": "string"},
            "embeddings": {"type": "array", "items": numbers()},
            "total_duration": count,
            "load_duration": count,
            "prompt_eval_count": count,
        }),
        &["model", "embeddings"],
    )
}

pub fn vector() -> Value {
    strict(json!({"embedding": numbers()}), &["embedding"])
}

pub fn error() -> Value {
    strict(
        json!({"error": {"type": "string", "minLength": 1}}),
        &["error"],
    )
}
