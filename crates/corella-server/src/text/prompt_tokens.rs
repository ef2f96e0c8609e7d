//! Tokenised prompts, and checks of tokens that callers send.

use corella_core::{Retention, TokenId};
use corella_text::ReplyContext;

use crate::config::serve_config::ServeConfig;
use crate::text::prompt::Prompt;
use crate::text::served_model::ServedModel;
use crate::text::text_thread::Caller;
use crate::wire::api_error::ApiError;

/// A tokenised prompt, and the text that begins the answer if `echo` is set.
#[derive(Debug)]
pub struct PromptTokens {
    pub tokens: Vec<TokenId>,
    pub echo: Option<String>,
    /// The format of a reply with parts; `None` keeps plain text.
    pub reply: Option<ReplyContext>,
    /// The beginnings that the cache retains.
    pub retentions: Vec<Retention>,
}

/// Checks and tokenises a prompt of the field `prompt`.
pub fn tokenize_prompt(
    served: &ServedModel,
    prompt: Prompt,
    echo: bool,
    add_special_tokens: bool,
    caller: &Caller,
) -> Result<PromptTokens, ApiError> {
    let (tokens, echo) = match prompt {
        Prompt::Text(text) => {
            let tokens = served.encode("prompt", &text, add_special_tokens, caller)?;
            (tokens, echo.then_some(text))
        }
        Prompt::Tokens(tokens) => {
            check_num_tokens("prompt", tokens.len(), &served.config)?;
            check_token_ids("prompt", &tokens, served.config.vocab_size)?;
            let echo = echo
                .then(|| served.tokenizer.decode(&tokens, true))
                .transpose()
                .map_err(|error| ApiError::invalid("prompt", error.to_string()))?;
            (tokens, echo)
        }
    };
    Ok(PromptTokens {
        tokens,
        echo,
        reply: None,
        retentions: Vec::new(),
    })
}

/// Refuses a call whose prompts, in the field `prompt`, have too many choices together.
pub fn check_num_choices(
    served: &ServedModel,
    num_prompts: usize,
    num_choices: u32,
) -> Result<(), ApiError> {
    let most = served.config.max_num_choices;
    if num_prompts <= (most / num_choices) as usize {
        return Ok(());
    }
    let message = format!(
        "{num_prompts} prompts with {num_choices} choices each are more than {most}, the most choices of a call"
    );
    Err(ApiError::invalid("prompt", message))
}

/// Refuses more tokens than the context holds, before any other use of them.
pub fn check_num_tokens(
    param: &str,
    num_tokens: usize,
    config: &ServeConfig,
) -> Result<(), ApiError> {
    match num_tokens > config.max_model_len as usize {
        true => Err(ApiError::prompt_too_long(
            param,
            num_tokens,
            config.max_model_len,
        )),
        false => Ok(()),
    }
}

/// Token ids come from outside and index the vocabulary, so they are checked.
pub fn check_token_ids(
    param: &str,
    token_ids: &[TokenId],
    vocab_size: usize,
) -> Result<(), ApiError> {
    match token_ids
        .iter()
        .position(|&token| token as usize >= vocab_size)
    {
        None => Ok(()),
        Some(at) => Err(ApiError::invalid(
            format!("{param}[{at}]"),
            format!(
                "token {} is outside the vocabulary of {vocab_size}",
                token_ids[at]
            ),
        )),
    }
}
