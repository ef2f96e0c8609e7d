//! The options of `bench admission`.

use std::path::PathBuf;

use corella_core::SchedulerConfig;
use corella_model::CostModel;

use super::rule::Rule;

#[derive(Debug, Clone)]
pub struct AdmissionOptions {
    pub lengths: LengthSource,
    pub arrivals: Arrivals,
    /// The number of requests: the first ones of a trace, or the whole trace if `None`.
    pub num_requests: Option<usize>,
    pub rules: Vec<&'static Rule>,
    /// The configuration. The rules set the rest.
    pub config: SchedulerConfig,
    pub cost: CostModel,
}

#[derive(Debug, Clone)]
pub enum LengthSource {
    /// A trace: JSON lines as in the Mooncake traces, or a `.csv` file as in the Azure traces.
    Trace {
        file: PathBuf,
        prompt_scale: f64,
        output_scale: f64,
    },
    /// Lengths drawn uniformly from the first to the last, both included.
    Ranges {
        prompt: (u32, u32),
        output: (u32, u32),
        seed: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    AtOnce,
    /// Evenly spaced, with this number of requests per second.
    Rate(f64),
    /// At the times of the trace, multiplied by a factor.
    Trace {
        time_scale: f64,
    },
}
