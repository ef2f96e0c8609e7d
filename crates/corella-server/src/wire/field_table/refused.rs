//! All fields that are refused on purpose: they would change the answer, and Corella does not support them.
//!
//! A value is accepted if it asks for Corella's own behaviour.

use serde_json::Value;

use super::{Field, instead, refuse};

/// Fields refused in every body that does not read them.
pub static EVERYWHERE: &[Field] = &[
    // OpenAI.
    refuse("functions", is_empty),
    refuse("function_call", |value| value == "none" || value == "auto"),
    refuse("modalities", |value| {
        value
            .as_array()
            .is_some_and(|kinds| kinds.iter().all(|kind| kind == "text"))
    }),
    refuse("audio", never),
    refuse("prediction", never),
    refuse("reasoning", never),
    refuse("verbosity", |value| value == "medium"),
    refuse("web_search_options", never),
    // vLLM.
    refuse("prompt_embeds", never),
    refuse("use_beam_search", is_false),
    refuse("length_penalty", is_one),
    refuse("early_stopping", is_false),
    refuse("logits_processors", is_empty),
    refuse("guided_whitespace_pattern", never),
    refuse("structural_tag", never),
    refuse("truncate_prompt_tokens", never),
    refuse("include_reasoning", is_true),
    refuse("thinking_token_budget", never),
    refuse("kv_transfer_params", is_empty),
    refuse("vllm_xargs", is_empty),
    refuse("chat_template", never),
    refuse("documents", is_empty),
    refuse("mm_processor_kwargs", is_empty),
    refuse("media_io_kwargs", is_empty),
    refuse("repetition_detection", never),
    refuse("watermarking", is_false),
    refuse("logprob_token_ids", is_empty),
    refuse("return_prompt_text", is_false),
    refuse("return_token_offsets", is_false),
    refuse("return_mm_kwargs", is_true),
    refuse("routed_experts_prompt_start", is_zero),
    refuse("ec_transfer_params", is_empty),
    refuse("stream_interval", is_one),
    refuse("return_weight_versions", is_false),
    refuse("dimensions", never),
    refuse("padding", |value| value == "do_not_pad"),
    // SGLang.
    refuse("separate_reasoning", is_true),
    refuse("stream_reasoning", is_true),
    refuse("stop_regex", is_empty),
    refuse("no_stop_trim", is_false),
    instead("lora_path", NAME_ADAPTER),
    refuse("session_params", is_empty),
    refuse("custom_logit_processor", never),
    refuse("custom_params", is_empty),
    refuse("return_hidden_states", is_false),
    refuse("return_routed_experts", is_false),
    refuse("return_logprob", is_false),
    refuse("bootstrap_host", never),
    refuse("bootstrap_port", never),
    refuse("bootstrap_room", never),
    refuse("data_parallel_rank", never),
    refuse("extra_key", never),
    instead("sampling_params", UNPACK),
    // llama.cpp.
    refuse("parse_special", is_true),
    refuse("repeat_last_n", is_minus_one),
    refuse("n_probs", is_zero),
    refuse("min_keep", is_zero),
    refuse("n_keep", is_zero),
    refuse("n_discard", is_zero),
    refuse("n_indent", is_zero),
    refuse("n_cmpl", is_one),
    refuse("parse_tool_calls", is_true),
    refuse("reasoning_format", |value| {
        value == "auto" || value == "deepseek"
    }),
    refuse("thinking_forced_open", is_false),
    refuse("t_max_predict_ms", is_no_time),
    refuse("t_max_prompt_ms", is_no_time),
    refuse("verbose", is_false),
    refuse("adaptive_target", is_negative),
    refuse("reasoning_budget_tokens", is_minus_one),
    refuse("thinking_budget_tokens", is_minus_one),
    refuse("reasoning_control", is_false),
    refuse("chat_format", never),
    refuse("chat_parser", is_no_text),
    refuse("generation_prompt", is_no_text),
    refuse("grammar_triggers", is_empty),
    refuse("preserved_tokens", is_empty),
    refuse("dynatemp_range", is_zero),
    refuse("top_n_sigma", is_negative),
    refuse("typical_p", is_one),
    refuse("tfs_z", is_one),
    refuse("xtc_probability", is_zero),
    refuse("dry_multiplier", is_zero),
    refuse("mirostat", is_zero),
    refuse("grammar", is_no_text),
    refuse("samplers", never),
    refuse("return_tokens", is_false),
    refuse("return_progress", is_false),
    refuse("timings_per_token", is_false),
    refuse("post_sampling_probs", is_false),
    refuse("response_fields", is_empty),
    instead("lora", NAME_ADAPTER).unless(is_empty),
    refuse("image_data", is_empty),
    refuse("multimodal_data", is_empty),
    // Ollama.
    instead("options", UNPACK).unless(is_empty),
    instead(
        "num_ctx",
        "the context is set when the server starts, by --max-model-len",
    ),
    refuse("num_keep", is_zero),
    refuse("format", is_no_text),
    refuse("raw", is_false),
    refuse("template", is_no_text),
    refuse("context", is_empty),
    refuse("images", is_empty),
    refuse("truncate", is_false),
    refuse("shift", is_false),
    refuse("vocab_only", is_false),
    // TGI.
    instead("parameters", UNPACK).unless(is_empty),
    refuse("decoder_input_details", is_false),
    refuse("details", is_false),
    refuse("return_full_text", is_false),
    refuse("top_n_tokens", is_zero),
    refuse("watermark", is_false),
    instead("adapter_id", NAME_ADAPTER),
    // A client library should have unpacked this field.
    instead("extra_body", UNPACK).unless(is_empty),
];

