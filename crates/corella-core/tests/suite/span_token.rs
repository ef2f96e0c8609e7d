//! The tokens of a span, and their results.

use corella_core::{Batch, InputToken, Logprobs, PromptLogprob, Span, TokenId};

/// The guesses of a span.
pub fn drafts(batch: &Batch, span: &Span) -> impl Iterator<Item = TokenId> {
    batch.span_drafts(span).iter().map(|input| match input {
        InputToken::Known(token) => *token,
        InputToken::FromStep { .. } => panic!("a draft is not a known token"),
    })
}

/// The letter of a token, or `?` for a fresh token, which has none.
pub fn letter(token: TokenId) -> char {
    char::from_u32(token)
        .filter(char::is_ascii_graphic)
        .unwrap_or('?')
}

/// A log-probability whose rank is its token's position.
pub fn logprob(batch: &Batch, span: &Span, next: Option<TokenId>, position: u32) -> PromptLogprob {
    let own = batch
        .span_tokens(span)
        .get((position - span.start) as usize);
    let token = match own {
        Some(InputToken::Known(token)) => *token,
        Some(InputToken::FromStep { .. }) => panic!("a token of a prompt is not known"),
        None => next.expect("the token behind the span is not given"),
    };
    PromptLogprob {
        token,
        logprobs: Logprobs {
            token: 0.0,
            rank: position,
            top: Vec::new(),
        },
    }
}
