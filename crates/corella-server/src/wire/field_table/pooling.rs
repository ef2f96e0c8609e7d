//! The fields of endpoints that embed, compare or classify texts: OpenAI's, and the additions of vLLM, llama.cpp,
//! Ollama, TEI, Cohere and Jina.

use super::sampling::{MODEL, QUEUE};
use super::schema::{Limits, Schema, boolean, integer, list, on, one_of, prompts, text};
use super::{Field, FieldTable, read, refused};
use crate::wire::field_limit::MAX_NUM_PROMPTS;

pub static EMBEDDINGS: FieldTable = FieldTable::body("EmbeddingsRequest").of(&[
    INPUT,
    VECTOR,
    POOLED,
    MODEL,
    QUEUE,
    refused::EMBEDDINGS,
    refused::POOLED,
]);

/// vLLM's `/pooling` has the fields of `/v1/embeddings`.
pub static POOLING: FieldTable = FieldTable::body("PoolingRequest").of(EMBEDDINGS.groups);

pub static SCORE: FieldTable = FieldTable::body("ScoreRequest").of(&[
    &[
        read("text_1", texts)
            .required()
            .about("One text, or one for each of text_2."),
        read("text_2", texts)
            .required()
            .about("The texts to compare."),
    ],
    POOLED,
    MODEL,
    QUEUE,
    refused::SCORE,
    refused::POOLED,
]);

pub static RERANK: FieldTable = FieldTable::body("RerankRequest").of(&[
    &[
        read("query", text).required(),
        read("documents", |limits| {
            list(text(limits)).sized(1..=MAX_NUM_PROMPTS)
        })
        .required(),
        read("top_n", |_| integer(0..=u32::MAX.into()).or(0))
            .about("Returns this many documents, the best first; 0 is all."),
        read("top_k", |_| integer(0..=u32::MAX.into())).about("The same, if top_n is absent."),
        read("return_documents", on).about("Whether the answer has the texts."),
    ],
    POOLED,
    MODEL,
    QUEUE,
    refused::RERANK,
    refused::POOLED,
]);

pub static CLASSIFY: FieldTable = FieldTable::body("ClassifyRequest").of(&[
    INPUT,
    &[SPECIAL_TOKENS],
    MODEL,
    QUEUE,
    refused::CLASSIFY,
    refused::POOLED,
]);

static INPUT: &[Field] = &[read("input", texts).required().about("The texts.")];

static VECTOR: &[Field] = &[
    read("encoding_format", |_| {
        one_of(["float", "base64"]).or("float")
    }),
    read("dimensions", |limits| integer(1..=limits.vector_len as i64))
        .about("Keeps this many values of each vector, for models that are made for it."),
    read("normalize", boolean).about("Whether vectors are scaled to length 1."),
    read("prompt_name", |limits| one_of(limits.prompt_names.clone()))
        .about("The model's prompt that is written before the texts."),
];

/// How the hidden states of a text become a vector.
pub static POOLED: &[Field] = &[
    read("pooling", |limits| match limits.is_encoder {
        true => one_of(["last", "mean", "cls", "max"]),
        false => one_of(["last", "mean"]),
    })
    .about("How the hidden states of a text become one vector. The default is the model's."),
    SPECIAL_TOKENS,
];

const SPECIAL_TOKENS: Field =
    read("add_special_tokens", on).about("Whether the tokenizer adds its special tokens.");

fn texts(limits: &Limits) -> Schema {
    prompts(limits, MAX_NUM_PROMPTS)
}
