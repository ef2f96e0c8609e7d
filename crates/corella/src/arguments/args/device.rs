//! Options of the device, and of the mock in its place.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use corella_cpu::{Isa, num_cores};

use super::MockTimeArgs;
use super::share::parse_share;
use crate::input::option_file;
use crate::terminal::load_display::load_watcher;
use crate::{Device, Error, LlmOptions};

#[derive(Args)]
#[command(next_help_heading = "Device")]
pub struct DeviceArgs {
    /// Where to compute: auto is an NVIDIA GPU if there is one that computes the model, else the CPU; cuda is the
    /// GPU; mock computes nothing and answers with made-up tokens, for tests and benchmarks
    #[arg(long, value_enum, default_value_t)]
    pub device: Device,
    /// With --device cuda: leave large products to cuBLASLt, with which the bits of an answer may
    /// depend on the requests beside it
    #[arg(long)]
    pub no_batch_invariance: bool,
    /// With --device cuda: the share of the GPU's memory, from 0 to 1, that weights, activations and KV cache take
    /// together, unless --kv-cache-memory says what the KV cache takes
    #[arg(long, value_name = "SHARE", value_parser = parse_share, default_value = "0.9")]
    pub gpu_memory_utilization: f64,
    /// Number of CPU threads; more threads than cores are slower [default: the number of cores that
    /// this process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// Pin each thread to a core, with its weights in that core's NUMA node; useful if nothing else
    /// runs on the machine
    #[arg(long)]
    pub pin_threads: bool,
    /// CPU instruction set [default: the best that this machine has]. With avx512-bf16 and amx, the
    /// inputs of layers with bf16 weights are rounded to bf16
    #[arg(long, value_enum)]
    pub isa: Option<IsaArg>,
    #[command(flatten)]
    pub mock_time: MockTimeArgs,
    /// What the mock answers, word for word; of several texts, the seed of a request chooses
    #[arg(long, value_name = "TEXT", hide = true)]
    pub mock_dictation: Vec<String>,
    /// A file of what the mock answers to prompts that have a text: [[TEXT, ANSWER], …]; the text that ends last in
    /// the prompt counts
    #[arg(
        long,
        value_name = "FILE",
        hide = true,
        conflicts_with = "mock_dictation"
    )]
    pub mock_script: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum IsaArg {
    Portable,
    Avx2,
    Avx512,
    Avx512Bf16,
    Amx,
}

impl DeviceArgs {
    pub fn set(&self, options: &mut LlmOptions) -> Result<(), Error> {
        options.load_watcher = Some(load_watcher());
        options.device = self.device;
        options.is_batch_invariant = !self.no_batch_invariance;
        options.gpu_memory_utilization = self.gpu_memory_utilization;
        let dictates = !self.mock_dictation.is_empty() || self.mock_script.is_some();
        if dictates && options.device != Device::Mock {
            let reason = "--mock-dictation and --mock-script need --device mock";
            return Err(Error::Config(reason.to_owned()));
        }
        options.mock_cost = self.mock_time.cost();
        if options.mock_cost.is_some() && options.device != Device::Mock {
            let reason = "--mock-step-us, --mock-token-us and --mock-decode-us need --device mock";
            return Err(Error::Config(reason.to_owned()));
        }
        options.mock_dictations.clone_from(&self.mock_dictation);
        if let Some(path) = &self.mock_script {
            options.mock_script = mock_script(path)?;
        }
        check_threads(self.threads)?;
        options.num_threads = self.threads;
        options.pin_threads = self.pin_threads;
        options.isa = self.isa.map(isa);
        Ok(())
    }
}

fn mock_script(path: &Path) -> Result<Vec<(String, String)>, Error> {
    let reason = |error: &dyn std::fmt::Display| {
        Error::Config(format!("--mock-script {}: {error}", path.display()))
    };
    let text = option_file::read(path).map_err(|error| reason(&error))?;
    serde_json::from_slice(&text).map_err(|error| reason(&error))
}

/// Refuses far too many threads, and warns of too many. Threads meet at a barrier after every
/// operation, so more threads than cores slow each other down; with thousands, the program seems to
/// hang.
pub fn check_threads(num_threads: Option<usize>) -> Result<(), Error> {
    const MAX_PER_CORE: usize = 8;
    let num_cores = num_cores();
    let cores = match num_cores {
        1 => "1 core".to_owned(),
        _ => format!("{num_cores} cores"),
    };
    match num_threads {
        Some(0) => Err(Error::Config("--threads must be at least 1".to_owned())),
        Some(asked) if asked > MAX_PER_CORE * num_cores => Err(Error::Config(format!(
            "--threads {asked} is too many for the {cores} that this process may use: more threads \
             than cores only wait for each other; leave --threads out for one on each core"
        ))),
        Some(asked) if asked > num_cores => {
            tracing::warn!(
                "--threads {asked} is more than the {cores} that this process may use: threads \
                 will wait for each other"
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

pub fn isa(arg: IsaArg) -> Isa {
    match arg {
        IsaArg::Portable => Isa::Portable,
        IsaArg::Avx2 => Isa::Avx2,
        IsaArg::Avx512 => Isa::Avx512,
        IsaArg::Avx512Bf16 => Isa::Avx512Bf16,
        IsaArg::Amx => Isa::Amx,
    }
}
