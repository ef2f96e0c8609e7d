//! The endpoints whose bodies have a table of fields. `paths.json` has the others.

use crate::wire::field_table::Endpoint;

/// An endpoint with a body.
pub struct Operation {
    pub endpoint: Endpoint,
    pub id: &'static str,
    /// The name of the answer's schema.
    pub answer: &'static str,
    pub summary: &'static str,
    pub may_stream: bool,
}

pub const OPERATIONS: &[Operation] = &[
    operation(Endpoint::Chat, "createChatCompletion", "ChatCompletion")
        .about("Generates the next message of a conversation.")
        .streamed(),
    operation(Endpoint::Completions, "createCompletion", "Completion")
        .about("Continues a prompt.")
        .streamed(),
    operation(Endpoint::TokenGenerate, "generateTokens", "GeneratedTokens")
        .about("Continues a prompt of token ids with token ids, by vLLM's API.")
        .streamed(),
    operation(Endpoint::Responses, "createResponse", "Response")
        .about("Answers an input, by OpenAI's Responses API.")
        .streamed(),
    operation(Endpoint::Messages, "createMessage", "Message")
        .about("Generates the next message of a conversation, by Anthropic's API.")
        .streamed(),
    operation(Endpoint::CountTokens, "countTokens", "TokenCount")
        .about("Counts the tokens of a conversation, by Anthropic's API."),
    operation(Endpoint::OllamaChat, "ollamaChat", "OllamaMessageAnswer")
        .about("Generates the next message of a conversation, by Ollama's API.")
        .streamed(),
    operation(
        Endpoint::OllamaGenerate,
        "ollamaGenerate",
        "OllamaTextAnswer",
    )
    .about("Answers a prompt, or continues it, by Ollama's API.")
    .streamed(),
    operation(Endpoint::OllamaEmbed, "ollamaEmbed", "OllamaVectors")
        .about("Makes a vector of each text, by Ollama's API."),
    operation(
        Endpoint::OllamaEmbeddings,
        "ollamaEmbeddings",
        "OllamaVector",
    )
    .about("Makes a vector of one text, by the older form of Ollama's API."),
    operation(Endpoint::OllamaShow, "ollamaShow", "OllamaModelInfo")
        .about("Tells what a model can do, by Ollama's API."),
    operation(Endpoint::OllamaPull, "ollamaPull", "OllamaPulled")
        .about("Says that the model is there, by Ollama's API, or 404 for another.")
        .streamed(),
    operation(Endpoint::Batches, "createBatch", "Batch")
        .about("Answers the requests of a file when no other request waits."),
    operation(Endpoint::Embeddings, "createEmbedding", "Embeddings")
        .about("Makes a vector of each input from the model's hidden states."),
    operation(Endpoint::Score, "score", "Scores").about(
        "Tells how well texts fit: by a cross-encoder, or by the cosine between their vectors.",
    ),
    operation(Endpoint::Rerank, "rerank", "Reranked")
        .about("Orders documents by how alike they are to a query."),
    operation(Endpoint::Classify, "classify", "Classes")
        .about("Tells which class a text belongs to, by vLLM's API."),
    operation(Endpoint::Pooling, "pooling", "Pooled")
        .about("Makes a vector of each input, by vLLM's API."),
    operation(Endpoint::LlamaCompletion, "llamaCompletion", "LlamaAnswers")
        .about("Continues a prompt, by llama-server's API.")
        .streamed(),
    operation(Endpoint::Infill, "infill", "LlamaAnswers")
        .about("Writes what is between two texts, by llama-server's API.")
        .streamed(),
    operation(
        Endpoint::LlamaEmbedding,
        "llamaEmbedding",
        "LlamaEmbeddings",
    )
    .about("Makes a vector of each text, by llama-server's API."),
    operation(Endpoint::ApplyTemplate, "applyTemplate", "LlamaPrompt")
        .about("Tells the text that the chat template makes of a conversation."),
    operation(Endpoint::Tokenize, "tokenize", "TokenizeAnswer")
        .about("Converts a text or a conversation to token ids."),
    operation(Endpoint::Detokenize, "detokenize", "Detokenized")
        .about("Converts token ids to text."),
];

const fn operation(endpoint: Endpoint, id: &'static str, answer: &'static str) -> Operation {
    Operation {
        endpoint,
        id,
        answer,
        summary: "",
        may_stream: false,
    }
}

impl Operation {
    const fn about(mut self, summary: &'static str) -> Self {
        self.summary = summary;
        self
    }

    const fn streamed(mut self) -> Self {
        self.may_stream = true;
        self
    }
}
