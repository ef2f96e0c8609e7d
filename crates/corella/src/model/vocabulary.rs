//! Restricts the vocabulary of a model to its tokenizer's.

use corella_model::{Checkpoint, ModelConfig};
use corella_text::TokenCount;

use crate::Error;

/// Returns the number of tokens that both the model and its tokenizer have. Further rows of the
/// embedding are padding, which some makers of models add for round matrix sizes.
pub(crate) fn num_tokens(config: &ModelConfig, count: TokenCount) -> Result<usize, Error> {
    let num_rows = config.spec.vocab_size;
    if count.num_vocabulary_ids > num_rows {
        return Err(Error::Config(format!(
            "tokenizer.json has {} tokens, and the model's embedding {num_rows} rows (vocab_size): the \
             tokenizer is not that of this model",
            count.num_vocabulary_ids
        )));
    }
    // A token that ends answers must be drawable even if a tokenizer lacks it.
    let ends = config.end_tokens.ids().into_iter();
    let num_named = ends
        .chain(config.bos_token_id)
        .map(|id| id as usize + 1)
        .max()
        .unwrap_or(0);
    Ok(count.num_ids.max(num_named).min(num_rows))
}

/// Leaves out padding, so that it is never drawn. Added tokens without a row in the model stay in the tokenizer; a
/// prompt with one is refused.
pub(crate) fn drop_padding(
    checkpoint: &mut Checkpoint,
    tokenizer_json: &[u8],
) -> Result<(), Error> {
    let count = TokenCount::from_bytes(tokenizer_json)?;
    let num_tokens = num_tokens(checkpoint.config(), count)?;
    let num_missing = count.num_ids.saturating_sub(num_tokens);
    if num_missing > 0 {
        tracing::info!(
            "the tokenizer has {num_missing} added tokens that the model does not know; prompts that hold \
             one are refused"
        );
    }
    checkpoint.keep_tokens(num_tokens);
    Ok(())
}
