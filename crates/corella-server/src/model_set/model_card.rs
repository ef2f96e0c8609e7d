//! A model's configuration, template and abilities, which need no engine.

use std::sync::Arc;

use corella_text::{ChatTemplate, FillInMiddle, ReplyFormat, Tokenizer};

use crate::config::serve_config::{ServeConfig, TextModel};

pub struct ModelCard {
    pub config: Arc<ServeConfig>,
    /// The source of the chat template; empty without one.
    pub template: String,
    /// The model's abilities in Ollama's words.
    pub capabilities: Vec<&'static str>,
}

impl ModelCard {
    pub fn new(config: Arc<ServeConfig>, text: &TextModel) -> Self {
        let template = text.chat_template.as_ref();
        Self::of(config, &text.tokenizer, template, text.reply_format)
    }

    pub fn of(
        config: Arc<ServeConfig>,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        format: ReplyFormat,
    ) -> Self {
        let reads_tools = template.is_some_and(ChatTemplate::reads_tools);
        let of_text = [
            ("completion", true),
            ("tools", reads_tools && format.calls.is_some()),
            ("thinking", format.reasoning.is_some()),
            ("insert", FillInMiddle::of(tokenizer).is_some()),
        ];
        let of_text = of_text.into_iter().filter(|(_, is_there)| *is_there);
        Self {
            capabilities: match config.has_head {
                true => of_text.map(|(name, _)| name).collect(),
                false => vec!["embedding"],
            },
            template: template
                .map(ChatTemplate::source)
                .unwrap_or_default()
                .to_owned(),
            config,
        }
    }
}
