//! The fields of llama-server's own endpoints.

use serde_json::json;

use super::pooling::POOLED;
use super::sampling::{DRAW, IGNORE_EOS, MODEL, PENALTIES, QUEUE, STREAM, repetition_penalty};
use super::schema::{
    Schema, any_integer, any_object, either, integer, list, num_choices, num_logprobs, number, off,
    one_of, prompts, text,
};
use super::{Field, FieldTable, no_effect, read, refused};
use crate::wire::field_limit::{LOGIT_BIAS, MAX_NUM_PROMPTS};

pub static COMPLETION: FieldTable = FieldTable::body("LlamaCompletionRequest").of(&[
    &[read("prompt", |limits| {
        prompts(limits, limits.max_num_choices as usize)
    })
    .required()
    .about("Several prompts are answered by an array.")],
    MODEL,
    STREAM,
    DRAW,
    PENALTIES,
    DRAW_HERE,
    refused::LLAMA_COMPLETION,
    refused::LLAMA_SERVER,
]);

pub static INFILL: FieldTable = FieldTable::body("InfillRequest").of(&[
    &[
        read("input_prefix", text).about("The text before the gap."),
        read("input_suffix", text).about("The text behind the gap."),
        read("input_extra", |_| {
            list(Schema::of(json!({
                "type": "object",
                "required": ["text"],
                "additionalProperties": false,
                "properties": {
                    "text": {"type": "string"},
                    "filename": {"type": ["string", "null"]},
                    "time": {},
                },
            })))
        })
        .about("Parts of other files, which the model sees first."),
        read("prompt", text).about("Continues input_prefix."),
        // Editors send llama.cpp's names of samplers, in llama.cpp's order.
        read("samplers", |_| list(one_of(SAMPLERS)))
            .about("Samplers that are left out are off. Their order is always the same."),
    ],
    MODEL,
    STREAM,
    DRAW,
    PENALTIES,
    DRAW_HERE,
    refused::INFILL,
    refused::LLAMA_SERVER,
]);

/// llama.cpp's names of samplers. It applies those that have no field here only if their own fields are set.
pub(crate) const SAMPLERS: [&str; 20] = [
    "penalties",
    "dry",
    "top_n_sigma",
    "top-n-sigma",
    "top_k",
    "top-k",
    "typ_p",
    "typ-p",
    "typical",
    "typical-p",
    "top_p",
    "top-p",
    "nucleus",
    "min_p",
    "min-p",
    "xtc",
    "temperature",
    "temp",
    "infill",
    "adaptive_p",
];

/// Fields of both endpoints that have llama-server's own names or values.
static DRAW_HERE: &[Field] = &[
    read("n_predict", any_integer).about(
        "The most tokens. Negative numbers are no limit but the context; 0 computes the prompt \
         only.",
    ),
    read("max_tokens", any_integer).about("The same, if n_predict is absent."),
    read("repeat_penalty", repetition_penalty)
        .about("As repetition_penalty of the other endpoints, over the whole context."),
    read("repeat_last_n", |_| integer(i64::MIN..=i64::MAX).or(-1)).about(
        "Must be -1 beside a penalty, because penalties count the whole context; 0 switches them \
         off.",
    ),
    IGNORE_EOS,
    read("logit_bias", |_| {
        let bias = || either([number(LOGIT_BIAS), one_of([false])]).into_json();
        let pair = json!({
            "type": "array",
            "prefixItems": [{"type": ["integer", "string"]}, bias()],
            "minItems": 2,
            "maxItems": 2,
        });
        either([
            Schema::of(json!({
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": bias(),
            })),
            list(Schema::of(pair)),
        ])
    })
    .about(
        "Adds a number to the logit of a token id, or of each token of a text. false never draws \
         it.",
    ),
    read("n_probs", num_logprobs)
        .about("Returns log-probabilities, with this many alternatives to each token."),
    read("n_cmpl", |limits| num_choices(limits).or(1)).about("The number of choices."),
    read("n", num_choices).about("The same, if n_cmpl is absent."),
    read("n_indent", |_| integer(0..=u32::MAX.into()).or(0))
        .about("Without stream: ends the answer before a line that is indented less."),
    read("json_schema", any_object).about("The form of the answer's text."),
    read("grammar", text).about("The grammar of the answer's text, in GBNF or in Lark's notation."),
    read("return_tokens", off).about("Returns the ids of the answer's tokens."),
    read("response_fields", |limits| list(text(limits)))
        .about("The answer keeps only these members, such as \"timings/predicted_ms\"."),
    no_effect("n_keep", "nothing is dropped from a context that is full"),
    no_effect(
        "n_discard",
        "nothing is dropped from a context that is full",
    ),
    no_effect("t_max_predict_ms", NO_TIME),
    no_effect("t_max_prompt_ms", NO_TIME),
    no_effect("speculative.n_max", SPECULATION),
    no_effect("speculative.n_min", SPECULATION),
    no_effect("speculative.p_min", SPECULATION),
];

const NO_TIME: &str = "an answer does not depend on the speed of the machine; n_predict limits it";
const SPECULATION: &str = "speculation changes no answer, and is set when the server starts";

pub static EMBEDDING: FieldTable = FieldTable::body("LlamaEmbeddingRequest").of(&[
    &[
        read("content", |limits| prompts(limits, MAX_NUM_PROMPTS)).about("The texts."),
        read("input", |limits| prompts(limits, MAX_NUM_PROMPTS))
            .about("The same as content, one of which is given."),
        read("embd_normalize", |_| one_of([2, -1]).or(2))
            .about("2 is a vector of length 1, and -1 a vector as it comes."),
    ],
    MODEL,
    POOLED,
    QUEUE,
    refused::LLAMA_EMBEDDING,
]);
