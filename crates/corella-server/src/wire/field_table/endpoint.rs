//! The endpoints that take a body with fields.

use super::{
    BODY, FieldTable, TOKENIZE, batch, llama_server, messages, ollama, pooling, responses,
};

/// An endpoint that takes a body with fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Tokenize,
    Detokenize,
    Responses,
    Messages,
    CountTokens,
    Embeddings,
    Score,
    Rerank,
    Classify,
    Pooling,
    ApplyTemplate,
    LlamaCompletion,
    Infill,
    LlamaEmbedding,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaShow,
    OllamaPull,
    Batches,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Embeddings => "/v1/embeddings",
            Self::Score => "/score",
            Self::Rerank => "/rerank",
            Self::Classify => "/classify",
            Self::Pooling => "/pooling",
            Self::ApplyTemplate => "/apply-template",
            Self::LlamaCompletion => "/completion",
            Self::Infill => "/infill",
            Self::LlamaEmbedding => "/embedding",
            Self::OllamaChat => "/api/chat",
            Self::OllamaGenerate => "/api/generate",
            Self::OllamaEmbed => "/api/embed",
            Self::OllamaEmbeddings => "/api/embeddings",
            Self::OllamaShow => "/api/show",
            Self::OllamaPull => "/api/pull",
            Self::Batches => "/v1/batches",
        }
    }

    /// Other paths with the same answers, from vLLM and llama-server.
    pub fn other_paths(self) -> &'static [&'static str] {
        match self {
            Self::Chat => &["/chat/completions"],
            Self::Responses => &["/responses"],
            Self::Score => &["/v1/score"],
            Self::Rerank => &["/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"],
            Self::LlamaCompletion => &["/completions"],
            Self::LlamaEmbedding => &["/embeddings"],
            _ => &[],
        }
    }

    /// Returns whether it takes a chat's body, and returns a text or tokens of its conversation.
    pub fn takes_a_chat(self) -> bool {
        matches!(self, Self::Tokenize | Self::ApplyTemplate)
    }

    /// The fields of its body.
    pub fn table(self) -> &'static FieldTable {
        match self {
            Self::Chat | Self::Completions | Self::Detokenize | Self::ApplyTemplate => &BODY,
            Self::Tokenize => &TOKENIZE,
            Self::LlamaCompletion => &llama_server::COMPLETION,
            Self::Infill => &llama_server::INFILL,
            Self::LlamaEmbedding => &llama_server::EMBEDDING,
            Self::Pooling => &pooling::POOLING,
            Self::Responses => &responses::BODY,
            Self::Messages | Self::CountTokens => &messages::BODY,
            Self::Embeddings => &pooling::EMBEDDINGS,
            Self::Score => &pooling::SCORE,
            Self::Rerank => &pooling::RERANK,
            Self::Classify => &pooling::CLASSIFY,
            Self::OllamaChat => &ollama::CHAT,
            Self::OllamaGenerate => &ollama::GENERATE,
            Self::OllamaEmbed => &ollama::EMBED,
            Self::OllamaEmbeddings => &ollama::EMBEDDINGS,
            Self::OllamaShow => &ollama::SHOW,
            Self::OllamaPull => &ollama::PULL,
            Self::Batches => &batch::BODY,
        }
    }
}
