//! The configuration of a model that answers the requests of this process.

use crate::arguments::args::{LlmArgs, RequestArgs};
use crate::{Error, LlmOptions, ModelSource};

pub struct LlmConfig {
    pub source: ModelSource,
    pub options: LlmOptions,
    pub request: RequestArgs,
}

pub fn llm(args: LlmArgs) -> Result<LlmConfig, Error> {
    Ok(LlmConfig {
        options: args.engine.options(&args.model)?,
        source: args.model.source(),
        request: args.request,
    })
}
