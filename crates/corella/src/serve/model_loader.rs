//! Loads the models of a server that has several.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use corella_engine::{Generate, Submission, SubmitError, TokenStream, rare_line};
use corella_hub::{CachedModel, Fetched, Hub, ModelName, short_names};
use corella_server::{
    AdapterLoader, Backend, ModelId, ModelLoader, ModelMemory, ModelSetting, OutputMetrics,
    ServeConfig, ServerParts, ServerState, TextModel,
};

use crate::arguments::args::LogFormatArg;
use crate::arguments::config::{HubModels, ModelOptions, ServedModel};
use crate::arguments::log_format::announce;
use crate::options::weight_cache::WeightKeeper;
use crate::serve::adapter_loader::FolderLoader;
use crate::{Llm, MemoryPlan, ModelSource};

/// The models of a server, and the options that they share.
pub struct SourceLoader {
    pub parts: Arc<ServerParts>,
    pub models: Vec<ServedModel>,
    /// The options of models without their own.
    pub shared: ModelOptions,
    /// Where further models are.
    pub hub: Option<HubModels>,
    pub log_format: LogFormatArg,
}

/// A load waits for its file of `--kv-disk` for at most this long, so that its first request finds cached prompts.
const DISK_LIMIT: Duration = Duration::from_secs(5);

impl ModelLoader for SourceLoader {
    fn plan(&self, model: ModelId, name: &str) -> Result<ModelMemory, String> {
        let (source, own) = self.find(model, name)?;
        let plan = Llm::plan(&source, &own.options);
        let plan = plan.map_err(|error| error.to_string())?;
        Ok(ModelMemory {
            weights: plan.weight_bytes + adapter_bytes(&own.adapters),
            kv_pool: plan.kv_cache_bytes,
            working: plan.working_bytes,
        })
    }

    fn load(
        &self,
        model: ModelId,
        name: &str,
        planned: ModelMemory,
    ) -> Result<Arc<ServerState>, String> {
        let planned = MemoryPlan {
            weight_bytes: planned.weights,
            kv_cache_bytes: planned.kv_pool,
            working_bytes: planned.working,
        };
        let (source, own) = self.find(model, name)?;
        // Without a budget, the KV cache takes a share of the memory that is free now, which changes all the time.
        let planned = Some(&planned).filter(|_| own.options.shared_memory_bytes.is_some());
        let llm = Llm::load_within(&source, &own.options, planned);
        let llm = llm.map_err(|error| error.to_string())?;
        if !llm.engine.wait_disk_opened_for(DISK_LIMIT) {
            tracing::warn!(
                "--kv-disk: the file of {} is not open after {} s; its prompts are computed until then",
                llm.name,
                DISK_LIMIT.as_secs()
            );
        }
        announce(self.log_format, &llm.summary());
        self.state(llm, own)
    }

    fn further_models(&self) -> Vec<ModelSetting> {
        let Some(HubModels { config, keep_alive }) = &self.hub else {
            return Vec::new();
        };
        let models = Hub::new(config.clone()).list_readable(|error| {
            rare_line!(
                warn,
                "--allow-hub-models leaves out models of the cache: {error}"
            );
        });
        let models = models.into_iter().filter(|model| model.is_complete);
        let setting = |model: CachedModel| {
            let name = model.name.to_string();
            ModelSetting {
                other_names: short_names(&name),
                adapters: Vec::new(),
                names: vec![name],
                is_pinned: false,
                keep_alive: *keep_alive,
                takes_keep_alive: true,
            }
        };
        models.map(setting).collect()
    }

    fn describe(&self, model: ModelId, name: &str) -> Result<(ServeConfig, TextModel), String> {
        let (source, own) = self.find(model, name)?;
        let described = Llm::describe(&source, &own.options);
        let described = described.map_err(|error| error.to_string())?;
        let request = own.request.clone();
        let reply_format = request.reply_format(described.chat_template.as_ref());
        let config = request.card_config(&described, own.limits.clone());
        let text = TextModel {
            tokenizer: described.tokenizer,
            reply_format,
            chat_template: described.chat_template,
        };
        Ok((config, text))
    }

    fn drop_page_cache(&self, model: ModelId, name: &str) {
        let dropped = self.find(model, name).and_then(|(source, own)| {
            Llm::drop_page_cache(&source, &own.options).map_err(|error| error.to_string())
        });
        if let Err(error) = dropped {
            tracing::warn!("the page cache keeps files of a model: {error}");
        }
    }
}

impl SourceLoader {
    /// Returns where a model is, and its options. A model that is not listed is looked up by its name.
    fn find(
        &self,
        ModelId(index): ModelId,
        name: &str,
    ) -> Result<(ModelSource, &ModelOptions), String> {
        if let Some(model) = self.models.get(index) {
            let own = model.own.as_deref().unwrap_or(&self.shared);
            return Ok((model.source.clone(), own));
        }
        let config = self.hub.as_ref().map(|hub| hub.config.clone());
        let found = config.zip(ModelName::parse(name).ok());
        let found = found.map(|(config, name)| Hub::new(config).find(&name));
        match found
            .transpose()
            .map_err(|error| error.to_string())?
            .flatten()
        {
            Some(Fetched { path, .. }) => {
                let name = name.to_owned();
                Ok((ModelSource::Named { path, name }, &self.shared))
            }
            None => Err("it is no longer in the hub's cache".to_owned()),
        }
    }

    fn state(&self, llm: Llm, own: &ModelOptions) -> Result<Arc<ServerState>, String> {
        let has_adapters = llm.engine.adapters().is_some();
        let adapters =
            has_adapters.then(|| Arc::new(FolderLoader::new(&llm)) as Arc<dyn AdapterLoader>);
        let request = own.request.clone();
        let reply_format = request.reply_format(llm.chat_template.as_ref());
        let config = request.serve_config(&llm, own.limits.clone());
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
            adapters,
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        let state =
            ServerState::with_backend(self.parts.clone(), config, text, llm.engine, backend);
        for (name, path) in &own.adapters {
            let loaded = state.load_adapter(name, path);
            loaded.map_err(|error| format!("its adapter {name} in {path}: {error}"))?;
        }
        Ok(state)
    }
}

/// Returns the memory of adapters: at most twice their files, whose numbers have two bytes or more and are kept in four.
fn adapter_bytes(adapters: &[(String, String)]) -> u64 {
    let sizes = adapters.iter().map(|(_, path)| {
        let weights = Path::new(path).join("adapter_model.safetensors");
        fs::metadata(weights).map_or(0, |file| file.len())
    });
    2 * sizes.sum::<u64>()
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
