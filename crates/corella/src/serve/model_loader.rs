//! Loads the models of a server that has several.

use std::sync::Arc;

use corella_engine::{Engine, Generate, Submission, SubmitError, TokenStream};
use corella_server::{
    Backend, ModelId, ModelLoader, ModelMemory, OutputMetrics, ServeConfig, ServerParts,
    ServerState, TextModel,
};

use crate::arguments::args::{LogFormatArg, RequestArgs};
use crate::arguments::log_format::announce;
use crate::options::weight_cache::WeightKeeper;
use crate::{Llm, LlmOptions, ModelSource};

/// The models of a server, and the options that they share.
pub struct SourceLoader {
    pub parts: Arc<ServerParts>,
    pub sources: Vec<ModelSource>,
    pub options: LlmOptions,
    /// The limits of requests, without the facts about a model.
    pub limits: ServeConfig,
    pub request: RequestArgs,
    pub log_format: LogFormatArg,
}

impl ModelLoader for SourceLoader {
    fn plan(&self, ModelId(index): ModelId) -> Result<ModelMemory, String> {
        let plan = Llm::plan(&self.sources[index], &self.options);
        let plan = plan.map_err(|error| error.to_string())?;
        Ok(ModelMemory {
            weights: plan.weight_bytes,
            kv_pool: plan.kv_cache_bytes,
            working: plan.working_bytes,
        })
    }

    fn load(&self, ModelId(index): ModelId) -> Result<Arc<ServerState>, String> {
        let llm = Llm::load(&self.sources[index], &self.options);
        let llm = llm.map_err(|error| error.to_string())?;
        announce(self.log_format, &llm.summary());
        Ok(self.state(llm))
    }
}

impl SourceLoader {
    fn state(&self, llm: Llm) -> Arc<ServerState> {
        let request = self.request.clone();
        let reply_format = request.reply_format(llm.chat_template.as_ref());
        let config = request.serve_config(&llm, self.limits.clone());
        let text = TextModel {
            tokenizer: llm.tokenizer,
            reply_format,
            chat_template: llm.chat_template,
        };
        let generator = LoadedEngine {
            engine: llm.engine.clone(),
            _weight_keepers: llm.weight_keepers,
        };
        let backend = Backend {
            generator: Arc::new(generator),
            kv_transfer: None,
            roles: None,
            adapters: None,
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        ServerState::with_backend(self.parts.clone(), config, text, llm.engine, backend)
    }
}

/// A model's engine, and the threads that write its packed weights: they keep the memory of the weights, and so must
/// end with the engine.
struct LoadedEngine {
    engine: Engine,
    _weight_keepers: Vec<WeightKeeper>,
}

impl Generate for LoadedEngine {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.engine.submit(submission)
    }

    fn check(&self, submission: Submission) -> Result<(), SubmitError> {
        self.engine.check(submission)
    }
}
