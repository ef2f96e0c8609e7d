//! The fields of endpoints that embed, compare or classify texts: OpenAI's, and the additions of vLLM, llama.cpp,
//! Ollama, TEI, Cohere and Jina.

use super::{FieldTable, Refused, instead, is_empty, is_false, is_true, is_zero, never, refused};

const NO_EFFECT: &[(&str, &[&str])] = &[
    ("it serves the caller's own accounting", &["user"]),
    (
        "the model stays loaded for as long as the server runs",
        &["keep_alive"],
    ),
    (
        "the header x-request-id names responses",
        &["request_id", "rid"],
    ),
];

const TRUNCATE: Refused = refused("truncate_prompt_tokens", never);
const TRUNCATION_SIDE: Refused = refused("truncation_side", never);
const PADDING: Refused = refused("padding", |value| value == "do_not_pad");
const TEMPLATE_KWARGS: Refused = refused("chat_template_kwargs", is_empty);

pub static EMBEDDINGS: FieldTable = FieldTable {
    read: &[
        "model",
        "input",
        "encoding_format",
        "dimensions",
        "pooling",
        "normalize",
        "prompt_name",
        "add_special_tokens",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: &[
        // vLLM.
        TRUNCATE,
        instead("messages", "use input"),
        // These members belong to `messages`.
        refused("add_generation_prompt", is_false),
        refused("continue_final_message", is_false),
        refused("chat_template", never),
        TEMPLATE_KWARGS,
        refused("media_io_kwargs", is_empty),
        TRUNCATION_SIDE,
        PADDING,
        refused("embed_dtype", |value| value == "float32"),
        refused("endianness", |value| value == "native" || value == "little"),
        instead("use_activation", "use normalize").unless(is_true),
        refused("mm_processor_kwargs", is_empty),
        // llama.cpp, TEI and Ollama.
        instead("content", "use input"),
        instead("inputs", "use input"),
        instead("prompt", "use input"),
        instead("embd_normalize", "use normalize"),
        refused("truncate", is_false),
        instead("options", "put its fields beside it").unless(is_empty),
        // Cohere, Jina and Voyage.
        refused("input_type", never),
        // `/pooling` names its task.
        refused("task", |value| value == "embed"),
        refused("truncation", is_false),
        instead("embedding_type", "use encoding_format").unless(|value| value == "float"),
        instead("output_dimension", "use dimensions"),
        refused("output_dtype", |value| value == "float"),
        refused("late_chunking", is_false),
        instead("normalized", "use normalize"),
        // A client library should have taken this one apart.
        instead("extra_body", "put its fields beside it").unless(is_empty),
    ],
};

/// vLLM's `/pooling` has the fields of `/v1/embeddings`.
pub static POOLING: FieldTable = FieldTable {
    read: EMBEDDINGS.read,
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: EMBEDDINGS.refused,
};

pub static SCORE: FieldTable = FieldTable {
    read: &[
        "model",
        "text_1",
        "text_2",
        "pooling",
        "add_special_tokens",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: &[
        TRUNCATE,
        instead("queries", "use text_1"),
        instead("documents", "use text_2"),
        instead("items", "use text_2"),
        instead("data_1", "use text_1"),
        instead("data_2", "use text_2"),
        refused("instruction", never),
        refused("max_tokens_per_doc", is_zero),
        refused("max_tokens_per_query", is_zero),
        TEMPLATE_KWARGS,
        TRUNCATION_SIDE,
        PADDING,
        refused("activation", never),
        refused("use_activation", never),
        refused("softmax_normalize", is_false),
        refused("mm_processor_kwargs", is_empty),
        instead("extra_body", "put its fields beside it").unless(is_empty),
    ],
};

pub static RERANK: FieldTable = FieldTable {
    read: &[
        "model",
        "query",
        "documents",
        "top_n",
        "top_k",
        "return_documents",
        "pooling",
        "add_special_tokens",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: &[
        TRUNCATE,
        instead("texts", "use documents"),
        refused("raw_scores", never),
        refused("return_text", is_true),
        refused("activation", never),
        refused("use_activation", never),
        refused("max_chunks_per_doc", never),
        refused("max_tokens_per_doc", is_zero),
        refused("max_tokens_per_query", is_zero),
        refused("instruction", never),
        TEMPLATE_KWARGS,
        TRUNCATION_SIDE,
        PADDING,
        refused("rank_fields", is_empty),
        refused("truncate", is_false),
        refused("truncation", is_false),
        refused("mm_processor_kwargs", is_empty),
        instead("extra_body", "put its fields beside it").unless(is_empty),
    ],
};

pub static CLASSIFY: FieldTable = FieldTable {
    read: &[
        "model",
        "input",
        "add_special_tokens",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: &[
        TRUNCATE,
        instead("messages", "use input"),
        // These members belong to `messages`.
        refused("add_generation_prompt", is_false),
        refused("continue_final_message", is_false),
        refused("chat_template", never),
        TEMPLATE_KWARGS,
        refused("media_io_kwargs", is_empty),
        TRUNCATION_SIDE,
        PADDING,
        // The pooling of hidden states is part of the model.
        refused("pooling", never),
        refused("use_activation", is_true),
        refused("activation", is_true),
        refused("mm_processor_kwargs", is_empty),
        instead("extra_body", "put its fields beside it").unless(is_empty),
    ],
};
