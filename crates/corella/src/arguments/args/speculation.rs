//! Options of speculation.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use corella_core::{SchedulerConfig, Speculation};

use super::model::{WeightFormatArg, weight_format};
use crate::{DraftOptions, Error, LlmOptions, ModelSource};

#[derive(Args)]
#[command(next_help_heading = "Speculation")]
pub struct SpeculationArgs {
    /// Guess the next tokens of each request, and check the guesses in a step that has room for
    /// them. ngram guesses what followed the newest tokens earlier in the prompt or the answer;
    /// draft asks a smaller model, and mtp the model's own head for multi-token prediction. Answers stay the
    /// same, and come sooner when guesses hold
    #[arg(long, value_enum, default_value_t)]
    pub speculate: SpeculateArg,
    /// With --speculate draft: folder, GGUF file or name of the draft model, which must have the same
    /// vocabulary and should be much smaller
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<PathBuf>,
    /// Type of the draft model's weights [default: auto]
    #[arg(long, value_enum)]
    pub draft_dtype: Option<WeightFormatArg>,
    /// With --speculate: maximum number of guesses for one request in one step; fewer are made while
    /// they fail
    #[arg(long, value_name = "N", value_parser = parse_draft_tokens)]
    pub draft_tokens: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum SpeculateArg {
    #[default]
    Off,
    Ngram,
    Draft,
    Mtp,
}

impl SpeculationArgs {
    pub fn set(&self, options: &mut LlmOptions) -> Result<(), Error> {
        let limits = &mut options.scheduler;
        let is_drafting = self.speculate == SpeculateArg::Draft;
        for (is_wrong, reason) in [
            (
                self.draft_tokens.is_some() && self.speculate == SpeculateArg::Off,
                "--draft-tokens needs --speculate ngram, draft or mtp",
            ),
            (
                self.draft_model.is_some() && !is_drafting,
                "--draft-model needs --speculate draft",
            ),
            (
                self.draft_dtype.is_some() && !is_drafting,
                "--draft-dtype needs --speculate draft",
            ),
            (
                self.draft_model.is_none() && is_drafting,
                "--speculate draft needs --draft-model",
            ),
        ] {
            if is_wrong {
                return Err(Error::Config(reason.to_owned()));
            }
        }
        limits.speculation = match self.speculate {
            SpeculateArg::Off => Speculation::Off,
            SpeculateArg::Ngram => Speculation::Ngram,
            SpeculateArg::Draft | SpeculateArg::Mtp => Speculation::Draft { draw_cost: 0 },
        };
        options.uses_draft_head = self.speculate == SpeculateArg::Mtp;
        limits.max_draft_tokens = self.draft_tokens.unwrap_or(limits.max_draft_tokens);
        options.draft_model = self.draft_model.clone().map(|path| DraftOptions {
            source: ModelSource::Path(path),
            weight_format: self.draft_dtype.and_then(weight_format),
        });
        Ok(())
    }
}

fn parse_draft_tokens(text: &str) -> Result<u32, String> {
    let most = SchedulerConfig::MAX_DRAFT_TOKENS;
    match text.trim().parse::<u32>() {
        Ok(number) if (1..=most).contains(&number) => Ok(number),
        _ => Err(format!("must be a number from 1 to {most}")),
    }
}
