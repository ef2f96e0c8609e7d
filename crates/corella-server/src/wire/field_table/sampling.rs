//! The fields of sampling and stopping. Several bodies share groups of these fields.

use serde_json::json;

use super::schema::{
    Schema, any_object, boolean, count, either, integer, list, num_choices, num_logprobs, number,
    object, off, on, one_of, text, text_of, token,
};
use super::{Field, FieldTable, no_effect, read};
use crate::wire::field_limit::{
    LOGIT_BIAS, MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS, MAX_CACHE_SALT_BYTES,
    MAX_GUIDED_CHOICES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, MIN_P, PENALTY,
    REPETITION_PENALTY, TEMPERATURE, TOP_P,
};

pub static MODEL: &[Field] = &[read("model", |limits| one_of(limits.model_names.clone()))
    .about("One of the names in /v1/models. The default is the first of them.")];

pub static STREAM: &[Field] =
    &[read("stream", off).about("Whether the answer comes as server-sent events.")];

pub static DRAW: &[Field] = &[
    read("temperature", |_| number(TEMPERATURE)).about(
        "0 takes the most likely token, and smaller numbers than 0.01 become 0.01. The default is \
         the model's, else 1.",
    ),
    read("top_p", |_| number(TOP_P)).about(
        "Draws from the most likely tokens that together have this probability. The default is \
         the model's, else 1.",
    ),
    read("top_k", |_| integer(-1..=u32::MAX.into())).about(
        "Draws from this many most likely tokens; 0 and -1 draw from all. The default is the \
         model's, else 0.",
    ),
    read("min_p", |_| number(MIN_P)).about(
        "Draws from tokens at least this many times as likely as the most likely one. The default \
         is the model's, else 0.",
    ),
    read("seed", |_| integer(i64::MIN..=i64::MAX)).about(
        "The same seed gives the same answer. Without it, each request draws differently; the \
         server's `--seed` makes a run repeatable.",
    ),
];

/// Fields of penalties and stop strings.
pub static PENALTIES: &[Field] = &[
    read("presence_penalty", |_| number(PENALTY).or(0))
        .about("Is subtracted from the logits of tokens that the answer has."),
    read("frequency_penalty", |_| number(PENALTY).or(0))
        .about("Is subtracted from the logit of a token each time that the answer has it."),
    read("stop", |_| {
        let stop = || text_of(1..=MAX_STOP_BYTES);
        either([stop(), list(stop()).sized(0..=MAX_STOP_STRINGS)])
    })
    .about("The first of these texts to appear ends the choice, and is not part of it."),
];

/// Fields that decide which requests go first, and which share cached pages.
pub static QUEUE: &[Field] = &[
    read("priority", |_| {
        integer(i32::MIN.into()..=i32::MAX.into()).or(0)
    })
    .about("Smaller is more urgent."),
    read("cache_salt", |_| text_of(1..=MAX_CACHE_SALT_BYTES))
        .about("Only requests with the same salt share cached pages."),
];

/// Fields of the chat, completions and responses alone.
pub static CONTROL: &[Field] = &[
    read("repetition_penalty", repetition_penalty).about(
        "Divides the logits of tokens that prompt or answer have. The default is the model's, \
         else 1.",
    ),
    read("logit_bias", |_| {
        Schema::of(json!({
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": number(LOGIT_BIAS).into_json(),
        }))
    })
    .about("Adds a number to the logit of a token id, before penalties."),
    read("allowed_token_ids", |limits| {
        list(token(limits)).sized(1..=MAX_ALLOWED_TOKEN_IDS)
    })
    .about("No other token is drawn, not even the model's end token."),
    read("bad_words", |_| {
        list(text_of(1..=MAX_BAD_WORD_BYTES)).sized(0..=MAX_BAD_WORDS)
    })
    .about("Do not appear in the answer, at its beginning or behind a space."),
    read("min_tokens", |_| integer(0..=u32::MAX.into()).or(0))
        .about("No end token, stop token or stop string ends the choice before."),
    read("stop_token_ids", |limits| {
        list(token(limits)).sized(0..=MAX_STOP_TOKEN_IDS)
    })
    .about("Any of these tokens ends the choice."),
    read("include_stop_str_in_output", off).about("Keeps the stop string in the text."),
    read("skip_special_tokens", on).about("Leaves special tokens out of the text."),
    IGNORE_EOS,
    read("ttft_slo_ms", count)
        .about("With --slo-admission: the time that the first token may take."),
    read("tpot_slo_ms", count)
        .about("With --slo-admission: the mean time that each further token may take."),
];

pub const IGNORE_EOS: Field = read("ignore_eos", off).about("Continues after an end token.");

