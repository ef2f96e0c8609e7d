//! The prompts of a call for hidden states.

use std::sync::Arc;

use corella_core::{Namespace, Pooling, TokenId};
use corella_engine::LoadedAdapter;
use corella_text::ChatInput;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::serve_config::ServeConfig;
use crate::text::prompt::{Prompt, PromptField};
use crate::text::prompt_tokens::{check_num_tokens, check_token_ids};
use crate::text::sampling_fields::check_cache_salt;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;
use crate::wire::field_limit::MAX_NUM_PROMPTS;

/// The fields that all endpoints for hidden states share.
#[derive(Deserialize)]
#[serde(expecting = "a JSON object")]
pub struct PoolingFields {
    pub model: Option<String>,
    pooling: Option<PoolingField>,
    pub add_special_tokens: Option<bool>,
    priority: Option<i32>,
    cache_salt: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PoolingField {
    Last,
    Mean,
    Cls,
    Max,
}

impl PoolingFields {
    pub fn params(&self, config: &ServeConfig) -> Result<PoolingParams, ApiError> {
        Ok(PoolingParams {
            pooling: match self.pooling {
                None => config.default_pooling(),
                Some(PoolingField::Last) => Pooling::LastToken,
                Some(PoolingField::Mean) => Pooling::Mean,
                Some(PoolingField::Cls | PoolingField::Max) if !config.is_encoder => {
                    let message = "cls and max are for encoders; this model reads from left to \
                                   right, so use last or mean";
                    return Err(ApiError::invalid("pooling", message));
                }
                Some(PoolingField::Cls) => Pooling::FirstToken,
                Some(PoolingField::Max) => Pooling::Max,
            },
            priority: self.priority.unwrap_or(0),
            namespace: Namespace {
                cache_salt: check_cache_salt(self.cache_salt.as_deref())?,
                ..Namespace::default()
            },
            adapter: None,
        })
    }
}

/// How a call's prompts are computed.
pub struct PoolingParams {
    pub pooling: Pooling,
    pub priority: i32,
    pub namespace: Namespace,
    pub adapter: Option<Arc<LoadedAdapter>>,
}

/// A tokenised prompt.
pub struct PooledPrompt {
    pub tokens: Vec<TokenId>,
    /// The index of the second text's first token, if there are two texts and the tokenizer tells them apart.
    pub second_text: Option<u32>,
    /// The request's field with the prompt, for errors.
    pub field: String,
}

/// How texts become tokens.
#[derive(Clone, Copy)]
pub struct TextForm<'a> {
    pub add_special_tokens: Option<bool>,
    /// The text before each input. Prompts of tokens stay unchanged.
    pub prefix: &'a str,
}

/// Checks and tokenises the prompts of a field.
pub fn pooled_prompts(
    served: &ServedModel,
    field: &str,
    PromptField(prompts): PromptField,
    form: TextForm<'_>,
    caller: &Caller,
) -> Result<Vec<PooledPrompt>, ApiError> {
    let num_prompts = prompts.len();
    check_num_prompts(field, num_prompts)?;
    let add_special_tokens = form.add_special_tokens.unwrap_or(true);
    let prompts = prompts.into_iter().enumerate().map(|(index, prompt)| {
        let field = name_of(field, index, num_prompts);
        let tokens = match prompt {
            Prompt::Text(text) if form.prefix.is_empty() => {
                served.encode(&field, &text, add_special_tokens, caller)?
            }
            Prompt::Text(text) => {
                let text = [form.prefix, &text].concat();
                served.encode(&field, &text, add_special_tokens, caller)?
            }
            Prompt::Tokens(tokens) => {
                check_num_tokens(&field, tokens.len(), &served.config)?;
                check_token_ids(&field, &tokens, served.config.vocab_size)?;
                tokens
            }
        };
        Ok(PooledPrompt {
            tokens,
            second_text: None,
            field,
        })
    });
    prompts.collect()
}

/// Tokenises pairs of texts for a model that reads both at once; `field` has the second texts.
pub fn paired_prompts(
    served: &ServedModel,
    field: &str,
    pairs: &[(&str, &str)],
    add_special_tokens: Option<bool>,
    caller: &Caller,
) -> Result<Vec<PooledPrompt>, ApiError> {
    check_num_prompts(field, pairs.len())?;
    let add_special_tokens = add_special_tokens.unwrap_or(true);
    let prompts = pairs.iter().enumerate().map(|(index, &pair)| {
        let field = name_of(field, index, pairs.len());
        if !served.config.is_encoder {
            let text = pair_text(served, &field, pair, caller)?;
            return Ok(PooledPrompt {
                // The template has written the special tokens.
                tokens: served.encode(&field, &text, false, caller)?,
                second_text: None,
                field,
            });
        }
        let encoded = served.encode_pair(&field, pair, add_special_tokens, caller)?;
        Ok(PooledPrompt {
            tokens: encoded.tokens,
            second_text: encoded.second_text,
            field,
        })
    });
    prompts.collect()
}

/// Renders a pair of texts for a decoder that reranks: a conversation of a query and a document, after the model's
/// instruction.
fn pair_text(
    served: &ServedModel,
    field: &str,
    (first, second): (&str, &str),
    caller: &Caller,
) -> Result<String, ApiError> {
    let Some(template) = &served.chat_template else {
        return Err(ApiError::no_pairs(served.config.model_name()));
    };
    let sentence = &served.config.sentence;
    let instruction = sentence.default_prompt.as_ref();
    let instruction = instruction.and_then(|name| sentence.prompts.get(name));
    let message = |role: &str, text: &str| json!({"role": role, "content": text});
    let mut messages: Vec<Value> = instruction
        .into_iter()
        .map(|text| message("system", text))
        .collect();
    messages.extend([message("query", first), message("document", second)]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: sentence.adds_generation_prompt,
        continue_final_message: false,
        kwargs: None,
    };
    let is_abandoned = || caller.has_left();
    let text = template.render_within(input, served.render_limit(&is_abandoned));
    text.map_err(|error| ApiError::invalid(field, error.to_string()))
}

fn check_num_prompts(field: &str, num_prompts: usize) -> Result<(), ApiError> {
    match num_prompts > MAX_NUM_PROMPTS {
        false => Ok(()),
        true => Err(ApiError::invalid(
            field,
            format!("{num_prompts} inputs are more than {MAX_NUM_PROMPTS}, the most of a call"),
        )),
    }
}

/// Names one of the prompts of a field.
fn name_of(field: &str, index: usize, num_prompts: usize) -> String {
    match num_prompts {
        1 => field.to_owned(),
        _ => format!("{field}[{index}]"),
    }
}
