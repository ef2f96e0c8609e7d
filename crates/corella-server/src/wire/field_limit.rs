//! Limits of fields that do not depend on the configuration. Requests are checked against them, and the description of
//! the API has them.

use std::ops::Bound::{Excluded, Included};

use crate::wire::number_range::NumberRange;

/// Endpoints whose requests a batch may have.
pub const BATCH_ENDPOINTS: [&str; 4] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
];
pub const MIN_FILE_LIFE_S: u64 = 3600;
/// Limits the life of a file, and is its default: a month, as OpenAI keeps files of batches.
pub const MAX_FILE_LIFE_S: u64 = 30 * 24 * 3600;
pub const MAX_GUIDED_CHOICES: usize = 4096;
/// Limits the prompts of one call, as OpenAI does.
pub const MAX_NUM_PROMPTS: usize = 2048;
pub const MAX_STOP_STRINGS: usize = 32;
/// Limits a stop string, because a stream holds back as much text as its longest one.
pub const MAX_STOP_BYTES: usize = 1024;
pub const MAX_STOP_TOKEN_IDS: usize = 256;
pub const MAX_CACHE_SALT_BYTES: usize = 1024;
/// Bounds of a batch's `metadata`, as in OpenAI's API.
pub const MAX_NUM_PAIRS: usize = 16;
pub const MAX_KEY_CHARS: usize = 64;
pub const MAX_VALUE_CHARS: usize = 512;
/// The supremum of the numbers that round to a finite `f32`.
const F32_BOUND: f64 = 3.402_823_567_797_336_6e38;
pub const TEMPERATURE: NumberRange = NumberRange(Included(0.0), Excluded(F32_BOUND));
pub const TOP_P: NumberRange = NumberRange(Excluded(0.0), Included(1.0));
pub const MIN_P: NumberRange = NumberRange(Included(0.0), Included(1.0));
pub const PENALTY: NumberRange = NumberRange(Included(-2.0), Included(2.0));
pub const REPETITION_PENALTY: NumberRange = NumberRange(Excluded(0.0), Excluded(F32_BOUND));
pub const LOGIT_BIAS: NumberRange = NumberRange(Included(-100.0), Included(100.0));
pub const MAX_ALLOWED_TOKEN_IDS: usize = 16_384;
pub const MAX_BAD_WORDS: usize = 256;
pub const MAX_BAD_WORD_BYTES: usize = 128;
/// Limits a tool's name: Anthropic's bound, which is above OpenAI's 64.
pub const MAX_TOOL_NAME_BYTES: usize = 128;