/// Fields of the chat and completions alone.
pub static ANSWER: &[Field] = &[
    STREAM_OPTIONS_FIELD,
    read("n", |limits| num_choices(limits).or(1)).about("The number of choices."),
    read("max_tokens", count).about(
        "The default is 16 for a completion, and the rest of the context for a chat. 0 is allowed \
         with prompt_logprobs or echo.",
    ),
    read("max_completion_tokens", count).about("The same; takes precedence."),
    RESUME_TOKEN_IDS,
    read("prompt_logprobs", num_logprobs).about(
        "Returns the log-probability of each token of the prompt, with this many alternatives. \
         Not with a stream.",
    ),
    read("return_token_ids", off).about("Returns the ids of the tokens of prompt and answer."),
    read("return_tokens_as_token_ids", off)
        .about("Log-probabilities name tokens as \"token_id:7\", and have the rank of each."),
    read("return_metrics", off).about("Returns when each choice reached its stages."),
    read("add_special_tokens", boolean).about(
        "Whether the tokenizer adds its special tokens to the prompt's text. The default is false \
         for a conversation, and true for other texts.",
    ),
    read("response_format", response_format).about("The form of the answer's text."),
    STRUCTURED_OUTPUTS,
    read("guided_json", |_| {
        Schema::of(json!({"type": ["object", "string"]}))
    })
    .about("The older name of structured_outputs.json."),
    read("guided_json_object", boolean).about("The older name of structured_outputs.json_object."),
    read("guided_regex", text).about("The older name of structured_outputs.regex."),
    read("guided_choice", |_| choices()).about("The older name of structured_outputs.choice."),
    read("guided_grammar", text).about("The older name of structured_outputs.grammar."),
];

pub const STREAM_OPTIONS_FIELD: Field =
    read("stream_options", |_| object(&STREAM_OPTIONS)).about("Only with a stream.");

pub const RESUME_TOKEN_IDS: Field = read("resume_token_ids", |limits| {
    list(token(limits)).sized(0..=limits.max_model_len as usize)
})
.about(
    "The first tokens of the answer, which another server has drawn. The answer continues after \
     them. Only with one prompt and one choice.",
);

pub const STRUCTURED_OUTPUTS: Field = read("structured_outputs", |_| {
    Schema::of(json!({
        "type": "object",
        "oneOf": [
            {"required": ["json"]},
            {"required": ["json_object"]},
            {"required": ["regex"]},
            {"required": ["grammar"]},
            {"required": ["choice"]},
        ],
        "additionalProperties": false,
        "properties": {
            "disable_any_whitespace": {"type": "boolean"},
            "json": {"type": ["object", "string"]},
            "json_object": {"const": true},
            "regex": {"type": "string"},
            "grammar": {"type": "string"},
            "choice": choices().into_json(),
        },
    }))
})
.about("The form of the answer's text, by vLLM's names.");

pub static STREAM_OPTIONS: FieldTable = FieldTable::object("StreamOptions").of(&[&[
    read("include_usage", off).about("Adds a last chunk with the usage."),
    read("continuous_usage_stats", off)
        .about("With include_usage: the other chunks have the usage of their choice up to there."),
    no_effect("include_obfuscation", "it pads against eavesdroppers"),
]]);

pub fn repetition_penalty(_: &super::Limits) -> Schema {
    number(REPETITION_PENALTY)
}

fn choices() -> Schema {
    let text = Schema::of(json!({"type": "string", "minLength": 1}));
    list(text).sized(1..=MAX_GUIDED_CHOICES)
}

fn response_format(limits: &super::Limits) -> Schema {
    either([
        free_format(),
        Schema::of(json!({
            "type": "object",
            "required": ["type", "json_schema"],
            "additionalProperties": false,
            "properties": {
                "type": {"const": "json_schema"},
                "json_schema": {
                    "type": "object",
                    "required": ["schema"],
                    "additionalProperties": false,
                    "properties": {
                        "schema": any_object(limits).into_json(),
                        "name": {},
                        "description": {},
                        "strict": {},
                    },
                },
            },
        })),
    ])
}

/// The formats without a schema.
pub fn free_format() -> Schema {
    Schema::of(json!({
        "type": "object",
        "required": ["type"],
        "additionalProperties": false,
        "properties": {"type": {"enum": ["text", "json_object"]}},
    }))
}

/// The format with a schema, as the Responses and Messages APIs have it.
pub fn schema_format() -> Schema {
    Schema::of(json!({
        "type": "object",
        "required": ["type", "schema"],
        "additionalProperties": false,
        "properties": {
            "type": {"const": "json_schema"},
            "schema": {"type": "object"},
            "name": {},
            "description": {},
            "strict": {},
        },
    }))
}
