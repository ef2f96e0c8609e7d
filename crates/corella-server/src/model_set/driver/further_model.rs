//! Models that requests may name although the server does not list them.

use std::time::Instant;

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
        self.add_further(context, name)
    }

    /// Returns the name of a model without Ollama's tag, which defaults to `latest`. A model that only the loader knows
    /// enters the table, as with [`find_or_add`](Self::find_or_add).
    pub(crate) async fn untagged<'a>(&self, context: &CallContext, name: &'a str) -> &'a str {
        let untagged = name.strip_suffix(":latest").unwrap_or(name);
        if self.find(name).is_some() {
            return name;
        }
        if self.find(untagged).is_some() {
            return untagged;
        }
        self.look_up().await;
        if self.add_further(context, name).is_some() {
            return name;
        }
        self.add_further(context, untagged);
        untagged
    }

    /// Adds a model that the loader has found to the table.
    fn add_further(&self, context: &CallContext, name: &str) -> Option<ModelId> {
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

    /// Returns all models that requests may name, as of the loader's last look.
    pub(crate) fn views_with_further(&self) -> Vec<ModelView> {
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

    /// Has the loader look for further models. Callers that wait for the end of another look share the next one.
    pub(crate) async fn look_up(&self) {
        let Some(loader) = self.0.loader.clone().filter(|_| self.has_several()) else {
            return;
        };
        let called_at = Instant::now();
        let mut last_began_at = self.0.look_up.lock().await;
        if last_began_at.is_some_and(|began_at| began_at >= called_at) {
            return;
        }
        let began_at = Instant::now();
        if let Ok(further) = spawn_blocking(move || loader.further_models()).await {
            self.lock().set_further(further);
            *last_began_at = Some(began_at);
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::config::keep_alive::KeepAlive;
    use crate::config::serve_config::{ServeConfig, TextModel};
    use crate::config::server_config::ServerConfig;
    use crate::model_set::driver::ModelSetConfig;
    use crate::model_set::model_loader::{ModelLoader, ModelMemory};
    use crate::state::server_parts::ServerParts;
    use crate::state::server_state::ServerState;

    /// Finds models whose names count its looks.
    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl ModelLoader for Counter {
        fn plan(&self, _: ModelId, _: &str) -> Result<ModelMemory, String> {
            unreachable!("no model is used")
        }

        fn load(&self, _: ModelId, _: &str, _: ModelMemory) -> Result<Arc<ServerState>, String> {
            unreachable!("no model is used")
        }

        fn describe(&self, _: ModelId, _: &str) -> Result<(ServeConfig, TextModel), String> {
            unreachable!("no model is used")
        }

        fn drop_page_cache(&self, _: ModelId, _: &str) {}

        fn further_models(&self) -> Vec<ModelSetting> {
            let look = self.0.fetch_add(1, Ordering::Relaxed) + 1;
            vec![setting(&format!("look-{look}"))]
        }
    }

    fn setting(name: &str) -> ModelSetting {
        ModelSetting {
            names: vec![name.to_owned()],
            other_names: Vec::new(),
            adapters: Vec::new(),
            is_pinned: false,
            keep_alive: KeepAlive::Forever,
            takes_keep_alive: true,
        }
    }

    #[tokio::test]
    async fn waiting_callers_share_a_look() {
        let loader = Arc::new(Counter::default());
        let config = ModelSetConfig {
            models: vec![setting("fox")],
            has_several: true,
            max_memory_bytes: 0,
            load_timeout: Duration::ZERO,
            loader: Some(loader.clone()),
        };
        let parts = ServerParts::new(ServerConfig::default(), None, None, Vec::new());
        let set = ModelSet::new(parts, config).expect("the names differ");
        let num_looks = || loader.0.load(Ordering::Relaxed);
        // All of them are called before the first look has ended. It began before the others were called.
        tokio::join!(set.look_up(), set.look_up(), set.look_up(), set.look_up());
        assert_eq!(num_looks(), 2);
        let names = || {
            Vec::from_iter(
                set.views_with_further()
                    .into_iter()
                    .map(|view| view.setting.names),
            )
        };
        assert_eq!(names(), [["fox"], ["look-2"]]);
        // A later caller sees what has changed since.
        set.look_up().await;
        assert_eq!(num_looks(), 3);
        assert_eq!(names(), [["fox"], ["look-3"]]);
        set.close();
    }
}
