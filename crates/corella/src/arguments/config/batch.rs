//! Configuration of `corella batch`.

use std::path::PathBuf;

use super::{
    RequestOptions, options_of, request, set_cache, set_device, set_model, set_scheduler,
    set_speculation, source,
};
use crate::arguments::args::BatchArgs;
use crate::{Error, LlmOptions, ModelSource};

pub struct Batch {
    pub input: PathBuf,
    pub output: PathBuf,
    pub source: ModelSource,
    pub options: LlmOptions,
    pub request: RequestOptions,
    /// Limits the requests answered at once.
    pub max_concurrency: usize,
}

pub fn batch(args: BatchArgs) -> Result<Batch, Error> {
    let mut options = options_of(&args.device, &args.speculation);
    set_model(&mut options, &args.model)?;
    set_scheduler(&mut options, &args.scheduler);
    set_speculation(&mut options, &args.speculation)?;
    set_cache(&mut options, &args.cache)?;
    set_device(&mut options, &args.device)?;
    // While some requests run, the next ones are read, checked and tokenised.
    let default_concurrency = args.scheduler.max_num_seqs.saturating_mul(2);
    Ok(Batch {
        input: args.input,
        output: args.output,
        source: source(args.model),
        options,
        request: request(args.request),
        max_concurrency: args.max_concurrency.unwrap_or(default_concurrency) as usize,
    })
}
