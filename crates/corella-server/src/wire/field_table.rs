//! Every request field that this server knows by name: the fields of OpenAI's API and the additions
//! of vLLM, SGLang, llama.cpp, Ollama, TGI and the usual clients.
//!
//! Ignoring a field may give a wrong answer that looks right. So every field is either read, or
//! accepted because it cannot change the answer, or refused by name.

pub mod batch;
#[cfg(test)]
mod comparison;
mod endpoint;
pub mod llama_server;
pub mod messages;
pub mod ollama;
pub mod pooling;
pub mod responses;

pub use endpoint::Endpoint;

use serde_json::Value;

/// The treatment of a field that is not `null`.
pub enum Treatment {
    Read,
    /// Read at these endpoints only.
    ReadAt(&'static [Endpoint]),
    /// Accepted but not read, for this reason.
    NoEffect(&'static str),
    /// Refused, unless its value asks for Corella's behaviour.
    Refused(&'static Refused),
}

pub struct Refused {
    name: &'static str,
    pub is_neutral: fn(&Value) -> bool,
    /// An alternative for the caller.
    pub advice: &'static str,
}

/// The known fields of one JSON object.
pub struct FieldTable {
    read: &'static [&'static str],
    read_at: &'static [(&'static str, &'static [Endpoint])],
    no_effect: &'static [(&'static str, &'static [&'static str])],
    /// A table that extends another may read some of its refused fields.
    refused: &'static [Refused],
}

impl FieldTable {
    pub fn find(&self, name: &str) -> Option<Treatment> {
        if self.read.contains(&name) {
            return Some(Treatment::Read);
        }
        if let Some((_, endpoints)) = self.read_at.iter().find(|(known, _)| *known == name) {
            return Some(Treatment::ReadAt(endpoints));
        }
        let no_effect = self
            .no_effect
            .iter()
            .find(|(_, names)| names.contains(&name));
        if let Some((reason, _)) = no_effect {
            return Some(Treatment::NoEffect(reason));
        }
        let refused = self.refused.iter().find(|refused| refused.name == name);
        refused.map(Treatment::Refused)
    }

    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        let read = self.read.iter().copied();
        let read_at = self.read_at.iter().map(|(name, _)| *name);
        let no_effect = self
            .no_effect
            .iter()
            .flat_map(|(_, names)| names.iter().copied());
        let refused = self
            .refused
            .iter()
            .map(|refused| refused.name)
            .filter(|name| !self.read.contains(name));
        read.chain(read_at).chain(no_effect).chain(refused)
    }
}

