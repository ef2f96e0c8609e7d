//! Loads, unloads and sleep that the operator asks for.

use super::{Core, ModelSet};
use crate::model_set::model_loader::ModelId;
use crate::model_set::model_table::ModelStatus;
use crate::wire::api_error::ApiError;

impl ModelSet {
    /// Begins to load a model.
    pub(crate) fn load(&self, model: ModelId) -> Result<(), ApiError> {
        match self.update(|core, now_us| core.table.handle_load_asked(model, now_us)) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let message = format!(
                    "`{}` is already loaded, or is being loaded",
                    self.name(model)
                );
                Err(ApiError::invalid("model", message))
            }
            Err(error) => Err(self.unavailable(model, &error)),
        }
    }

    /// Begins to unload a model, which ends when its running requests have ended.
    pub(crate) fn unload(&self, model: ModelId) -> Result<(), ApiError> {
        match self.update(|core, _| core.table.handle_unload_asked(model)) {
            true => Ok(()),
            false => {
                let message = format!("`{}` is not loaded", self.name(model));
                Err(ApiError::invalid("model", message))
            }
        }
    }

    /// Unloads all models, and returns when they are unloaded, or need not be any more. Running requests end first. At
    /// level 2, the page cache of their files is dropped, too.
    pub(crate) async fn sleep(&self, level: u8) -> Result<(), ApiError> {
        let before = self.update(|core, _| {
            core.table.handle_sleep(level);
            let slots = core.slots.iter().enumerate();
            let slots = slots.map(|(index, slot)| (ModelId(index), slot.num_unloads));
            let pending = slots.filter(|(model, _)| core.table.has_pending_unload(*model));
            pending.collect::<Vec<_>>()
        });
        let has_ended = |core: &Core, (model, num_unloads): (ModelId, u64)| {
            let slot = &core.slots[model.0];
            let is_pending = core.table.has_pending_unload(model);
            !is_pending || slot.num_unloads > num_unloads || slot.is_stuck
        };
        self.wait_until(|core| before.iter().all(|&model| has_ended(core, model)))
            .await?;
        let stuck = {
            let core = self.lock();
            let mut asked = before.iter().map(|(model, _)| *model);
            asked.find(|model| core.slots[model.0].is_stuck)
        };
        match stuck {
            None if level == 2 => self.drop_page_cache().await,
            None => Ok(()),
            Some(model) => Err(ApiError::engine(format!(
                "The model `{}` cannot be unloaded: its engine does not stop.",
                self.name(model)
            ))),
        }
    }

    /// Loads the models that `sleep` has unloaded, and returns when they are loaded, or cannot be.
    pub(crate) async fn wake(&self) -> Result<(), ApiError> {
        let woken = self.update(|core, now_us| core.table.handle_wake(now_us));
        let is_on_its_way = |core: &Core, model: ModelId| {
            let status = core.table.status(model);
            matches!(
                status,
                ModelStatus::Waiting | ModelStatus::Loading { .. } | ModelStatus::Unloading
            )
        };
        let loaded = self.wait_until(|core| !woken.iter().any(|&id| is_on_its_way(core, id)));
        let limit = self.0.load_timeout;
        match tokio::time::timeout(limit, loaded).await {
            Ok(ended) => ended?,
            Err(_) => {
                let core = self.lock();
                let late = woken.iter().find(|model| is_on_its_way(&core, **model));
                let late = late.copied();
                drop(core);
                if let Some(model) = late {
                    return Err(ApiError::load_timeout(&self.name(model), limit.as_secs()));
                }
            }
        }
        let core = self.lock();
        let failed = woken
            .iter()
            .find_map(|&model| match core.table.status(model) {
                ModelStatus::Failed { error, .. } => Some((model, error)),
                _ => None,
            });
        drop(core);
        failed.map_or(
            Ok(()),
            |(model, error)| Err(self.unavailable(model, &error)),
        )
    }

    pub(crate) fn is_asleep(&self) -> bool {
        self.lock().table.is_asleep()
    }

    /// Drops the page cache of the files of all models that are not loaded.
    async fn drop_page_cache(&self) -> Result<(), ApiError> {
        let Some(loader) = self.0.loader.clone() else {
            return Ok(());
        };
        let set = self.clone();
        let dropping = tokio::task::spawn_blocking(move || {
            for model in set.ids() {
                if set.state(model).is_none() {
                    loader.drop_page_cache(model, &set.name(model));
                }
            }
        });
        let dropped = dropping.await;
        dropped.map_err(|_| ApiError::engine("The page cache was not dropped; see the log."))
    }
}
