//! Measures how well a model predicts a text, to show the cost of quantisation.

use corella_core::{FinishReason, Request, RequestId, SamplingParams, TokenId};
use corella_engine::{Engine, EngineConfig, StreamEvent, Submission};

use crate::model::device;
use crate::model::llm::check_head;
use crate::model::model_file::open;
use crate::model::tokenizer_loader::TokenizerLoader;
use crate::{Error, Hardware, LlmOptions, ModelSource};

#[derive(Clone, Debug)]
pub struct Perplexity {
    pub num_tokens: usize,
    /// The mean of -ln p over all predicted tokens.
    pub loss: f64,
    pub hardware: Hardware,
}

impl Perplexity {
    /// Measures all documents together. Each is cut into parts of at most `context` tokens, and a part is predicted
    /// without the earlier parts.
    pub fn measure(
        source: &ModelSource,
        options: &LlmOptions,
        documents: &[String],
        context: usize,
    ) -> Result<Self, Error> {
        let (_, mut checkpoint) = open(source)?;
        check_head(checkpoint.config())?;
        let tokenizer = TokenizerLoader::open(&mut checkpoint)?;
        tokenizer.start()?;
        let mut options = options.clone();
        options.max_model_len = Some(context as u32);
        let mut loaded = device::load(&checkpoint, &tokenizer, &options, None, None)?;
        loaded.weight_keepers.clear();
        let engine = Engine::start(EngineConfig::new(loaded.scheduler), loaded.executor)?;
        let tokenizer = tokenizer.get()?;
        let (mut sum, mut num_tokens) = (0.0, 0);
        for document in documents {
            let tokens: Vec<TokenId> = tokenizer.encode(document, true)?;
            for part in tokens.chunks(context) {
                let logprobs = prompt_logprobs(&engine, part)?;
                sum -= logprobs.iter().copied().map(f64::from).sum::<f64>();
                num_tokens += logprobs.len();
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

/// Returns the log-probability of each token but the first, given the ones before it.
fn prompt_logprobs(engine: &Engine, tokens: &[TokenId]) -> Result<Vec<f32>, Error> {
    let mut request = Request::greedy(RequestId(0), tokens.to_vec(), 0);
    request.sampling = SamplingParams {
        prompt_logprobs: Some(0),
        ..SamplingParams::GREEDY
    };
    let mut logprobs = Vec::with_capacity(tokens.len());
    for mut stream in engine.submit(Submission::from(request))? {
        loop {
            let output = match stream.next_blocking() {
                Some(StreamEvent::Accepted) => continue,
                Some(StreamEvent::Refused(error)) => return Err(error.into()),
                Some(StreamEvent::Output(output)) => output,
                None => break,
            };
            let told = output.prompt_logprobs.iter();
            logprobs.extend(told.map(|told| told.logprobs.token));
            if let Some(FinishReason::Error(error)) = output.finish {
                return Err(error.into());
            }
        }
    }
    Ok(logprobs)
}
