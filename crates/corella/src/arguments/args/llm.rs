//! The options of a model that answers the requests of this process.

use clap::Args;

use super::{EngineArgs, ModelArgs, RequestArgs};

#[derive(Args)]
pub struct LlmArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub request: RequestArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}
