//! Options of the engine.

use clap::Args;

use super::{
    CacheArgs, DeviceArgs, ModelArgs, SamplingArgs, SchedulerArgs, SpeculateArg, SpeculationArgs,
};
use crate::{Device, Error, LlmOptions, StepLimits};

#[derive(Args)]
pub struct EngineArgs {
    #[command(flatten)]
    pub scheduler: SchedulerArgs,
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    #[command(flatten)]
    pub cache: CacheArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
}

/// The options of a command that loads a model and answers without a server. The options of the model itself are in
/// `ModelArgs`.
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

impl EngineArgs {
    /// Returns the options of a model that answers many requests.
    pub fn options(&self, model: &ModelArgs) -> Result<LlmOptions, Error> {
        let mut options = options(model, &self.speculation, &self.cache, &self.device)?;
        self.scheduler.set(&mut options);
        Ok(options)
    }
}

impl OwnModelArgs {
    /// Returns the options of a model that answers one request at a time.
    pub fn options(&self, model: &ModelArgs) -> Result<LlmOptions, Error> {
        let mut options = options(model, &self.speculation, &self.cache, &self.device)?;
        options.scheduler.max_num_seqs = 1;
        Ok(options)
    }
}

/// Returns all options except the scheduler's. Limits of the scheduler have the device's defaults.
fn options(
    model: &ModelArgs,
    speculation: &SpeculationArgs,
    cache: &CacheArgs,
    device: &DeviceArgs,
) -> Result<LlmOptions, Error> {
    let mut options = LlmOptions::default();
    let of_gpu = StepLimits {
        max_num_batched_tokens: 2048,
        max_prefill_tokens: 2048,
        // A GPU idles between two steps unless the second one is queued before the first ends. With speculation, that
        // is impossible: a step's guesses depend on the tokens of the step before.
        max_inflight_steps: match speculation.speculate {
            SpeculateArg::Off => 2,
            _ => 1,
        },
    };
    match device.device {
        Device::Cuda => of_gpu.set(&mut options.scheduler),
        Device::Auto => options.gpu_limits = Some(of_gpu),
        Device::Cpu | Device::Mock => {}
    }
    model.set(&mut options)?;
    speculation.set(&mut options)?;
    cache.set(&mut options)?;
    device.set(&mut options)?;
    Ok(options)
}