/// The fields of the body, for chat, completions and tokenising.
pub static BODY: FieldTable = FieldTable {
    read: &[
        "model",
        "stream",
        "stream_options",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "ignore_eos",
        "priority",
        "ttft_slo_ms",
        "tpot_slo_ms",
        "cache_salt",
        "logprobs",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_metrics",
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_json_object",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "echo",
        "add_special_tokens",
    ],
    read_at: &[
        ("messages", &[Endpoint::Chat, Endpoint::Tokenize]),
        ("prompt", &[Endpoint::Completions, Endpoint::Tokenize]),
        ("top_logprobs", &[Endpoint::Chat]),
        ("suffix", &[Endpoint::Completions, Endpoint::Tokenize]),
        ("best_of", &[Endpoint::Completions, Endpoint::Tokenize]),
        (
            "add_generation_prompt",
            &[Endpoint::Chat, Endpoint::Tokenize],
        ),
        (
            "continue_final_message",
            &[Endpoint::Chat, Endpoint::Tokenize],
        ),
        (
            "chat_template_kwargs",
            &[Endpoint::Chat, Endpoint::Tokenize],
        ),
        ("reasoning_effort", &[Endpoint::Chat, Endpoint::Tokenize]),
        ("tools", &[Endpoint::Chat, Endpoint::Tokenize]),
        ("tool_choice", &[Endpoint::Chat, Endpoint::Tokenize]),
        ("parallel_tool_calls", &[Endpoint::Chat, Endpoint::Tokenize]),
        ("tokens", &[Endpoint::Detokenize]),
        ("return_token_strs", &[Endpoint::Tokenize]),
        // llama.cpp.
        ("add_special", &[Endpoint::Tokenize]),
        ("with_pieces", &[Endpoint::Tokenize]),
    ],
    no_effect: &[
        (
            "they serve the caller's own accounting and moderation",
            &[
                "user",
                "metadata",
                "store",
                "safety_identifier",
                "service_tier",
                "moderation",
            ],
        ),
        (
            "the prefix cache needs no hints, and never changes an answer",
            &[
                "prompt_cache_key",
                "prompt_cache_retention",
                "prompt_cache_options",
                "session_id",
                "cache_prompt",
                "id_slot",
                "n_cache_reuse",
            ],
        ),
        (
            "the model stays loaded for as long as the server runs",
            &["keep_alive"],
        ),
        (
            "one library reads all grammars",
            &["guided_decoding_backend"],
        ),
        (
            "the header x-request-id names responses",
            &["request_id", "rid"],
        ),
        (
            "they adjust a feature whose own field is refused",
            &[
                "truncation_side",
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
                "penalize_newline",
                "tool_prompt",
                "guideline",
                "reasoning_budget_message",
                "reasoning_budget_start_tag",
                "reasoning_budget_end_tag",
                "reasoning_budget_end_tags",
            ],
        ),
        (
            "only text is read: there are no features of images",
            &["mm_payload"],
        ),
        (
            "a stream that is silent has comments in any case",
            &["sse_ping_interval"],
        ),
        (
            "the tokenizers that are supported put no spaces between special tokens",
            &["spaces_between_special_tokens"],
        ),
        (
            "they say how the machine computes, which is set when the server starts",
            &[
                "num_gpu",
                "main_gpu",
                "num_thread",
                "num_batch",
                "use_mmap",
                "use_mlock",
                "numa",
                "low_vram",
                "backend_sampling",
            ],
        ),
    ],
    refused: &[
        // OpenAI.
        refused("functions", is_empty),
        refused("function_call", |value| value == "none" || value == "auto"),
        refused("modalities", |value| {
            value
                .as_array()
                .is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
        }),
        refused("audio", never),
        refused("prediction", never),
        refused("reasoning", never),
        refused("verbosity", |value| value == "medium"),
        refused("web_search_options", never),
        // The Responses API.
        instead("input", "use messages, or /v1/responses"),
        instead("instructions", "use a message with the role \"system\""),
        instead("max_output_tokens", "use max_completion_tokens"),
        // vLLM.
        refused("prompt_embeds", never),
        refused("use_beam_search", is_false),
        refused("length_penalty", is_one),
        refused("early_stopping", is_false),
        refused("logits_processors", is_empty),
        refused("guided_whitespace_pattern", never),
        refused("structural_tag", never),
        refused("truncate_prompt_tokens", never),
        refused("include_reasoning", is_true),
        refused("thinking_token_budget", never),
        refused("kv_transfer_params", is_empty),
        refused("vllm_xargs", is_empty),
        refused("chat_template", never),
        refused("documents", is_empty),
        refused("mm_processor_kwargs", is_empty),
        refused("media_io_kwargs", is_empty),
        refused("repetition_detection", never),
        refused("watermarking", is_false),
        refused("logprob_token_ids", is_empty),
        refused("return_prompt_text", is_false),
        refused("return_token_offsets", is_false),
        refused("return_mm_kwargs", |value| *value == true),
        refused("routed_experts_prompt_start", is_zero),
        refused("ec_transfer_params", is_empty),
        refused("stream_interval", is_one),
        refused("return_weight_versions", is_false),
        refused("dimensions", never),
        // SGLang.
        refused("separate_reasoning", is_true),
        refused("stream_reasoning", is_true),
        instead("regex", "use structured_outputs"),
        instead("ebnf", "use structured_outputs"),
        refused("stop_regex", is_empty),
        refused("no_stop_trim", is_false),
        refused("lora_path", never),
        refused("session_params", is_empty),
        refused("custom_logit_processor", never),
        refused("custom_params", is_empty),
        refused("return_hidden_states", is_false),
        refused("return_routed_experts", is_false),
        refused("return_logprob", is_false),
        refused("bootstrap_host", never),
        refused("bootstrap_port", never),
        refused("bootstrap_room", never),
        refused("data_parallel_rank", never),
        refused("extra_key", never),
        instead("min_new_tokens", "use min_tokens"),
        instead("input_ids", "use prompt of /v1/completions"),
        instead("text", "use prompt or messages"),
        instead("sampling_params", "put its fields beside it"),
        // llama.cpp.
        instead("content", "use prompt or messages"),
        refused("parse_special", is_true),
        instead("n_predict", "use max_tokens"),
        instead("repeat_penalty", "use repetition_penalty").unless(is_one),
        refused("repeat_last_n", is_minus_one),
        refused("n_probs", is_zero),
        refused("min_keep", is_zero),
        refused("n_keep", is_zero),
        refused("n_discard", is_zero),
        refused("n_indent", is_zero),
        refused("n_cmpl", |value| *value == 1),
        refused("parse_tool_calls", is_true),
        refused("reasoning_format", |value| {
            value == "auto" || value == "deepseek"
        }),
        refused("thinking_forced_open", is_false),
        refused("t_max_predict_ms", is_no_time),
        refused("t_max_prompt_ms", is_no_time),
        refused("verbose", is_false),
        refused("adaptive_target", is_negative),
        refused("reasoning_budget_tokens", is_minus_one),
        refused("thinking_budget_tokens", is_minus_one),
        refused("reasoning_control", is_false),
        refused("chat_format", never),
        refused("chat_parser", |value| value == ""),
        refused("generation_prompt", |value| value == ""),
        refused("grammar_triggers", is_empty),
        refused("preserved_tokens", is_empty),
        refused("dynatemp_range", is_zero),
        refused("top_n_sigma", is_negative),
        refused("typical_p", is_one),
        refused("tfs_z", is_one),
        refused("xtc_probability", is_zero),
        refused("dry_multiplier", is_zero),
        refused("mirostat", is_zero),
        refused("grammar", |value| value == ""),
        instead("json_schema", "use structured_outputs"),
        refused("samplers", never),
        refused("return_tokens", is_false),
        refused("return_progress", is_false),
        refused("timings_per_token", is_false),
        refused("post_sampling_probs", is_false),
        refused("response_fields", is_empty),
        refused("lora", is_empty),
        refused("image_data", is_empty),
        instead("input_prefix", "use prompt"),
        instead("input_suffix", "use prompt"),
        // Ollama.
        instead("options", "put its fields beside it").unless(is_empty),
        instead("num_predict", "use max_tokens"),
        instead(
            "num_ctx",
            "the context is set when the server starts, by --max-model-len",
        ),
        refused("num_keep", is_zero),
        refused("format", |value| value == ""),
        instead("think", "use chat_template_kwargs"),
        refused("raw", is_false),
        instead("system", "use a message with the role \"system\"").unless(|value| value == ""),
        refused("template", |value| value == ""),
        refused("context", is_empty),
        refused("images", is_empty),
        refused("truncate", is_false),
        refused("shift", is_false),
        refused("vocab_only", is_false),
        // TGI.
        instead("inputs", "use prompt or messages"),
        instead("parameters", "put its fields beside it").unless(is_empty),
        instead("max_new_tokens", "use max_tokens"),
        instead("do_sample", "use temperature").unless(|value| *value == true),
        refused("decoder_input_details", is_false),
        refused("details", is_false),
        refused("return_full_text", is_false),
        refused("top_n_tokens", is_zero),
        refused("watermark", is_false),
        refused("adapter_id", never),
        // A client library should have taken this one apart.
        instead("extra_body", "put its fields beside it").unless(is_empty),
    ],
};

