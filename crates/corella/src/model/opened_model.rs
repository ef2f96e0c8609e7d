//! A model whose files are open, and whose options are settled, before its weights are read.

use corella_model::{Checkpoint, ModelConfig, SentenceConfig};
use corella_text::{ChatTemplate, TOOL_USE_FILE, TemplateFiles};

use crate::memory::draft_head_limit;
use crate::memory::encoder_limit;
use crate::model::device::{self, Loaded, Planned};
use crate::model::device_choice;
use crate::model::device_plan::MemoryPlan;
use crate::model::draft_model::DraftCheckpoint;
use crate::model::model_file::FileContent;
use crate::model::tokenizer_loader::TokenizerLoader;
use crate::{Error, LlmOptions};

pub(crate) struct OpenedModel {
    pub name: String,
    pub checkpoint: Checkpoint,
    pub tokenizer: TokenizerLoader,
    pub chat_template: Option<ChatTemplate>,
    pub sentence: SentenceConfig,
    /// The checkpoint's configuration, with the sampling defaults of the options.
    pub config: ModelConfig,
    pub options: LlmOptions,
    pub draft: Option<DraftCheckpoint>,
}

impl OpenedModel {
    pub fn new(
        name: String,
        mut checkpoint: Checkpoint,
        tokenizer: TokenizerLoader,
        options: &LlmOptions,
    ) -> Result<Self, Error> {
        if options.uses_draft_head {
            draft_head_limit::add(&mut checkpoint, options)?;
        }
        let chat_template = chat_template(&checkpoint, options)?;
        let sentence = SentenceConfig::read(&checkpoint)?;
        let options = encoder_limit::with_context(options, checkpoint.config(), &sentence);
        let mut config = checkpoint.config().clone();
        options.generation.apply(&mut config)?;
        let draft = match &options.draft_model {
            Some(draft) => {
                let tokenizer = tokenizer.get()?;
                Some(DraftCheckpoint::open(draft, &checkpoint, tokenizer)?)
            }
            None => None,
        };
        let models = [
            Some((&checkpoint, options.weight_format)),
            draft
                .as_ref()
                .map(|draft| (&draft.checkpoint, draft.weight_format)),
        ];
        let models: Vec<_> = models.into_iter().flatten().collect();
        let options = device_choice::settle(&options, &models)?;
        Ok(Self {
            name,
            tokenizer,
            chat_template,
            sentence,
            config,
            options,
            draft,
            checkpoint,
        })
    }

    /// Plans what `load` makes.
    pub fn plan(&self) -> Result<Planned, Error> {
        let draft = self.draft.as_ref();
        device::plan(&self.checkpoint, &self.tokenizer, &self.options, draft)
    }

    /// Loads the weights, and allocates the memory: not more than `planned`, if that is given.
    pub fn load(&self, planned: Option<&MemoryPlan>) -> Result<Loaded, Error> {
        let draft = self.draft.as_ref();
        let (checkpoint, options) = (&self.checkpoint, &self.options);
        device::load(checkpoint, &self.tokenizer, options, draft, planned)
    }
}

fn chat_template(
    checkpoint: &Checkpoint,
    options: &LlmOptions,
) -> Result<Option<ChatTemplate>, Error> {
    let template = template_of(|name| match (&options.chat_template, name) {
        (Some(source), "chat_template.jinja") => Ok(Some(source.clone().into_bytes().into())),
        _ => checkpoint.file(name),
    })?;
    Ok(template.map(|template| template.with_default_kwargs(options.template_kwargs.clone())))
}

/// Returns the chat template of a model whose files `file` reads.
pub(crate) fn template_of(
    file: impl Fn(&str) -> FileContent,
) -> Result<Option<ChatTemplate>, Error> {
    let config = file("tokenizer_config.json")?;
    let special_tokens_map = file("special_tokens_map.json")?;
    let jinja = file("chat_template.jinja")?;
    let of_processor = file("chat_template.json")?;
    let tool_use = file(TOOL_USE_FILE)?;
    Ok(ChatTemplate::from_files(TemplateFiles {
        tokenizer_config_json: config.as_deref(),
        special_tokens_map_json: special_tokens_map.as_deref(),
        chat_template_jinja: jinja.as_deref(),
        chat_template_json: of_processor.as_deref(),
        tool_use_jinja: tool_use.as_deref(),
    })?)
}
