//! Measures how well a model predicts a text, to see what quantisation costs.

use corella_core::TokenId;

use crate::device;
use crate::llm::open;
use crate::tokenizer_loader::TokenizerLoader;
use crate::{Error, Hardware, LlmOptions, ModelSource};

#[derive(Clone, Debug)]
pub struct Perplexity {
    pub num_tokens: usize,
    /// The mean of -ln p over all predicted tokens.
    pub loss: f64,
    pub hardware: Hardware,
}

impl Perplexity {
    /// Measures all documents together. Each is cut into parts of at most `context` tokens, and a
    /// part is predicted without those before it.
    pub fn measure(
        source: &ModelSource,
        options: &LlmOptions,
        documents: &[String],
        context: usize,
    ) -> Result<Self, Error> {
        let (_, mut checkpoint) = open(source)?;
        let tokenizer = TokenizerLoader::start(&mut checkpoint)?;
        let mut options = options.clone();
        options.max_model_len = Some(context as u32);
        let mut loaded = device::load(&checkpoint, &tokenizer, &options, None)?;
        loaded.weight_keepers.clear();
        let tokenizer = tokenizer.get()?;
        let (mut sum, mut num_tokens) = (0.0, 0);
        for document in documents {
            let tokens: Vec<TokenId> = tokenizer.encode(document, true)?;
            for part in tokens.chunks(context) {
                let scores = loaded.executor.score(part).map_err(Error::Config)?;
                sum -= scores.iter().copied().map(f64::from).sum::<f64>();
                num_tokens += scores.len();
            }
        }
        if num_tokens == 0 {
            let reason = "the text has no token to predict";
            return Err(Error::Config(reason.to_owned()));
        }
        Ok(Self {
            num_tokens,
            loss: sum / num_tokens as f64,
            hardware: loaded.hardware,
        })
    }
}