/// Fields refused in chats and completions.
pub static GENERATING: &[Field] = &[
    // The Responses API.
    instead("input", "use messages, or /v1/responses"),
    instead("instructions", SYSTEM_MESSAGE),
    instead("max_output_tokens", "use max_completion_tokens"),
    // SGLang.
    instead("regex", "use structured_outputs"),
    instead("ebnf", "use structured_outputs.grammar"),
    instead("min_new_tokens", "use min_tokens"),
    instead("input_ids", "use prompt of /v1/completions"),
    instead("text", "use prompt or messages"),
    // llama.cpp.
    instead("content", "use prompt or messages"),
    instead("n_predict", "use max_tokens"),
    instead("repeat_penalty", "use repetition_penalty").unless(is_one),
    instead("json_schema", "use structured_outputs"),
    instead("grammar", "use structured_outputs.grammar").unless(is_no_text),
    instead("input_prefix", "use prompt"),
    instead("input_suffix", "use prompt"),
    // Ollama.
    instead("num_predict", "use max_tokens"),
    instead("think", "use chat_template_kwargs"),
    instead("system", SYSTEM_MESSAGE).unless(is_no_text),
    // TGI.
    instead("inputs", "use prompt or messages"),
    instead("max_new_tokens", "use max_tokens"),
    instead("do_sample", "use temperature").unless(is_true),
];

pub static RESPONSES: &[Field] = &[
    instead(
        "conversation",
        "use previous_response_id, or send the whole conversation as input",
    ),
    refuse("background", is_false),
    refuse("truncation", |value| value == "disabled"),
    refuse("prompt", never),
    refuse("image", is_empty),
    refuse("context_management", is_empty),
    instead("messages", "use input"),
    instead("max_tokens", "use max_output_tokens"),
    instead("max_completion_tokens", "use max_output_tokens"),
    instead("reasoning_effort", "use reasoning.effort"),
    instead("response_format", "use text.format"),
    instead("structured_outputs", "use text.format"),
    instead("previous_input_messages", "send them in input").unless(is_empty),
    refuse("enable_response_messages", is_false),
];

pub static MESSAGES: &[Field] = &[
    refuse("container", never),
    refuse("mcp_servers", is_empty),
    instead("output_format", "use output_config.format"),
    refuse("speed", |value| value == "standard"),
    instead("max_completion_tokens", "use max_tokens"),
    instead("stop", "use stop_sequences"),
    instead("prompt", "use messages"),
    instead("max_tokens_to_sample", "use max_tokens"),
    instead("compaction", "ask for a summary in a message"),
    instead("thread", "send the whole conversation"),
    instead(
        "chat_template_kwargs",
        "use thinking or output_config.effort",
    )
    .unless(is_empty),
];

pub static OLLAMA_CHAT: &[Field] = &[
    instead("prompt", "use messages, or /api/generate"),
    instead("system", SYSTEM_MESSAGE),
    instead("tool_choice", "leave it out, or use /v1/chat/completions"),
];

pub static OLLAMA_GENERATE: &[Field] = &[
    instead("context", "send the whole conversation to /api/chat").unless(is_empty),
    refuse("width", never),
    refuse("height", never),
    refuse("steps", never),
    instead("messages", "use prompt, or /api/chat"),
    instead("tools", "use /api/chat").unless(is_empty),
];

/// `truncate` and `shift` change nothing, because a prompt that is too long is refused.
pub static OLLAMA_GENERATING: &[Field] = &[
    refuse("truncate", Value::is_boolean),
    refuse("shift", Value::is_boolean),
    instead("temperature", "put it in options"),
    instead("seed", "put it in options"),
    instead("stop", "put it in options"),
    instead("max_tokens", "use options.num_predict"),
    instead("response_format", "use format"),
];

pub static OLLAMA_EMBED: &[Field] = &[
    refuse("truncate", Value::is_boolean),
    instead("prompt", "use input, or /api/embeddings"),
    instead("encoding_format", "use /v1/embeddings").unless(is_float),
];

pub static OLLAMA_EMBEDDINGS: &[Field] = &[
    refuse("truncate", Value::is_boolean),
    instead("input", "use prompt, or /api/embed"),
    instead("dimensions", "use /api/embed"),
];

pub static OLLAMA_SHOW: &[Field] = &[refuse("system", is_no_text), refuse("options", is_empty)];

pub static IN_OLLAMA_OPTIONS: &[Field] = &[
    instead(
        "repeat_last_n",
        "penalties count the whole context, which is -1; 64, Ollama's default, is taken as unset",
    )
    .unless(|value| *value == -1 || *value == 64),
    refuse("logits_all", is_false),
    refuse("embedding_only", is_false),
];

