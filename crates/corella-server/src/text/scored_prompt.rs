//! Log-probabilities of a prompt, and `prompt_logprobs` in an answer.

use corella_core::{PromptLogprob, TokenId};
use corella_text::Tokenizer;
use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};

use crate::text::token_logprob::{finite, text_of};

/// The tokens of a prompt. All but the first have log-probabilities.
#[derive(Clone, Debug)]
pub struct ScoredPrompt {
    pub first: TokenId,
    pub others: Vec<PromptLogprob>,
}

/// A prompt in `prompt_logprobs`, in vLLM's form: `null` for the first token, and for each further token an object
/// whose keys are the ids of that token and of the most likely tokens.
pub struct PromptLogprobs<'a> {
    pub tokenizer: &'a Tokenizer,
    pub prompt: ScoredPrompt,
    /// The requested number of most likely tokens. More may have been computed.
    pub num_top: usize,
}

impl<'a> PromptLogprobs<'a> {
    /// Returns the field of an answer with a scored prompt, if the request has asked for `num_top` alternatives.
    pub fn of(
        tokenizer: &'a Tokenizer,
        prompt: Option<ScoredPrompt>,
        num_top: Option<u32>,
    ) -> Option<Self> {
        let num_top = num_top? as usize;
        prompt.map(|prompt| Self {
            tokenizer,
            prompt,
            num_top,
        })
    }
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let others = &self.prompt.others;
        let mut list = serializer.serialize_seq(Some(others.len() + 1))?;
        list.serialize_element(&None::<()>)?;
        for scored in others {
            list.serialize_element(&Position {
                tokenizer: self.tokenizer,
                scored,
                num_top: self.num_top,
            })?;
        }
        list.end()
    }
}

struct Position<'a> {
    tokenizer: &'a Tokenizer,
    scored: &'a PromptLogprob,
    num_top: usize,
}

#[derive(Serialize)]
struct RankedToken {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl Serialize for Position<'_> {
    /// The prompt's token comes first, then the most likely ones in order.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let PromptLogprob { token, logprobs } = self.scored;
        let top = logprobs.top.iter().take(self.num_top).zip(1..);
        let top = top.map(|(&(token, logprob), rank)| (token, logprob, rank));
        let others = top.filter(|(other, ..)| other != token);
        let mut tokens = serializer.serialize_map(None)?;
        for (token, logprob, rank) in [(*token, logprobs.token, logprobs.rank)]
            .into_iter()
            .chain(others)
        {
            let bytes = self.tokenizer.token_bytes(token).unwrap_or_default();
            let ranked = RankedToken {
                logprob: finite(logprob),
                rank,
                decoded_token: text_of(bytes),
            };
            tokens.serialize_entry(&token, &ranked)?;
        }
        tokens.end()
    }
}
