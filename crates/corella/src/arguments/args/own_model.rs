//! The options of a command that answers with a model of its own, without a server, apart from the model.

use clap::Args;

use super::{CacheArgs, DeviceArgs, SamplingArgs, SpeculationArgs};

#[derive(Args)]
pub struct OwnModelArgs {
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}
