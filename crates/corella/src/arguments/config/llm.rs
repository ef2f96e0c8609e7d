//! The configuration of a model that a program in another language loads.

use super::{
    RequestOptions, options_of, request, set_cache, set_device, set_model, set_scheduler,
    set_speculation, source,
};
use crate::arguments::args::LlmArgs;
use crate::{Error, LlmOptions, ModelSource};

pub struct LlmConfig {
    pub source: ModelSource,
    pub options: LlmOptions,
    pub request: RequestOptions,
}

pub fn llm(args: LlmArgs) -> Result<LlmConfig, Error> {
    let mut options = options_of(&args.device, &args.speculation);
    set_model(&mut options, &args.model)?;
    set_scheduler(&mut options, &args.scheduler);
    set_speculation(&mut options, &args.speculation)?;
    set_cache(&mut options, &args.cache)?;
    set_device(&mut options, &args.device)?;
    Ok(LlmConfig {
        source: source(args.model),
        options,
        request: request(args.request),
    })
}
