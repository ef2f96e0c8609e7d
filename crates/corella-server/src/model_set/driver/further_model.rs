//! Models that requests may name although the server does not list them.

use tokio::task::spawn_blocking;

use super::{Core, ModelSet, Slot};
use crate::call::call_context::CallContext;
use crate::model_set::model_loader::ModelId;
use crate::model_set::model_table::ModelSetting;
use crate::model_set::model_view::{ModelView, check_name};
use crate::wire::api_error::ApiError;
use crate::wire::field_check::closest;

impl ModelSet {
    /// Finds the model with this name. A model that only the loader knows enters the table, if the caller's key may use
    /// it.
    pub(crate) async fn find_or_add(&self, context: &CallContext, name: &str) -> Option<ModelId> {
        if let Some(known) = self.find(name) {
            return Some(known);
        }
        self.look_up().await;
        self.update(|core, _| {
            let is_meant = |setting: &&ModelSetting| has_name(setting, name);
            let setting = core.further_models().find(is_meant).cloned()?;
            check_name(context, &setting, name).ok()?;
            let Some(model) = core.table.add(setting) else {
                tracing::warn!(
                    "{name} is refused: requests have named too many models of the cache"
                );
                return None;
            };
            if model.0 == core.slots.len() {
                core.slots.push(Slot::default());
            }
            Some(model)
        })
    }

    /// Returns the name of a model without Ollama's tag, which defaults to `latest`. A model that only the loader knows
    /// enters the table.
    pub(crate) async fn untagged<'a>(&self, context: &CallContext, name: &'a str) -> &'a str {
        match self.find_or_add(context, name).await {
            Some(_) => name,
            None => name.strip_suffix(":latest").unwrap_or(name),
        }
    }

    /// Returns all models that requests may name.
    pub(crate) async fn views_with_further(&self) -> Vec<ModelView> {
        self.look_up().await;
        let mut views = self.views();
        views.extend(self.lock().further_models().map(ModelView::of_unused));
        views
    }

    /// The error about an unknown name shows the nearest name first.
    pub(super) fn not_found(&self, context: &CallContext, name: &str) -> ApiError {
        let mut names = self.names(context);
        if let Some(near) = closest(name, names.iter().map(String::as_str)) {
            let near = near.to_owned();
            names.sort_by_key(|known| *known != near);
        }
        ApiError::model_not_found(name, &names)
    }

    /// Has the loader look for further models.
    async fn look_up(&self) {
        let Some(loader) = self.0.loader.clone().filter(|_| self.has_several()) else {
            return;
        };
        let _turn = self.0.look_up.lock().await;
        if let Ok(further) = spawn_blocking(move || loader.further_models()).await {
            self.lock().set_further(further);
        }
    }
}

impl Core {
    /// A short name that several models have is left to the first of them, as in the table.
    fn set_further(&mut self, models: Vec<ModelSetting>) {
        let mut further: Vec<ModelSetting> = Vec::new();
        for mut setting in models {
            setting.other_names.retain(|name| {
                let is_taken = further.iter().any(|earlier| has_name(earlier, name));
                !is_taken && self.table.find(name).is_none()
            });
            further.push(setting);
        }
        self.further = further;
    }

    /// Returns the models that the loader has found and the table lacks.
    pub fn further_models(&self) -> impl Iterator<Item = &ModelSetting> {
        self.further.iter().filter(|setting| {
            let mut names = setting.names.iter();
            names.all(|name| self.table.find_named(name).is_none())
        })
    }
}

fn has_name(setting: &ModelSetting, name: &str) -> bool {
    let mut names = setting.names.iter().chain(&setting.other_names);
    names.any(|known| known == name)
}
