//! The endpoints that take a body with fields.

use super::{FieldTable, batch, chat, llama_server, messages, ollama, pooling, responses};

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

    /// Returns the endpoints that read a field which this endpoint does not know, if both belong to the same API.
    pub fn others_with(self, field: &str) -> Vec<Self> {
        const OPENAI: [Endpoint; 4] = [
            Endpoint::Chat,
            Endpoint::Completions,
            Endpoint::Tokenize,
            Endpoint::Detokenize,
        ];
        let is_one = OPENAI.contains(&self) || self == Self::ApplyTemplate;
        let reads = |other: &Self| is_one && other.table().reads(field);
        OPENAI.into_iter().filter(reads).collect()
    }

    /// The fields of its body.
    pub fn table(self) -> &'static FieldTable {
        match self {
            Self::Chat => &chat::CHAT,
            Self::Completions => &chat::COMPLETIONS,
            Self::Tokenize => &chat::TOKENIZE,
            Self::Detokenize => &chat::DETOKENIZE,
            Self::ApplyTemplate => &chat::APPLY_TEMPLATE,
            Self::LlamaCompletion => &llama_server::COMPLETION,
            Self::Infill => &llama_server::INFILL,
            Self::LlamaEmbedding => &llama_server::EMBEDDING,
            Self::Pooling => &pooling::POOLING,
            Self::Responses => &responses::BODY,
            Self::Messages => &messages::BODY,
            Self::CountTokens => &messages::COUNT_TOKENS,
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
