//! Options of sampling, for answers of this process.

use clap::Args;

use crate::Error;

#[derive(Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Sampling temperature; 0 always takes the most likely token [default: the model's]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Draw from the K most likely tokens; 0 draws from all [default: the model's]
    #[arg(long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Draw from the most likely tokens that together have this probability [default: the model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Draw from tokens that are at least P times as likely as the most likely one [default: the
    /// model's]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Seed of the random draws; the same seed gives the same answer [default: a different one each
    /// time]
    #[arg(long, value_name = "SEED")]
    pub seed: Option<u64>,
}

impl SamplingArgs {
    pub fn check(&self) -> Result<(), Error> {
        check(self.temperature, "--temperature", "at least 0", |x| {
            x >= 0.0
        })?;
        check(self.top_p, "--top-p", "above 0 and at most 1", |x| {
            x > 0.0 && x <= 1.0
        })?;
        check(self.min_p, "--min-p", "from 0 to 1", |x| {
            (0.0..=1.0).contains(&x)
        })
    }
}

fn check(
    value: Option<f32>,
    flag: &str,
    range: &str,
    valid: impl Fn(f32) -> bool,
) -> Result<(), Error> {
    match value {
        Some(value) if !valid(value) => Err(Error::Config(format!(
            "{flag} must be {range}, not {value}"
        ))),
        _ => Ok(()),
    }
}
