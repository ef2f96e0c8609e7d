//! Reads LoRA adapters for a served model.

use std::path::Path;

use corella_engine::{Engine, LoadedAdapter};
use corella_model::{Adapter, FileWatch, ModelConfig};
use corella_server::AdapterLoader;

use crate::Llm;

pub struct FolderLoader {
    engine: Engine,
    model: ModelConfig,
}

impl FolderLoader {
    pub fn new(llm: &Llm) -> Self {
        Self {
            engine: llm.engine.clone(),
            model: llm.config.clone(),
        }
    }
}

impl AdapterLoader for FolderLoader {
    fn load(&self, name: &str, path: &str) -> Result<LoadedAdapter, String> {
        let Some(adapters) = self.engine.adapters() else {
            return Err("adapters are not enabled: start the server with --enable-lora".to_owned());
        };
        let watch = FileWatch::default();
        let adapter = Adapter::open_watched(Path::new(path), &self.model, &watch);
        // The loss of a page may be the reason of any error.
        watch.check()?;
        let adapter = adapter.map_err(|error| error.to_string())?;
        if let Some(first) = adapter.left_out.first() {
            tracing::info!(
                "adapter {name}: {} tensors update parts of the model that read no text, and are left: {first} \
                 and others",
                adapter.left_out.len()
            );
        }
        let (rank, max_rank) = (adapter.max_rank(), adapters.max_rank());
        if rank > max_rank {
            return Err(format!(
                "its rank is {rank}, and the server was started with --max-lora-rank {max_rank}"
            ));
        }
        let loaded = LoadedAdapter::new(name, &adapter, adapters.clone());
        watch.check()?;
        Ok(loaded)
    }
}
