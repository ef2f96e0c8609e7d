//! The endpoints that take a body with fields.

use super::{
    FieldTable, batch, chat, llama_server, messages, ollama, pooling, responses, token_generate,
};

/// An endpoint that takes a body with fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    TokenGenerate,
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
    /// The path, and the fields of the body.
    fn row(self) -> (&'static str, &'static FieldTable) {
        match self {
            Self::Chat => ("/v1/chat/completions", &chat::CHAT),
            Self::Completions => ("/v1/completions", &chat::COMPLETIONS),
            Self::TokenGenerate => ("/inference/v1/generate", &token_generate::BODY),
            Self::Tokenize => ("/tokenize", &chat::TOKENIZE),
            Self::Detokenize => ("/detokenize", &chat::DETOKENIZE),
            Self::Responses => ("/v1/responses", &responses::BODY),
            Self::Messages => ("/v1/messages", &messages::BODY),
            Self::CountTokens => ("/v1/messages/count_tokens", &messages::COUNT_TOKENS),
            Self::Embeddings => ("/v1/embeddings", &pooling::EMBEDDINGS),
            Self::Score => ("/score", &pooling::SCORE),
            Self::Rerank => ("/rerank", &pooling::RERANK),
            Self::Classify => ("/classify", &pooling::CLASSIFY),
            Self::Pooling => ("/pooling", &pooling::POOLING),
            Self::ApplyTemplate => ("/apply-template", &chat::APPLY_TEMPLATE),
            Self::LlamaCompletion => ("/completion", &llama_server::COMPLETION),
            Self::Infill => ("/infill", &llama_server::INFILL),
            Self::LlamaEmbedding => ("/embedding", &llama_server::EMBEDDING),
            Self::OllamaChat => ("/api/chat", &ollama::CHAT),
            Self::OllamaGenerate => ("/api/generate", &ollama::GENERATE),
            Self::OllamaEmbed => ("/api/embed", &ollama::EMBED),
            Self::OllamaEmbeddings => ("/api/embeddings", &ollama::EMBEDDINGS),
            Self::OllamaShow => ("/api/show", &ollama::SHOW),
            Self::OllamaPull => ("/api/pull", &ollama::PULL),
            Self::Batches => ("/v1/batches", &batch::BODY),
        }
    }

    pub fn path(self) -> &'static str {
        self.row().0
    }

    /// Returns the table of the body's fields.
    pub fn table(self) -> &'static FieldTable {
        self.row().1
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

    /// Returns the endpoints of this endpoint's API that read a field which this endpoint does not know.
    pub fn others_with(self, field: &str) -> Vec<Self> {
        const OPENAI: [Endpoint; 4] = [
            Endpoint::Chat,
            Endpoint::Completions,
            Endpoint::Tokenize,
            Endpoint::Detokenize,
        ];
        let is_one =
            OPENAI.contains(&self) || matches!(self, Self::ApplyTemplate | Self::Responses);
        let reads = |other: &Self| is_one && other.table().reads(field);
        OPENAI.into_iter().filter(reads).collect()
    }
}
