//! Opens the draft model and checks that its vocabulary equals the model's.

use corella_core::TokenId;
use corella_model::{Checkpoint, WeightFormat};
use corella_text::Tokenizer;

use crate::Error;
use crate::model::model_file::open_watched;
use crate::model::vocabulary::drop_padding;
use crate::options::DraftOptions;

pub(crate) struct DraftCheckpoint {
    pub name: String,
    pub checkpoint: Checkpoint,
    pub weight_format: Option<WeightFormat>,
}

impl DraftCheckpoint {
    /// Opens the draft model. Its vocabulary must equal the model's, token by token.
    pub fn open(
        options: &DraftOptions,
        target: &Checkpoint,
        tokenizer: &Tokenizer,
    ) -> Result<Self, Error> {
        let (name, mut checkpoint) = open_watched(&options.source)?;
        if !checkpoint.config().has_head {
            return Err(Error::Config(format!(
                "--draft-model {name} has no output head (lm_head), so it cannot draft tokens"
            )));
        }
        let its = |error: Error| Error::Config(format!("--draft-model {name}: {error}"));
        let file = checkpoint.required_file("tokenizer.json");
        let file = file.map_err(|error| its(error.into()))?;
        drop_padding(&mut checkpoint, &file).map_err(its)?;
        let of_draft = Tokenizer::from_bytes(&file).map_err(|error| its(error.into()))?;
        let vocab_size = |checkpoint: &Checkpoint| checkpoint.config().spec.vocab_size;
        let sizes = (vocab_size(&checkpoint), vocab_size(target));
        if sizes.0 != sizes.1 {
            return Err(Error::Config(format!(
                "--draft-model {name} has a vocabulary of {} tokens, and the model one of {}; it \
                 must be the same",
                sizes.0, sizes.1
            )));
        }
        let num_tokens = tokenizer.vocab_size().max(of_draft.vocab_size());
        let differs = |&id: &TokenId| tokenizer.id_to_token(id) != of_draft.id_to_token(id);
        if let Some(id) = (0..num_tokens as TokenId).find(differs) {
            let spell = |tokenizer: &Tokenizer| match tokenizer.id_to_token(id) {
                Some(token) => format!("{token:?}"),
                None => "nothing".to_owned(),
            };
            return Err(Error::Config(format!(
                "token {id} is {} in --draft-model {name} and {} in the model; the vocabulary must \
                 be the same",
                spell(&of_draft),
                spell(tokenizer)
            )));
        }
        Ok(Self {
            name,
            checkpoint,
            weight_format: options.weight_format,
        })
    }
}