pub static IN_OLLAMA_MESSAGE: &[Field] = &[refuse("images", is_empty)];

/// Fields refused in `/completion` and `/infill`.
pub static LLAMA_SERVER: &[Field] = &[
    instead("best_of", "use /v1/completions").unless(is_one),
    instead("response_format", "use json_schema"),
    instead("repetition_penalty", "use repeat_penalty").unless(is_one),
    instead("messages", "use /v1/chat/completions"),
    instead("stream_options", "use /v1/completions"),
    instead("logprobs", "use n_probs").unless(is_zero),
    refuse("echo", is_false),
];

pub static LLAMA_COMPLETION: &[Field] = &[
    instead("input_prefix", "use prompt, or /infill"),
    instead("input_suffix", "use /infill"),
    instead("input_extra", "use /infill").unless(is_empty),
    instead("suffix", "use /infill, or /v1/completions"),
];

pub static INFILL: &[Field] = &[instead("suffix", "use input_suffix")];

pub static LLAMA_EMBEDDING: &[Field] = &[
    instead("encoding_format", "use /v1/embeddings").unless(is_float),
    instead("dimensions", "use /v1/embeddings"),
    instead("normalize", "use embd_normalize").unless(is_true),
    instead("prompt", "use content"),
];

/// Fields refused in `/v1/embeddings` and `/pooling`: the additions of vLLM, llama.cpp, TEI, Ollama, Cohere, Jina and
/// Voyage.
pub static EMBEDDINGS: &[Field] = &[
    refuse("embed_dtype", |value| value == "float32"),
    refuse("endianness", |value| value == "native" || value == "little"),
    instead("use_activation", "use normalize").unless(is_true),
    instead("content", "use input"),
    instead("inputs", "use input"),
    instead("prompt", "use input"),
    instead("embd_normalize", "use normalize"),
    refuse("input_type", never),
    // `/pooling` names its task.
    refuse("task", |value| value == "embed"),
    instead("embedding_type", "use encoding_format").unless(is_float),
    instead("output_dimension", "use dimensions"),
    refuse("output_dtype", is_float),
    refuse("late_chunking", is_false),
    instead("normalized", "use normalize"),
];

pub static SCORE: &[Field] = &[
    instead("queries", "use text_1"),
    instead("documents", "use text_2"),
    instead("items", "use text_2"),
    instead("data_1", "use text_1"),
    instead("data_2", "use text_2"),
    refuse("softmax_normalize", is_false),
];

pub static RERANK: &[Field] = &[
    instead("texts", "use documents"),
    refuse("raw_scores", never),
    refuse("return_text", is_true),
    refuse("max_chunks_per_doc", never),
    refuse("rank_fields", is_empty),
];

pub static CLASSIFY: &[Field] = &[
    // The pooling of hidden states is part of the model.
    refuse("pooling", never),
    refuse("use_activation", is_true),
    refuse("activation", is_true),
];

/// Fields refused in all endpoints that embed, compare or classify.
pub static POOLED: &[Field] = &[
    refuse("chat_template_kwargs", is_empty),
    refuse("instruction", never),
    refuse("max_tokens_per_doc", is_zero),
    refuse("max_tokens_per_query", is_zero),
    refuse("truncation", is_false),
    refuse("activation", never),
    refuse("use_activation", never),
    instead("messages", "send texts"),
    // These belong to `messages`.
    refuse("add_generation_prompt", is_false),
    refuse("continue_final_message", is_false),
];

pub static IN_MESSAGE: &[Field] = &[
    refuse("function_call", never),
    refuse("audio", never),
    refuse("images", is_empty),
];

/// Fields of content parts that are no text.
pub static IN_CONTENT_PART: &[Field] = &[
    refuse("image_url", never),
    refuse("input_audio", never),
    refuse("audio_url", never),
    refuse("video_url", never),
    refuse("file", never),
    refuse("refusal", never),
];

pub static IN_TEXT: &[Field] = &[refuse("verbosity", |value| value == "medium")];

pub static IN_REASONING: &[Field] = &[
    refuse("summary", |value| value == "auto"),
    refuse("generate_summary", |value| value == "auto"),
    refuse("encrypted_content", never),
    refuse("context", |value| value == "auto"),
    refuse("mode", |value| value == "standard"),
];

pub static IN_OUTPUT_CONFIG: &[Field] = &[refuse("task_budget", never)];

pub static IN_MESSAGE_TOOL: &[Field] = &[refuse("input_examples", is_empty)];

const NAME_ADAPTER: &str = "name the adapter in model";
const SYSTEM_MESSAGE: &str = "use a message with the role \"system\"";
const UNPACK: &str = "put its fields beside it";

/// No value asks for Corella's own behaviour.
pub fn never(_: &Value) -> bool {
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

fn is_no_text(value: &Value) -> bool {
    value == ""
}

/// OpenAI's default format of vectors.
fn is_float(value: &Value) -> bool {
    value == "float"
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}
