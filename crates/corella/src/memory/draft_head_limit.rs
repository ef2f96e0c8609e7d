//! A model's own draft head, and the options that exclude it.

use corella_model::Checkpoint;

use crate::{Error, LlmOptions};

/// Adds the model's own draft head, or returns the reason why it cannot be used.
pub(crate) fn add(checkpoint: &mut Checkpoint, options: &LlmOptions) -> Result<(), Error> {
    if options.scheduler.num_pipeline_stages > 1 {
        return Err(Error::Config(String::from(
            "--speculate mtp needs --pipeline-parallel-size 1",
        )));
    }
    if !checkpoint.config().has_head {
        return Err(Error::Config(String::from(
            "--speculate mtp needs a model that generates text, and this one has no output head (lm_head)",
        )));
    }
    let added = checkpoint.add_draft_head();
    added.map_err(|error| Error::Config(format!("--speculate mtp: {error}")))
}
