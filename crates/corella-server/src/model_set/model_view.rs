//! A model as lists show it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::adapter::served_adapter::ServedAdapter;
use crate::call::call_context::CallContext;
use crate::config::serve_config::names_like;
use crate::model_set::model_card::ModelCard;
use crate::model_set::model_loader::ModelMemory;
use crate::model_set::model_table::{ModelSetting, ModelStatus};
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;

pub struct ModelView {
    pub setting: ModelSetting,
    pub status: ModelStatus,
    pub state: Option<Arc<ServerState>>,
    /// `None` before the first load, or before the first question about the model.
    pub card: Option<Arc<ModelCard>>,
    pub loading_for: Option<Duration>,
    /// When the model is unloaded, unless a request uses it before; `None` if it stays.
    pub expires_at: Option<SystemTime>,
}

impl ModelView {
    pub const STATUS_NAMES: [&str; 5] = ["unloaded", "loading", "loaded", "unloading", "failed"];

    /// A model that no request has used yet.
    pub fn of_unused(setting: &ModelSetting) -> Self {
        Self {
            setting: setting.clone(),
            status: ModelStatus::Unloaded,
            state: None,
            card: None,
            loading_for: None,
            expires_at: None,
        }
    }

    /// Returns the state in the words of llama.cpp's router, as far as it has them.
    pub fn status_name(&self) -> &'static str {
        match self.status {
            ModelStatus::Unloaded => "unloaded",
            ModelStatus::Waiting | ModelStatus::Loading { .. } => "loading",
            ModelStatus::Loaded { .. } => "loaded",
            ModelStatus::Unloading => "unloading",
            ModelStatus::Failed { .. } => "failed",
        }
    }

    /// Returns the planned memory of a model that is loaded, or is being loaded.
    pub fn memory(&self) -> Option<ModelMemory> {
        match &self.status {
            ModelStatus::Loading { memory, .. } | ModelStatus::Loaded { memory, .. } => {
                Some(*memory)
            }
            _ => None,
        }
    }

    /// Returns the model's adapters by name: the loaded ones, or those that are loaded with the model.
    pub fn adapters(&self) -> Vec<(String, Option<ServedAdapter>)> {
        match &self.state {
            Some(state) => {
                let loaded = state.served.adapters.list().into_iter();
                loaded
                    .map(|(name, adapter)| (name, Some(adapter)))
                    .collect()
            }
            None => self
                .setting
                .adapters
                .iter()
                .map(|name| (name.clone(), None))
                .collect(),
        }
    }

    /// Refuses a name that the caller's key may not use.
    pub fn check_key(&self, context: &CallContext, name: &str) -> Result<(), ApiError> {
        check_name(context, &self.setting, name)
    }
}

/// Refuses a name of a model that the caller's key may not use.
pub fn check_name(
    context: &CallContext,
    setting: &ModelSetting,
    name: &str,
) -> Result<(), ApiError> {
    let names = names_like(&setting.names, &setting.other_names, name);
    context.check_names(names, name)
}
