//! A model behind the API without a socket, for commands and programs that send their own requests.

use corella_engine::Engine;
use corella_model::GenerationDefaults;
use corella_server::{LocalClient, ServeConfig, ServerConfig, ServerParts, ServerState, TextModel};
use corella_text::Tokenizer;

use crate::arguments::config::LlmConfig;
use crate::client::patient_client::PatientClient;
use crate::model::llm::check_head;
use crate::{Error, Llm};

pub struct LocalServer {
    pub client: PatientClient,
    pub engine: Engine,
    /// The name of the folder or file of the model.
    pub name: String,
    pub max_model_len: u32,
    /// The reason if the model generates no text.
    pub no_text: Option<Error>,
    pub has_chat_template: bool,
    pub tokenizer: Tokenizer,
    /// The sampling parameters that the model's files recommend.
    pub generation_defaults: GenerationDefaults,
    /// Describes model and hardware in one line.
    pub summary: String,
}

impl LocalServer {
    pub fn load(config: LlmConfig) -> Result<Self, Error> {
        let mut llm = Llm::load(&config.source, &config.options)?;
        llm.engine.wait_disk_opened();
        // Packed weights are written to the cache while a server runs; here that would slow answers.
        llm.weight_keepers.clear();
        let reply_format = config.request.reply_format(llm.chat_template.as_ref());
        let server = ServerConfig {
            // Bodies come from this process, so no slow client can hold the memory of a long one.
            max_body_bytes: MAX_BODY_BYTES,
            allow_unknown_fields: config.request.allow_unknown_fields,
            ..ServerConfig::default()
        };
        let parts = ServerParts::new(server, None, None, Vec::new());
        let limits = ServeConfig::new("", 0, 0, 0);
        let config = config.request.serve_config(&llm, limits);
        let generation_defaults = config.generation_defaults.clone();
        let summary = llm.summary();
        let no_text = check_head(&llm.config).err();
        let has_chat_template = llm.chat_template.is_some();
        let tokenizer = llm.tokenizer.clone();
        let text = TextModel {
            tokenizer: llm.tokenizer,
            chat_template: llm.chat_template,
            reply_format,
        };
        let state = ServerState::new(parts, config, text, llm.engine.clone());
        Ok(Self {
            client: PatientClient::new(LocalClient::new(state)),
            engine: llm.engine,
            name: llm.name,
            max_model_len: llm.max_model_len,
            no_text,
            has_chat_template,
            tokenizer,
            generation_defaults,
            summary,
        })
    }
}

/// The longest request, in bytes.
pub const MAX_BODY_BYTES: usize = 64 << 20;
