//! Configuration of `corella batch`.

use std::path::PathBuf;

use super::{LlmConfig, llm};
use crate::Error;
use crate::arguments::args::BatchArgs;

pub struct Batch {
    pub input: PathBuf,
    pub output: PathBuf,
    pub llm: LlmConfig,
    /// Limits the requests answered at once.
    pub max_concurrency: usize,
}

pub fn batch(args: BatchArgs) -> Result<Batch, Error> {
    // While some requests run, the next ones are read, checked and tokenised.
    let default_concurrency = args.llm.engine.scheduler.max_num_seqs.saturating_mul(2);
    Ok(Batch {
        input: args.input,
        output: args.output,
        llm: llm(args.llm)?,
        max_concurrency: args.max_concurrency.unwrap_or(default_concurrency) as usize,
    })
}
