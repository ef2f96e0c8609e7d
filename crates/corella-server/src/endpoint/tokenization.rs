//! `/tokenize` and `/detokenize`, with vLLM's answers, or llama-server's if the text is in `content`.

use axum::response::Response;
use corella_core::TokenId;
use corella_text::Tokenizer;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::model_set::model_use::UsedModel;
use crate::text::chat_fields::ChatFields;
use crate::text::prompt_tokens::{check_num_tokens, check_token_ids};
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::{ApiError, required};
use crate::wire::field_table::Endpoint;
use crate::wire::json_response::json_response;
use crate::wire::request_body::SentBody;

/// Fields of `/tokenize` besides a conversation's.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct TokenizeFields {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
    /// The text under llama-server's name, and its options.
    content: Option<String>,
    add_special: Option<bool>,
    with_pieces: Option<bool>,
}

#[derive(Serialize)]
struct Tokenized {
    count: usize,
    max_model_len: u32,
    tokens: Vec<TokenId>,
    token_strs: Option<Vec<Option<String>>>,
}

/// llama-server's answer.
#[derive(Serialize)]
struct ContentTokens<T> {
    tokens: Vec<T>,
}

#[derive(Serialize)]
struct TokenPiece {
    id: TokenId,
    piece: Piece,
}

/// A token's text. A part of a character is a list of bytes.
#[derive(Serialize)]
#[serde(untagged)]
enum Piece {
    Text(String),
    Bytes(Vec<u8>),
}

impl Piece {
    fn of(tokenizer: &Tokenizer, token: TokenId) -> Self {
        let spelled = || {
            tokenizer
                .id_to_token(token)
                .unwrap_or_default()
                .into_bytes()
        };
        let bytes = match tokenizer.token_bytes(token) {
            Some(bytes) if !tokenizer.is_special(token) => bytes.to_vec(),
            _ => spelled(),
        };
        String::from_utf8(bytes).map_or_else(|error| Self::Bytes(error.into_bytes()), Self::Text)
    }
}

impl TokenizeFields {
    /// Refuses vLLM's fields beside `content`, and llama-server's other fields without `content`.
    fn check_together(&self) -> Result<(), ApiError> {
        let has = |field: &str, is_set: bool| is_set.then(|| field.to_owned());
        let (wrong, reason) = match self.content {
            Some(_) => (
                has("prompt", self.prompt.is_some())
                    .or_else(|| has("return_token_strs", self.return_token_strs == Some(true))),
                "cannot be combined with content",
            ),
            None => (
                has("add_special", self.add_special.is_some())
                    .or_else(|| has("with_pieces", self.with_pieces.is_some())),
                "only allowed with content",
            ),
        };
        wrong.map_or(Ok(()), |field| Err(ApiError::invalid(field, reason)))
    }
}

#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Option<Vec<TokenId>>,
}

pub async fn tokenize(UsedModel(state): UsedModel, body: SentBody) -> Result<Response, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    let tokenize = move |served: &ServedModel, caller: &Caller| {
        ChatFields::check_num_messages(&body, served)?;
        let fields: TokenizeFields = body.parse()?;
        let check = served.field_check(Endpoint::Tokenize);
        body.check_fields(check)?;
        served.check_name(fields.model.as_deref())?;
        fields.check_together()?;
        let tokenizer = &served.tokenizer;
        let mut chat = ChatFields::parse(&body, served)?;
        if let Some(content) = &fields.content {
            chat.check_beside("content", served, check)?;
            let add_special_tokens = fields.add_special.or(fields.add_special_tokens);
            let tokens = served.encode(
                "content",
                content,
                add_special_tokens.unwrap_or(false),
                caller,
            )?;
            return Ok(match fields.with_pieces {
                Some(true) => {
                    let pieces = tokens.iter().map(|&id| TokenPiece {
                        id,
                        piece: Piece::of(tokenizer, id),
                    });
                    json_response(&ContentTokens {
                        tokens: pieces.collect(),
                    })
                }
                _ => json_response(&ContentTokens { tokens }),
            });
        }
        let tokens = match &fields.prompt {
            Some(prompt) => {
                chat.check_beside("prompt", served, check)?;
                let add_special_tokens = fields.add_special_tokens.unwrap_or(true);
                served.encode("prompt", prompt, add_special_tokens, caller)?
            }
            None => chat.tokenize(served, check, caller)?.tokens,
        };
        let strings = || tokens.iter().map(|&id| tokenizer.id_to_token(id)).collect();
        Ok(json_response(&Tokenized {
            count: tokens.len(),
            max_model_len: served.config.max_model_len,
            token_strs: (fields.return_token_strs == Some(true)).then(strings),
            tokens,
        }))
    };
    state.run_blocking(num_bytes, tokenize).await
}

pub async fn detokenize(UsedModel(state): UsedModel, body: SentBody) -> Result<Response, ApiError> {
    let body = state.parts.bodies.read(body).await?;
    let num_bytes = body.num_bytes();
    let detokenize = move |served: &ServedModel, _: &Caller| {
        let fields: DetokenizeFields = body.parse()?;
        body.check_fields(served.field_check(Endpoint::Detokenize))?;
        served.check_name(fields.model.as_deref())?;
        let tokenizer = &served.tokenizer;
        let tokens = required("tokens", fields.tokens)?;
        check_num_tokens("tokens", tokens.len(), &served.config)?;
        check_token_ids("tokens", &tokens, tokenizer.vocab_size())?;
        let prompt = tokenizer
            .decode(&tokens, false)
            .map_err(|error| ApiError::invalid("tokens", error.to_string()))?;
        // llama-server's name of the text is `content`.
        Ok(json_response(&json!({"prompt": prompt, "content": prompt})))
    };
    state.run_blocking(num_bytes, detokenize).await
}
