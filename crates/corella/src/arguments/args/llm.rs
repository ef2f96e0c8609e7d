//! The options of a model that a program in another language loads.

use clap::Args;

use super::{CacheArgs, DeviceArgs, ModelArgs, RequestArgs, SchedulerArgs, SpeculationArgs};

#[derive(Args)]
pub struct LlmArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub request: RequestArgs,
    #[command(flatten)]
    pub scheduler: SchedulerArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}
