//! The messages of vLLM's service `vllm.Inference`, version 0.6.0. Fields that change nothing here are left out: a
//! decoder skips them.

use std::collections::BTreeMap;

use prost::{Message, Oneof};

use crate::wire::protobuf_json::Struct;

#[derive(Clone, PartialEq, Message)]
pub struct GenerateRequest {
    #[prost(string, tag = "1")]
    pub request_id: String,
    #[prost(string, tag = "2")]
    pub model: String,
    #[prost(oneof = "Prompt", tags = "3, 4")]
    pub prompt: Option<Prompt>,
    #[prost(float, optional, tag = "5")]
    pub temperature: Option<f32>,
    #[prost(message, optional, tag = "6")]
    pub sampling: Option<RandomSampling>,
    #[prost(message, optional, tag = "7")]
    pub decoding: Option<DecodingParameters>,
    #[prost(message, optional, tag = "8")]
    pub stopping: Option<StoppingCriteria>,
    #[prost(message, optional, tag = "9")]
    pub response: Option<ResponseOptions>,
    #[prost(message, optional, tag = "10")]
    pub kv: Option<KvCacheParameters>,
    #[prost(uint32, tag = "11")]
    pub truncate_prompt_tokens: u32,
    #[prost(int32, tag = "12")]
    pub priority: i32,
    /// Only the number of items is read: all are refused.
    #[prost(bytes = "vec", repeated, tag = "14")]
    pub media: Vec<Vec<u8>>,
    #[prost(string, tag = "15")]
    pub lora_name: String,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Prompt {
    #[prost(string, tag = "3")]
    Text(String),
    #[prost(message, tag = "4")]
    TokenIds(TokenIds),
}

#[derive(Clone, PartialEq, Message)]
pub struct TokenIds {
    #[prost(uint32, repeated, tag = "1")]
    pub ids: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RandomSampling {
    #[prost(uint32, tag = "1")]
    pub num_sequences: u32,
    #[prost(uint32, optional, tag = "2")]
    pub top_k: Option<u32>,
    #[prost(float, optional, tag = "3")]
    pub top_p: Option<f32>,
    #[prost(float, optional, tag = "4")]
    pub min_p: Option<f32>,
    #[prost(int64, optional, tag = "5")]
    pub seed: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DecodingParameters {
    #[prost(float, tag = "1")]
    pub presence_penalty: f32,
    #[prost(float, tag = "2")]
    pub frequency_penalty: f32,
    #[prost(float, tag = "3")]
    pub repetition_penalty: f32,
    #[prost(btree_map = "uint32, float", tag = "4")]
    pub logit_bias: BTreeMap<u32, f32>,
    #[prost(uint32, repeated, tag = "5")]
    pub allowed_token_ids: Vec<u32>,
    #[prost(oneof = "StructuredOutput", tags = "6, 7, 8, 9, 10, 11")]
    pub structured_output: Option<StructuredOutput>,
    #[prost(message, repeated, tag = "12")]
    pub bad_words_token_ids: Vec<TokenIds>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum StructuredOutput {
    #[prost(string, tag = "6")]
    Json(String),
    #[prost(string, tag = "7")]
    Regex(String),
    #[prost(message, tag = "8")]
    Choice(StringChoices),
    #[prost(string, tag = "9")]
    Grammar(String),
    #[prost(bool, tag = "10")]
    JsonObject(bool),
    #[prost(string, tag = "11")]
    StructuralTag(String),
}

#[derive(Clone, PartialEq, Message)]
pub struct StringChoices {
    #[prost(string, repeated, tag = "1")]
    pub choices: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct StoppingCriteria {
    #[prost(uint32, tag = "1")]
    pub max_new_tokens: u32,
    #[prost(uint32, tag = "2")]
    pub min_new_tokens: u32,
    #[prost(uint32, repeated, tag = "3")]
    pub stop_token_ids: Vec<u32>,
    #[prost(string, repeated, tag = "4")]
    pub stop_strings: Vec<String>,
    #[prost(bool, tag = "5")]
    pub include_stop_strings: bool,
    #[prost(bool, tag = "6")]
    pub ignore_eos: bool,
    #[prost(int64, optional, tag = "7")]
    pub thinking_token_budget: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ResponseOptions {
    #[prost(bool, tag = "1")]
    pub prompt_token_ids: bool,
    #[prost(bool, tag = "2")]
    pub prompt_logprobs: bool,
    #[prost(message, optional, tag = "3")]
    pub prompt_candidates: Option<CandidateTokens>,
    #[prost(bool, optional, tag = "4")]
    pub output_text: Option<bool>,
    #[prost(bool, tag = "5")]
    pub output_token_ids: bool,
    #[prost(bool, tag = "6")]
    pub output_logprobs: bool,
    #[prost(message, optional, tag = "7")]
    pub output_candidates: Option<CandidateTokens>,
    #[prost(bool, optional, tag = "8")]
    pub skip_special_tokens: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
pub struct KvCacheParameters {
    #[prost(bool, tag = "1")]
    pub bypass_prefix_cache: bool,
    #[prost(string, tag = "2")]
    pub cache_salt: String,
    #[prost(message, optional, tag = "3")]
    pub kv_transfer_params: Option<Struct>,
    #[prost(message, optional, tag = "4")]
    pub ec_transfer_params: Option<Struct>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CandidateTokens {
    #[prost(oneof = "Select", tags = "1, 2, 3")]
    pub select: Option<Select>,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Select {
    #[prost(uint32, tag = "1")]
    TopN(u32),
    #[prost(message, tag = "2")]
    TokenIds(TokenIds),
    #[prost(bool, tag = "3")]
    All(bool),
}

#[derive(Clone, PartialEq, Message)]
pub struct GenerateResponse {
    #[prost(message, optional, tag = "1")]
    pub prompt_info: Option<PromptInfo>,
    #[prost(message, optional, tag = "2")]
    pub outputs: Option<SequenceOutput>,
}

#[derive(Clone, PartialEq, Message)]
pub struct SequenceOutput {
    #[prost(uint32, tag = "1")]
    pub index: u32,
    #[prost(string, tag = "2")]
    pub text: String,
    #[prost(uint32, tag = "3")]
    pub num_tokens: u32,
    #[prost(uint32, repeated, tag = "4")]
    pub token_ids: Vec<u32>,
    #[prost(float, repeated, tag = "5")]
    pub logprobs: Vec<f32>,
    #[prost(uint32, repeated, tag = "6")]
    pub ranks: Vec<u32>,
    #[prost(message, repeated, tag = "7")]
    pub candidate_tokens: Vec<CandidateTokenInfo>,
    #[prost(message, optional, tag = "8")]
    pub finish_info: Option<FinishInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PromptInfo {
    #[prost(uint32, tag = "1")]
    pub num_prompt_tokens: u32,
    #[prost(uint32, repeated, tag = "2")]
    pub token_ids: Vec<u32>,
    #[prost(float, repeated, tag = "3")]
    pub logprobs: Vec<f32>,
    #[prost(uint32, repeated, tag = "4")]
    pub ranks: Vec<u32>,
    #[prost(message, repeated, tag = "5")]
    pub candidate_tokens: Vec<CandidateTokenInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FinishInfo {
    #[prost(uint32, tag = "1")]
    pub num_output_tokens: u32,
    #[prost(enumeration = "FinishReason", tag = "2")]
    pub finish_reason: i32,
    #[prost(oneof = "StopReason", tags = "3, 4, 5")]
    pub stop_reason: Option<StopReason>,
    #[prost(message, optional, tag = "6")]
    pub kv_transfer_params: Option<Struct>,
    #[prost(uint32, optional, tag = "9")]
    pub num_cached_tokens: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum FinishReason {
    NotFinished = 0,
    Length = 1,
    Stop = 2,
    Aborted = 3,
}

#[derive(Clone, PartialEq, Oneof)]
pub enum StopReason {
    #[prost(uint32, tag = "3")]
    StopTokenId(u32),
    #[prost(uint32, tag = "4")]
    EosTokenId(u32),
    #[prost(string, tag = "5")]
    StopString(String),
}

#[derive(Clone, PartialEq, Message)]
pub struct CandidateTokenInfo {
    #[prost(message, repeated, tag = "1")]
    pub tokens: Vec<TokenInfo>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TokenInfo {
    #[prost(uint32, tag = "1")]
    pub id: u32,
    #[prost(float, tag = "2")]
    pub logprob: f32,
    #[prost(uint32, tag = "3")]
    pub rank: u32,
}

#[cfg(test)]
mod tests;
