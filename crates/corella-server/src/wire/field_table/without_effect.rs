//! The fields that change no answer at any endpoint, and are accepted.

use super::{Field, no_effect};

pub static EVERYWHERE: &[Field] = &[
    no_effect("user", ACCOUNTING),
    no_effect("metadata", ACCOUNTING),
    no_effect("store", ACCOUNTING),
    no_effect("safety_identifier", ACCOUNTING),
    no_effect("service_tier", ACCOUNTING),
    no_effect("moderation", ACCOUNTING),
    no_effect("prompt_cache_key", CACHE_HINT),
    no_effect("prompt_cache_retention", CACHE_HINT),
    no_effect("prompt_cache_options", CACHE_HINT),
    no_effect("session_id", CACHE_HINT),
    no_effect("cache_prompt", CACHE_HINT),
    no_effect("id_slot", CACHE_HINT),
    no_effect("n_cache_reuse", CACHE_HINT),
    no_effect(
        "keep_alive",
        "only requests of Ollama's API say how long the model stays loaded",
    ),
    no_effect("guided_decoding_backend", "one library reads all grammars"),
    no_effect("request_id", "the header x-request-id names responses"),
    no_effect("rid", "the header x-request-id names responses"),
    no_effect("truncation_side", ADJUSTMENT),
    no_effect("mirostat_tau", ADJUSTMENT),
    no_effect("mirostat_eta", ADJUSTMENT),
    no_effect("dry_base", ADJUSTMENT),
    no_effect("dry_allowed_length", ADJUSTMENT),
    no_effect("dry_penalty_last_n", ADJUSTMENT),
    no_effect("dry_sequence_breakers", ADJUSTMENT),
    no_effect("xtc_threshold", ADJUSTMENT),
    no_effect("adaptive_decay", ADJUSTMENT),
    no_effect("dynatemp_exponent", ADJUSTMENT),
    no_effect("grammar_lazy", ADJUSTMENT),
    no_effect("penalize_nl", ADJUSTMENT),
    no_effect("penalize_newline", ADJUSTMENT),
    no_effect("tool_prompt", ADJUSTMENT),
    no_effect("guideline", ADJUSTMENT),
    no_effect("reasoning_budget_message", ADJUSTMENT),
    no_effect("reasoning_budget_start_tag", ADJUSTMENT),
    no_effect("reasoning_budget_end_tag", ADJUSTMENT),
    no_effect("reasoning_budget_end_tags", ADJUSTMENT),
    no_effect(
        "mm_payload",
        "only text is read: there are no features of images",
    ),
    no_effect(
        "sse_ping_interval",
        "a stream that is silent has comments in any case",
    ),
    no_effect(
        "spaces_between_special_tokens",
        "the tokenizers that are supported put no spaces between special tokens",
    ),
    no_effect("num_gpu", MACHINE),
    no_effect("main_gpu", MACHINE),
    no_effect("num_thread", MACHINE),
    no_effect("num_batch", MACHINE),
    no_effect("use_mmap", MACHINE),
    no_effect("use_mlock", MACHINE),
    no_effect("numa", MACHINE),
    no_effect("low_vram", MACHINE),
    no_effect("f16_kv", MACHINE),
    no_effect("backend_sampling", MACHINE),
];

const ACCOUNTING: &str = "it serves the caller's own accounting and moderation";
const CACHE_HINT: &str = "the prefix cache needs no hints, and never changes an answer";
const ADJUSTMENT: &str = "it adjusts a feature whose own field is refused";
const MACHINE: &str = "it says how the machine computes, which is set when the server starts";