/// The fields of `/tokenize`, which reads a text under llama-server's name too.
pub static TOKENIZE: FieldTable = FieldTable {
    read: &READ_WITH_CONTENT,
    read_at: BODY.read_at,
    no_effect: BODY.no_effect,
    refused: BODY.refused,
};

static READ_WITH_CONTENT: [&str; BODY.read.len() + 1] = {
    let mut names = ["content"; BODY.read.len() + 1];
    let mut at = 0;
    while at < BODY.read.len() {
        names[at + 1] = BODY.read[at];
        at += 1;
    }
    names
};

pub static STREAM_OPTIONS: FieldTable = FieldTable {
    read: &["include_usage", "continuous_usage_stats"],
    read_at: &[],
    no_effect: &[("padding against eavesdroppers", &["include_obfuscation"])],
    refused: &[],
};

/// A member of a message that a template may use counts as read.
pub static MESSAGE: FieldTable = FieldTable {
    read: &[
        "role",
        "content",
        "name",
        "tool_call_id",
        "tool_calls",
        "reasoning",
        "reasoning_content",
        "thinking",
        "prefix",
        "partial",
    ],
    read_at: &[],
    no_effect: &[
        (
            "a server wrote it into an answer that is now sent back",
            &[
                "refusal",
                "annotations",
                "id",
                "index",
                "weight",
                "stop_reason",
            ],
        ),
        ("the prefix cache needs no hints", &["cache_control"]),
        (
            "client libraries store it with a message for themselves",
            &[
                "provider_specific_fields",
                "additional_kwargs",
                "thinking_blocks",
                "parsed",
                "thread",
            ],
        ),
    ],
    refused: &[
        refused("function_call", never),
        refused("audio", never),
        refused("images", is_empty),
    ],
};

