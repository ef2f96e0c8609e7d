//! The answer of `vllm.Inference`: messages of one choice each, with the ids and log-probabilities of all its tokens.

use axum::http::HeaderMap;
use corella_core::{Logprobs, TokenId};
use serde_json::Value;

use super::inference_message::{
    CandidateTokenInfo, FinishInfo, FinishReason, GenerateResponse, PromptInfo, SequenceOutput,
    StopReason as WireStop, TokenInfo,
};
use crate::call::generation::{ChoiceDelta, StopReason};
use crate::call::kv_transfer::KvTransferCall;
use crate::call::sse::{ChunkEncoder, Events};
use crate::endpoint::generating_endpoint::answered_params;
use crate::text::token_logprob::finite;
use crate::wire::api_error::ApiError;
use crate::wire::grpc_message::{MEDIA_TYPE, trailers};
use crate::wire::usage::Usage;

/// The parts of an answer that the caller wants.
pub struct AnswerForm {
    pub prompt_token_ids: bool,
    /// The number of likely tokens beside each token of the prompt; `None` without log-probabilities.
    pub prompt_candidates: Option<u32>,
    pub output_text: bool,
    pub output_token_ids: bool,
    pub output_candidates: Option<u32>,
    /// The tokens that end the answer. An answer that ends because no token may follow has none of them.
    pub end_token_ids: Vec<TokenId>,
}

impl AnswerForm {
    /// The facts about the prompt, from the first delta of a choice.
    pub fn prompt_info(&self, delta: &mut ChoiceDelta) -> PromptInfo {
        let mut info = PromptInfo {
            num_prompt_tokens: delta.usage.prompt_tokens as u32,
            ..PromptInfo::default()
        };
        if let Some(tokens) = delta.prompt_tokens.take()
            && self.prompt_token_ids
        {
            info.token_ids = tokens.to_vec();
        }
        if let (Some(prompt), Some(num_top)) = (delta.prompt.take(), self.prompt_candidates) {
            // Nothing predicts the first token.
            info.logprobs.push(0.0);
            info.ranks.push(0);
            info.candidate_tokens.push(CandidateTokenInfo::default());
            for scored in &prompt.others {
                info.logprobs.push(finite(scored.logprobs.token));
                info.ranks.push(scored.logprobs.rank);
                let others = candidates(scored.token, &scored.logprobs, num_top);
                info.candidate_tokens.push(others);
            }
        }
        info
    }

    /// `transfer` is that of the call, if its answer has `kv_transfer_params`.
    pub fn outputs(
        &self,
        delta: ChoiceDelta,
        transfer: Option<&dyn KvTransferCall>,
    ) -> SequenceOutput {
        let last = delta.tokens.last();
        let end_token = last
            .filter(|token| self.end_token_ids.contains(token))
            .copied();
        let finish_info = delta.finish.map(|finish| {
            let is_length = finish.reason == "length";
            let stop_reason = match finish.stop_reason {
                Some(StopReason::Text(text)) => Some(WireStop::StopString(text)),
                Some(StopReason::Token(token)) => Some(WireStop::StopTokenId(token)),
                None if is_length => None,
                None => end_token.map(WireStop::EosTokenId),
            };
            let finish_reason = match is_length {
                true => FinishReason::Length,
                false => FinishReason::Stop,
            };
            let params = match answered_params(transfer) {
                Some(Value::Object(params)) => Some(params.into()),
                _ => None,
            };
            FinishInfo {
                num_output_tokens: delta.usage.completion_tokens as u32,
                finish_reason: finish_reason.into(),
                stop_reason,
                kv_transfer_params: params,
                num_cached_tokens: Some(delta.usage.prompt_tokens_details.cached_tokens as u32),
            }
        });
        let mut outputs = SequenceOutput {
            index: delta.index as u32,
            num_tokens: delta.tokens.len() as u32,
            finish_info,
            ..SequenceOutput::default()
        };
        if self.output_text {
            outputs.text = delta.text;
        }
        if let Some(num_top) = self.output_candidates {
            for (token, logprobs) in &delta.logprobs {
                outputs.logprobs.push(finite(logprobs.token));
                outputs.ranks.push(logprobs.rank);
                let others = candidates(*token, logprobs, num_top);
                outputs.candidate_tokens.push(others);
            }
        }
        if self.output_token_ids {
            outputs.token_ids = delta.tokens;
        }
        outputs
    }
}

/// The most likely tokens other than the token itself.
fn candidates(token: TokenId, logprobs: &Logprobs, num_top: u32) -> CandidateTokenInfo {
    let top = logprobs.top.iter().take(num_top as usize).zip(1..);
    let others = top.filter(|((other, _), _)| *other != token);
    let infos = others.map(|(&(id, logprob), rank)| TokenInfo {
        id,
        logprob: finite(logprob),
        rank,
    });
    CandidateTokenInfo {
        tokens: infos.collect(),
    }
}

/// Writes a stream.
pub struct AnswerStream {
    pub form: AnswerForm,
    pub transfer: Option<Box<dyn KvTransferCall>>,
    pub has_begun: bool,
    pub failure: Option<ApiError>,
}

impl ChunkEncoder for AnswerStream {
    const CONTENT_TYPE: &'static str = MEDIA_TYPE;

    fn encode_delta(&mut self, mut delta: ChoiceDelta, events: &mut Events) {
        if !std::mem::replace(&mut self.has_begun, true) {
            events.push_message(&GenerateResponse {
                prompt_info: Some(self.form.prompt_info(&mut delta)),
                outputs: None,
            });
        }
        let outputs = self.form.outputs(delta, self.transfer.as_deref());
        events.push_message(&GenerateResponse {
            prompt_info: None,
            outputs: Some(outputs),
        });
    }

    fn encode_end(&mut self, _: &Usage, _: &mut Events) {}

    /// HTTP/2 has pings of its own.
    fn encode_keep_alive(&mut self, _: &mut Events) {}

    fn encode_error(&mut self, error: &ApiError, _: &mut Events) {
        self.failure = Some(error.clone());
    }

    fn trailers(&mut self) -> Option<HeaderMap> {
        Some(trailers(self.failure.as_ref()))
    }
}
