//! Loads the models of a server that has several.

use std::sync::Arc;

use corella_engine::{Generate, Submission, SubmitError, TokenStream};
use corella_server::{
    Backend, ModelId, ModelLoader, ModelMemory, OutputMetrics, ServeConfig, ServerParts,
    ServerState, TextModel,
};

use crate::arguments::args::{LogFormatArg, RequestArgs};
use crate::arguments::log_format::announce;
use crate::options::weight_cache::WeightKeeper;
use crate::{Llm, LlmOptions, MemoryPlan, ModelSource};

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

    fn load(
        &self,
        ModelId(index): ModelId,
        planned: ModelMemory,
    ) -> Result<Arc<ServerState>, String> {
        let planned = MemoryPlan {
            weight_bytes: planned.weights,
            kv_cache_bytes: planned.kv_pool,
            working_bytes: planned.working,
        };
        // Without a budget, the KV cache takes a share of the memory that is free now, which changes all the time.
        let planned = Some(&planned).filter(|_| self.options.shared_memory_bytes.is_some());
        let llm = Llm::load_within(&self.sources[index], &self.options, planned);
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
        let engine = Arc::new(llm.engine.clone());
        let backend = Backend {
            generator: Arc::new(LoadedEngine::new(engine, llm.weight_keepers)),
            kv_transfer: None,
            roles: None,
            adapters: None,
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        ServerState::with_backend(self.parts.clone(), config, text, llm.engine, backend)
    }
}

/// A model's generator, and the threads that write its packed weights: they keep the memory of the weights, and so must
/// end with the model.
pub struct LoadedEngine {
    generator: Arc<dyn Generate>,
    _weight_keepers: Vec<WeightKeeper>,
}

impl LoadedEngine {
    pub fn new(generator: Arc<dyn Generate>, weight_keepers: Vec<WeightKeeper>) -> Self {
        Self {
            generator,
            _weight_keepers: weight_keepers,
        }
    }
}

impl Generate for LoadedEngine {
    fn submit(&self, submission: Submission) -> Result<Vec<TokenStream>, SubmitError> {
        self.generator.submit(submission)
    }

    fn check(&self, submission: Submission) -> Result<(), SubmitError> {
        self.generator.check(submission)
    }
}