/// A tool call in an earlier message.
pub static CALL: FieldTable = FieldTable {
    read: &["id", "type", "function"],
    read_at: &[],
    no_effect: &[(
        "a server or a client library wrote it into an answer that is now sent back",
        &["index", "parsed_arguments", "extra_content"],
    )],
    refused: &[],
};

/// The function of a tool call.
pub static CALLED_FUNCTION: FieldTable = FieldTable {
    read: &["name", "arguments"],
    read_at: &[],
    no_effect: &[(
        "a client library wrote it into an answer that is now sent back",
        &["parsed_arguments"],
    )],
    refused: &[],
};

/// An offered tool.
pub static TOOL: FieldTable = FieldTable {
    read: &["type", "function"],
    read_at: &[],
    no_effect: &[("the prefix cache needs no hints", &["cache_control"])],
    refused: &[],
};

/// The function of an offered tool. The template sees all of it.
pub static FUNCTION: FieldTable = FieldTable {
    read: &["name", "description", "parameters", "return"],
    read_at: &[],
    no_effect: &[(
        "the schema of a call that the model is free to make is not enforced",
        &["strict"],
    )],
    refused: &[],
};

/// A part of a message's content. Its reader checks its type.
pub static CONTENT_PART: FieldTable = FieldTable {
    read: &["type", "text"],
    read_at: &[],
    no_effect: &[
        (
            "the prefix cache needs no hints",
            &["cache_control", "prompt_cache_breakpoint"],
        ),
        (
            "a server wrote it into an answer that is now sent back",
            &["annotations", "id", "index", "extras"],
        ),
    ],
    // These fields belong to parts of other types than text.
    refused: &[
        refused("image_url", never),
        refused("input_audio", never),
        refused("audio_url", never),
        refused("video_url", never),
        refused("file", never),
        refused("refusal", never),
    ],
};

const fn refused(name: &'static str, is_neutral: fn(&Value) -> bool) -> Refused {
    Refused {
        name,
        is_neutral,
        advice: "leave it out",
    }
}

const fn instead(name: &'static str, advice: &'static str) -> Refused {
    Refused {
        name,
        is_neutral: never,
        advice,
    }
}

impl Refused {
    const fn unless(mut self, is_neutral: fn(&Value) -> bool) -> Self {
        self.is_neutral = is_neutral;
        self
    }
}

fn never(_: &Value) -> bool {
    false
}

fn is_false(value: &Value) -> bool {
    *value == false
}

fn is_true(value: &Value) -> bool {
    *value == true
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_minus_one(value: &Value) -> bool {
    *value == -1
}

fn is_negative(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number < 0.0)
}

/// A disabled time limit.
fn is_no_time(value: &Value) -> bool {
    value.as_i64().is_some_and(|ms| ms <= 0)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
