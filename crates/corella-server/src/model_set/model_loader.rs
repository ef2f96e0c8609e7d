//! Loads a server's models, one at a time.

use std::fmt;
use std::sync::Arc;

use crate::config::serve_config::{ServeConfig, TextModel};
use crate::model_set::model_table::ModelSetting;
use crate::state::server_state::ServerState;

/// A model's position in the list of the server's models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelId(pub usize);

/// The memory that a model takes while it is loaded, in bytes, planned before the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelMemory {
    pub weights: u64,
    pub kv_pool: u64,
    pub working: u64,
}

impl ModelMemory {
    pub fn total(&self) -> u64 {
        let parts = [self.weights, self.kv_pool, self.working];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

impl fmt::Display for ModelMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (weights {}, KV cache {}, working memory {})",
            Bytes(self.total()),
            Bytes(self.weights),
            Bytes(self.kv_pool),
            Bytes(self.working)
        )
    }
}

/// A size in messages.
pub struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / (1 << 20) as f64;
        match mib < 1024.0 {
            true => write!(f, "{mib:.1} MiB"),
            false => write!(f, "{:.1} GiB", mib / 1024.0),
        }
    }
}

/// Errors are texts for the operator. `name` is the model's first name.
pub trait ModelLoader: Send + Sync {
    /// Plans a model's memory from the headers of its files, without reading weights.
    fn plan(&self, model: ModelId, name: &str) -> Result<ModelMemory, String>;

    /// Loads a model within the memory that [`plan`](Self::plan) has returned for it: if its files have been replaced
    /// since by larger ones, it is not loaded. Its memory is free again when the last clone of the state has been
    /// dropped.
    fn load(
        &self,
        model: ModelId,
        name: &str,
        planned: ModelMemory,
    ) -> Result<Arc<ServerState>, String>;

    /// Looks up the models that requests may name although the server does not list them. They are planned and loaded
    /// by their names.
    fn further_models(&self) -> Vec<ModelSetting> {
        Vec::new()
    }

    /// Describes a model from the headers of its files, without reading weights.
    fn describe(&self, model: ModelId, name: &str) -> Result<(ServeConfig, TextModel), String>;

    /// Lets the system forget the content of a model's files, which are read from the disk again at the next load.
    fn drop_page_cache(&self, model: ModelId, name: &str);
}
