//! The endpoints that the document describes, as tables.

use crate::field_table::Endpoint;

/// An endpoint with a body.
pub struct Operation {
    pub endpoint: Endpoint,
    pub id: &'static str,
    pub summary: &'static str,
    pub required: &'static [&'static str],
    /// The name of the answer's schema.
    pub answer: &'static str,
    pub may_stream: bool,
}

pub const OPERATIONS: &[Operation] = &[
    Operation {
        endpoint: Endpoint::Chat,
        id: "createChatCompletion",
        summary: "Generates the next message of a conversation.",
        required: &["messages"],
        answer: "ChatCompletion",
        may_stream: true,
    },
    Operation {
        endpoint: Endpoint::Completions,
        id: "createCompletion",
        summary: "Continues a prompt.",
        required: &["prompt"],
        answer: "Completion",
        may_stream: true,
    },
    Operation {
        endpoint: Endpoint::Responses,
        id: "createResponse",
        summary: "Answers an input, by OpenAI's Responses API.",
        required: &["input"],
        answer: "Response",
        may_stream: true,
    },
    Operation {
        endpoint: Endpoint::Messages,
        id: "createMessage",
        summary: "Generates the next message of a conversation, by Anthropic's API.",
        required: &["messages", "max_tokens"],
        answer: "Message",
        may_stream: true,
    },
    Operation {
        endpoint: Endpoint::CountTokens,
        id: "countTokens",
        summary: "Counts the tokens of a conversation, by Anthropic's API.",
        required: &["messages"],
        answer: "TokenCount",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::OllamaChat,
        id: "ollamaChat",
        summary: "Generates the next message of a conversation, by Ollama's API.",
        required: &[],
        answer: "OllamaMessageAnswer",
        may_stream: true,
    },
    Operation {
        endpoint: Endpoint::OllamaGenerate,
        id: "ollamaGenerate",
        summary: "Answers a prompt, or continues it, by Ollama's API.",
        required: &[],
        answer: "OllamaTextAnswer",
        may_stream: true,
    },
    Operation {
        endpoint: Endpoint::OllamaShow,
        id: "ollamaShow",
        summary: "Tells what a model can do, by Ollama's API.",
        required: &[],
        answer: "OllamaModelInfo",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::Batches,
        id: "createBatch",
        summary: "Answers the requests of a file when nobody waits for something else.",
        required: &["input_file_id", "endpoint", "completion_window"],
        answer: "Batch",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::Embeddings,
        id: "createEmbedding",
        summary: "Makes a vector of each input from the model's hidden states.",
        required: &["input"],
        answer: "Embeddings",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::Score,
        id: "score",
        summary: "Tells how alike texts are, by the cosine of the angle between their vectors.",
        required: &["text_1", "text_2"],
        answer: "Scores",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::Rerank,
        id: "rerank",
        summary: "Orders documents by how alike they are to a query.",
        required: &["query", "documents"],
        answer: "Reranked",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::Tokenize,
        id: "tokenize",
        summary: "Converts a text or a conversation to token ids.",
        required: &[],
        answer: "Tokenized",
        may_stream: false,
    },
    Operation {
        endpoint: Endpoint::Detokenize,
        id: "detokenize",
        summary: "Converts token ids to text.",
        required: &["tokens"],
        answer: "Detokenized",
        may_stream: false,
    },
];

/// An endpoint without fields in a table.
pub struct Simple {
    pub path: &'static str,
    pub method: &'static str,
    pub id: &'static str,
    pub summary: &'static str,
    /// The name of the answer's schema, if the answer is JSON.
    pub answer: Option<&'static str>,
    pub needs_key: bool,
}

pub const SIMPLE: &[Simple] = &[
    simple(
        "/v1/models",
        "get",
        "listModels",
        "Lists the model under each of its names.",
        Some("ModelList"),
        true,
    ),
    simple(
        "/api/tags",
        "get",
        "ollamaTags",
        "Lists the model under each of its names, by Ollama's API.",
        Some("OllamaModelList"),
        true,
    ),
    simple(
        "/api/ps",
        "get",
        "ollamaPs",
        "Lists the models that are loaded, by Ollama's API.",
        Some("OllamaModelList"),
        true,
    ),
    simple(
        "/api/version",
        "get",
        "ollamaVersion",
        "Tells which version of Ollama's API is spoken.",
        Some("Version"),
        true,
    ),
    simple(
        "/v1/load_lora_adapter",
        "post",
        "loadAdapter",
        "Loads the LoRA adapter of a folder (`lora_path`) under a name (`lora_name`).",
        None,
        true,
    ),
    simple(
        "/v1/unload_lora_adapter",
        "post",
        "unloadAdapter",
        "Takes no more requests for a LoRA adapter (`lora_name`).",
        None,
        true,
    ),
    simple(
        "/reset_prefix_cache",
        "post",
        "resetPrefixCache",
        "Forgets cached prefixes, or answers 409 while requests hold cached pages.",
        None,
        true,
    ),
    simple(
        "/role",
        "get",
        "getRole",
        "Tells the role among other nodes; 409 if the server serves alone.",
        Some("Role"),
        true,
    ),
    simple(
        "/health",
        "get",
        "getHealth",
        "Answers 200 while the engine works.",
        None,
        false,
    ),
    simple(
        "/ready",
        "get",
        "getReady",
        "Answers 200 if the server takes new requests.",
        None,
        false,
    ),
    simple(
        "/version",
        "get",
        "getVersion",
        "Tells the version.",
        Some("Version"),
        false,
    ),
    simple(
        "/openapi.json",
        "get",
        "getOpenApi",
        "This document.",
        Some("Document"),
        false,
    ),
];

const fn simple(
    path: &'static str,
    method: &'static str,
    id: &'static str,
    summary: &'static str,
    answer: Option<&'static str>,
    needs_key: bool,
) -> Simple {
    Simple {
        path,
        method,
        id,
        summary,
        answer,
        needs_key,
    }
}
