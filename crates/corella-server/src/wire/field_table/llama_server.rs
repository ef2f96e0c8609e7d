//! The fields of llama-server's own endpoints.

use super::{
    FieldTable, Refused, instead, is_empty, is_false, is_negative, is_one, is_true, is_zero, never,
    refused,
};

const NO_EFFECT: &[(&str, &[&str])] = &[
    (
        "the prefix cache needs no hints, and never changes an answer",
        &["cache_prompt", "id_slot", "n_cache_reuse"],
    ),
    (
        "nothing is dropped from a context that is full",
        &["n_keep", "n_discard"],
    ),
    (
        "an answer does not depend on the speed of the machine; n_predict limits it",
        &["t_max_predict_ms", "t_max_prompt_ms"],
    ),
    (
        "they adjust a feature whose own field is refused",
        &[
            "mirostat_tau",
            "mirostat_eta",
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breakers",
            "xtc_threshold",
            "adaptive_decay",
            "dynatemp_exponent",
            "grammar_lazy",
            "penalize_nl",
        ],
    ),
    (
        "speculation changes no answer, and is set when the server starts",
        &[
            "speculative.n_max",
            "speculative.n_min",
            "speculative.p_min",
        ],
    ),
    (
        "they say how the machine computes, which is set when the server starts",
        &["backend_sampling"],
    ),
    (
        "a stream that is silent has comments in any case",
        &["sse_ping_interval"],
    ),
    (
        "the header x-request-id names responses",
        &["request_id", "rid"],
    ),
    ("it serves the caller's own accounting", &["user"]),
];

const SAMPLERS: Refused = refused("samplers", never);
const GRAMMAR: Refused = instead(
    "grammar",
    "use json_schema, or structured_outputs of /v1/completions",
)
.unless(|value| value == "");
const INPUT_PREFIX: Refused = instead("input_prefix", "use prompt, or /infill");
const INPUT_SUFFIX: Refused = instead("input_suffix", "use /infill");
const INPUT_EXTRA: Refused = instead("input_extra", "use /infill").unless(is_empty);
const DYNATEMP: Refused = refused("dynatemp_range", is_zero);
const TOP_N_SIGMA: Refused = refused("top_n_sigma", is_negative);
const TYPICAL: Refused = refused("typical_p", is_one);
const XTC: Refused = refused("xtc_probability", is_zero);
const DRY: Refused = refused("dry_multiplier", is_zero);
const MIROSTAT: Refused = refused("mirostat", is_zero);
const ADAPTIVE: Refused = refused("adaptive_target", is_negative);
const MIN_KEEP: Refused = refused("min_keep", is_zero);
const TRIGGERS: Refused = refused("grammar_triggers", is_empty);
const PRESERVED: Refused = refused("preserved_tokens", is_empty);
const PROGRESS: Refused = refused("return_progress", is_false);
const TIMINGS: Refused = refused("timings_per_token", is_false);
const POST_SAMPLING: Refused = refused("post_sampling_probs", is_false);
const VERBOSE: Refused = refused("verbose", is_false);
const LORA: Refused = instead("lora", "name the adapter in model").unless(is_empty);
const IMAGES: Refused = refused("image_data", is_empty);
const MULTIMODAL: Refused = refused("multimodal_data", is_empty);
const BEST_OF: Refused = instead("best_of", "use /v1/completions").unless(is_one);
const FORMAT: Refused = instead("response_format", "use json_schema");
const REPETITION: Refused = instead("repetition_penalty", "use repeat_penalty").unless(is_one);
const MESSAGES: Refused = instead("messages", "use /v1/chat/completions");
const STREAM_OPTIONS: Refused = instead("stream_options", "use /v1/completions");

pub static COMPLETION: FieldTable = FieldTable {
    read: &[
        "prompt",
        "model",
        "stream",
        "n_predict",
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "ignore_eos",
        "logit_bias",
        "n_probs",
        "n_cmpl",
        "n",
        "n_indent",
        "json_schema",
        "return_tokens",
        "response_fields",
    ],
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: &[
        SAMPLERS,
        GRAMMAR,
        INPUT_PREFIX,
        INPUT_SUFFIX,
        INPUT_EXTRA,
        DYNATEMP,
        TOP_N_SIGMA,
        TYPICAL,
        XTC,
        DRY,
        MIROSTAT,
        ADAPTIVE,
        MIN_KEEP,
        TRIGGERS,
        PRESERVED,
        PROGRESS,
        TIMINGS,
        POST_SAMPLING,
        VERBOSE,
        LORA,
        IMAGES,
        MULTIMODAL,
        BEST_OF,
        FORMAT,
        REPETITION,
        MESSAGES,
        STREAM_OPTIONS,
        instead("suffix", "use /infill, or /v1/completions"),
        instead("logprobs", "use n_probs").unless(is_zero),
        refused("echo", is_false),
    ],
};

/// Editors send a list of `samplers` with llama.cpp's names and order.
pub static INFILL: FieldTable = FieldTable {
    read: &[
        "input_prefix",
        "input_suffix",
        "input_extra",
        "prompt",
        "model",
        "stream",
        "n_predict",
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "stop",
        "ignore_eos",
        "logit_bias",
        "n_probs",
        "n_cmpl",
        "n",
        "n_indent",
        "json_schema",
        "return_tokens",
        "response_fields",
        "samplers",
    ],
    read_at: &[],
    no_effect: NO_EFFECT,
    refused: &[
        GRAMMAR,
        DYNATEMP,
        TOP_N_SIGMA,
        TYPICAL,
        XTC,
        DRY,
        MIROSTAT,
        ADAPTIVE,
        MIN_KEEP,
        TRIGGERS,
        PRESERVED,
        PROGRESS,
        TIMINGS,
        POST_SAMPLING,
        VERBOSE,
        LORA,
        IMAGES,
        MULTIMODAL,
        BEST_OF,
        FORMAT,
        REPETITION,
        MESSAGES,
        STREAM_OPTIONS,
        instead("suffix", "use input_suffix"),
        instead("logprobs", "use n_probs").unless(is_zero),
        refused("echo", is_false),
    ],
};

pub static EMBEDDING: FieldTable = FieldTable {
    read: &[
        "content",
        "input",
        "model",
        "embd_normalize",
        "pooling",
        "add_special_tokens",
        "priority",
        "cache_salt",
    ],
    read_at: &[],
    no_effect: &[
        ("it serves the caller's own accounting", &["user"]),
        (
            "the header x-request-id names responses",
            &["request_id", "rid"],
        ),
    ],
    refused: &[
        instead("encoding_format", "use /v1/embeddings").unless(|value| value == "float"),
        instead("dimensions", "use /v1/embeddings"),
        instead("normalize", "use embd_normalize").unless(is_true),
        instead("prompt", "use content"),
        refused("truncate", is_false),
        refused("image_data", is_empty),
    ],
};
