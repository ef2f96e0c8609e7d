//! The models of a server, and the requests that use them.

mod further_model;
mod operator;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use axum::extract::FromRef;
use corella_engine::EngineState;
use tokio::sync::{oneshot, watch};

use crate::call::call_context::CallContext;
use crate::call::metrics::MetricSum;
use crate::config::keep_alive::KeepAlive;
use crate::model_set::loader_thread;
use crate::model_set::model_card::ModelCard;
use crate::model_set::model_loader::{ModelId, ModelLoader, ModelMemory};
use crate::model_set::model_table::{
    Admission, LoadError, ModelAction, ModelSetting, ModelStatus, ModelTable, Ticket,
};
use crate::model_set::model_use::ModelUse;
use crate::model_set::model_view::{ModelView, check_name};
use crate::state::server_parts::ServerParts;
use crate::state::server_state::ServerState;
use crate::wire::api_error::ApiError;

/// Drives a `ModelTable`: requests take their uses here, and a thread loads and unloads models. Clones share the
/// models.
#[derive(Clone)]
pub struct ModelSet(Arc<Shared>);

pub struct ModelSetConfig {
    pub models: Vec<ModelSetting>,
    /// Whether the server is one of several models, even if it lists only one so far. The engine of a server's only
    /// model ends the server when it is lost.
    pub has_several: bool,
    /// Limits the planned memory of all models that are loaded.
    pub max_memory_bytes: u64,
    /// Limits the time that a request waits for its model.
    pub load_timeout: Duration,
    /// Without a loader, all models stay loaded, and have to be put in by [`ModelSet::put_loaded`].
    pub loader: Option<Arc<dyn ModelLoader>>,
}

struct Shared {
    parts: Arc<ServerParts>,
    has_several: bool,
    loader: Option<Arc<dyn ModelLoader>>,
    /// Held while a model's files are read for its card: one model at a time.
    reads_card: tokio::sync::Mutex<()>,
    load_timeout: Duration,
    begin: Instant,
    core: Mutex<Core>,
    /// Wakes the loader's thread.
    work: Condvar,
    /// Changes after every change of the table.
    num_updates: watch::Sender<u64>,
    /// When the last look for further models began. The loader looks once at a time.
    look_up: tokio::sync::Mutex<Option<Instant>>,
}

struct Core {
    table: ModelTable,
    slots: Vec<Slot>,
    /// The models that the loader has found beside those of the table, at its last look.
    further: Vec<ModelSetting>,
    waits: HashMap<Ticket, oneshot::Sender<Result<ModelUse, LoadError>>>,
    /// For the loader's thread, in order.
    actions: VecDeque<ModelAction>,
    /// When the loader's thread looks at the table by itself. While it is awake, this is 0.
    wakes_us: u64,
    is_closed: bool,
}

/// A model's engine, if it is loaded, and the facts that outlive an unload.
#[derive(Default)]
struct Slot {
    state: Option<Arc<ServerState>>,
    /// The card since the first load, or since the first question about the model.
    card: Option<Arc<ModelCard>>,
    /// The counts of earlier loads.
    past_metrics: Arc<MetricSum>,
    num_unloads: u64,
    /// The model is being unloaded, and its engine does not stop.
    is_stuck: bool,
}

impl ModelSet {
    /// The error names a name that two models have.
    pub fn new(parts: Arc<ServerParts>, config: ModelSetConfig) -> Result<Self, String> {
        let num_models = config.models.len();
        let set = Self(Arc::new(Shared {
            parts,
            has_several: config.has_several,
            loader: config.loader.clone(),
            reads_card: tokio::sync::Mutex::default(),
            load_timeout: config.load_timeout,
            begin: Instant::now(),
            core: Mutex::new(Core {
                table: ModelTable::new(config.models, config.max_memory_bytes)?,
                slots: (0..num_models).map(|_| Slot::default()).collect(),
                further: Vec::new(),
                waits: HashMap::new(),
                actions: VecDeque::new(),
                wakes_us: 0,
                is_closed: false,
            }),
            work: Condvar::new(),
            num_updates: watch::Sender::new(0),
            look_up: tokio::sync::Mutex::default(),
        }));
        if let Some(loader) = config.loader {
            let set = set.clone();
            let thread = thread::Builder::new().name("corella-models".to_owned());
            let started = thread.spawn(move || loader_thread::run(&set, &*loader));
            started.map_err(|error| format!("the thread that loads models: {error}"))?;
        }
        Ok(set)
    }

    /// One model that stays loaded.
    pub fn of(state: Arc<ServerState>) -> Self {
        let config = ModelSetConfig {
            models: vec![ModelSetting {
                names: state.config.served_model_names.clone(),
                other_names: state.config.other_names.clone(),
                adapters: Vec::new(),
                is_pinned: true,
                keep_alive: KeepAlive::Forever,
                takes_keep_alive: false,
            }],
            has_several: false,
            max_memory_bytes: u64::MAX,
            load_timeout: Duration::ZERO,
            loader: None,
        };
        let set = Self::new(state.parts.clone(), config).expect("one model has its name alone");
        set.put_loaded(ModelId(0), ModelMemory::default(), state);
        set
    }

    /// Adds a model that the caller has loaded, before the set is shared.
    pub fn put_loaded(&self, model: ModelId, memory: ModelMemory, state: Arc<ServerState>) {
        let mut core = self.lock();
        let now_us = self.now_us();
        let Core { table, slots, .. } = &mut *core;
        assert_eq!(table.handle_load_asked(model, now_us), Ok(true));
        let plan = table.poll_action(now_us);
        assert_eq!(plan, Some(ModelAction::Plan(model)));
        table.handle_planned(model, Ok(memory), now_us);
        let load = table.poll_action(now_us);
        assert_eq!(load, Some(ModelAction::Load(model)), "it has no room");
        slots[model.0].put(state);
        table.handle_loaded(model, now_us);
        drop(core);
        // The model may have to be unloaded before anything else happens.
        self.0.work.notify_one();
    }

    /// Has the pinned models loaded, without waiting for them.
    pub fn load_pinned(&self) {
        self.update(|core, now_us| {
            for model in (0..core.slots.len()).map(ModelId) {
                if core.table.setting(model).is_pinned {
                    // A model whose load has failed is tried again by its next request.
                    drop(core.table.handle_load_asked(model, now_us));
                }
            }
        });
    }

    /// Stops all engines and the loader's thread. A running load is left to the end of the process.
    pub fn close(&self) {
        self.lock().is_closed = true;
        self.0.work.notify_one();
        for state in self.loaded() {
            state.engine.shutdown();
        }
    }

    pub fn parts(&self) -> &Arc<ServerParts> {
        &self.0.parts
    }

    /// Whether models may be unloaded, and loaded again.
    pub(crate) fn has_loader(&self) -> bool {
        self.0.loader.is_some()
    }

    /// Whether requests may say how long a model stays loaded.
    pub(crate) fn takes_keep_alive(&self, model: ModelId) -> bool {
        self.lock().table.setting(model).takes_keep_alive
    }

    pub(crate) fn views(&self) -> Vec<ModelView> {
        let core = self.lock();
        let (now, now_us) = (SystemTime::now(), self.now_us());
        let views = core.slots.iter().enumerate().map(|(index, slot)| {
            let status = core.table.status(ModelId(index));
            let expires_us = match &status {
                ModelStatus::Loaded { expires_us, .. } => *expires_us,
                _ => None,
            };
            let loading_for = match &status {
                ModelStatus::Loading { since_us, .. } => {
                    Some(Duration::from_micros(now_us.saturating_sub(*since_us)))
                }
                _ => None,
            };
            let left = |at_us: u64| Duration::from_micros(at_us.saturating_sub(now_us));
            ModelView {
                setting: core.table.setting(ModelId(index)).clone(),
                status,
                state: slot.state.clone(),
                card: slot.card.clone(),
                loading_for,
                expires_at: expires_us.and_then(|at_us| now.checked_add(left(at_us))),
            }
        });
        views.collect()
    }

    /// Returns the models that are loaded.
    pub(crate) fn loaded(&self) -> Vec<Arc<ServerState>> {
        let core = self.lock();
        let states = core.slots.iter();
        states.filter_map(|slot| slot.state.clone()).collect()
    }

    /// Returns the only model of the server, if it has one and that is loaded.
    pub(crate) fn only_model(&self) -> Option<Arc<ServerState>> {
        let core = self.lock();
        let slot = core.slots.first().filter(|_| !self.has_several())?;
        slot.state.clone()
    }

    /// Returns the state of the only model's engine, if there is one. The engine of a model that is being unloaded is
    /// none, unless it does not stop.
    pub(crate) fn only_engine_state(&self) -> Option<EngineState> {
        let core = self.lock();
        let slot = core.slots.first().filter(|_| !self.has_several())?;
        match &slot.state {
            Some(state) => Some(state.engine.state()),
            None if slot.is_stuck => Some(EngineState::Lost("it does not stop".to_owned())),
            None => None,
        }
    }

    /// Returns whether the server is one of several models. Requests may have named only one of them so far.
    pub(crate) fn has_several(&self) -> bool {
        self.0.has_several
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = ModelId> + use<> {
        (0..self.lock().slots.len()).map(ModelId)
    }

    /// Returns the model with this name, or the one that has this adapter.
    pub(crate) fn find(&self, name: &str) -> Option<ModelId> {
        let core = self.lock();
        core.table.find(name).or_else(|| {
            let mut slots = core.slots.iter();
            let has_adapter = |state: &Arc<ServerState>| state.served.adapters.get(name).is_some();
            let adapted = slots.position(|slot| slot.state.as_ref().is_some_and(has_adapter));
            adapted.map(ModelId)
        })
    }

    /// Returns the model that a caller names, if the caller's key may use it. Without a name, it is the first model that
    /// the key may use.
    pub(crate) fn check_key(
        &self,
        context: &CallContext,
        name: Option<&str>,
    ) -> Result<ModelId, ApiError> {
        let Some(name) = name else {
            return self.first_model(context);
        };
        let found = self.find(name);
        let setting = self.setting(found.unwrap_or(ModelId(0)));
        check_name(context, &setting, name)?;
        found.ok_or_else(|| self.not_found(context, name))
    }

    /// Returns the first model whose own name the caller's key permits.
    fn first_model(&self, context: &CallContext) -> Result<ModelId, ApiError> {
        let check = |model: &ModelId| {
            let setting = self.setting(*model);
            let name = setting.names.first();
            name.map_or(Ok(()), |name| check_name(context, &setting, name))
        };
        match self.ids().find(|model| check(model).is_ok()) {
            Some(model) => Ok(model),
            None if self.has_several() => Err(ApiError::no_model_allowed()),
            None => check(&ModelId(0)).map(|()| ModelId(0)),
        }
    }

    fn setting(&self, model: ModelId) -> ModelSetting {
        self.lock().table.setting(model).clone()
    }

    fn state(&self, model: ModelId) -> Option<Arc<ServerState>> {
        self.lock().slots[model.0].state.clone()
    }

    /// Returns the models' names that the caller's key may use.
    pub(crate) fn names(&self, context: &CallContext) -> Vec<String> {
        let settings: Vec<_> = {
            let core = self.lock();
            let listed = (0..core.slots.len()).map(|index| core.table.setting(ModelId(index)));
            listed.chain(core.further_models()).cloned().collect()
        };
        let names = settings.into_iter().flat_map(|setting| {
            let mut names = setting.names.clone();
            names.retain(|name| check_name(context, &setting, name).is_ok());
            names
        });
        names.collect()
    }

    /// Returns a model for a question that loads none and is no use. The caller drops it soon.
    pub(crate) fn look_at(&self, model: ModelId) -> Result<Arc<ServerState>, ApiError> {
        let state = self.state(model);
        state.ok_or_else(|| ApiError::model_asleep(&self.name(model)))
    }

    /// Returns a model's card. The headers of the model's files give it if the model was never loaded.
    pub(crate) async fn card(&self, model: ModelId) -> Result<Arc<ModelCard>, ApiError> {
        let known = || self.lock().slots[model.0].card.clone();
        if let Some(card) = known() {
            return Ok(card);
        }
        let _turn = self.0.reads_card.lock().await;
        let (None, Some(loader)) = (known(), self.0.loader.clone()) else {
            return known().ok_or_else(|| ApiError::model_asleep(&self.name(model)));
        };
        let name = self.name(model);
        let read = tokio::task::spawn_blocking(move || {
            let (config, text) = loader.describe(model, &name)?;
            Ok(ModelCard::new(Arc::new(config), &text))
        });
        let read = read.await.unwrap_or_else(|error| Err(error.to_string()));
        let card =
            read.map_err(|reason| ApiError::model_unavailable(&self.name(model), &reason))?;
        // The model may have been loaded meanwhile.
        let mut core = self.lock();
        let card = core.slots[model.0].card.get_or_insert(Arc::new(card));
        Ok(card.clone())
    }

    /// Begins a use without waiting, if the model can be used at once.
    pub(crate) fn try_use(&self, model: ModelId) -> Option<ModelUse> {
        let state =
            self.update(
                |core, now_us| match core.table.handle_request(model, None, now_us) {
                    Admission::Ready => core.slots[model.0].state.clone(),
                    Admission::Refused(_) => None,
                    Admission::Wait(ticket) => {
                        core.table.handle_wait_end(model, ticket);
                        None
                    }
                },
            )?;
        Some(ModelUse::new(self.clone(), model, state))
    }

    /// Begins a use of a model, which is loaded if necessary.
    pub(crate) async fn use_model(
        &self,
        model: ModelId,
        keep_alive: Option<KeepAlive>,
    ) -> Result<ModelUse, ApiError> {
        let (sender, answer) = oneshot::channel();
        let (admission, state) = self.update(|core, now_us| {
            let admission = core.table.handle_request(model, keep_alive, now_us);
            if let Admission::Wait(ticket) = admission {
                core.waits.insert(ticket, sender);
            }
            // A waiting request must not hold a model that is to be unloaded.
            let state = match admission {
                Admission::Ready => core.slots[model.0].state.clone(),
                Admission::Wait(_) | Admission::Refused(_) => None,
            };
            (admission, state)
        });
        match (admission, state) {
            (Admission::Ready, Some(state)) => Ok(ModelUse::new(self.clone(), model, state)),
            (Admission::Ready, None) => unreachable!("a model can be used that is not loaded"),
            (Admission::Refused(error), _) => Err(self.unavailable(model, &error)),
            (Admission::Wait(ticket), _) => {
                let set = self;
                let _wait = Wait { set, model, ticket };
                let limit = self.0.load_timeout;
                tokio::select! {
                    biased;
                    answer = answer => match answer {
                        Ok(Ok(model_use)) => Ok(model_use),
                        Ok(Err(error)) => Err(self.unavailable(model, &error)),
                        Err(_) => Err(ApiError::engine("The wait for the model was lost.")),
                    },
                    () = tokio::time::sleep(limit) => {
                        Err(ApiError::load_timeout(&self.name(model), limit.as_secs()))
                    }
                    () = self.parts().draining() => Err(ApiError::draining()),
                }
            }
        }
    }

    fn unavailable(&self, model: ModelId, error: &LoadError) -> ApiError {
        ApiError::model_unavailable(&self.name(model), &error.to_string())
    }

    pub(crate) fn name(&self, model: ModelId) -> String {
        let core = self.lock();
        let names = &core.table.setting(model).names;
        names.first().cloned().unwrap_or_default()
    }

    pub(super) fn end_use(&self, model: ModelId) {
        self.update(|core, now_us| core.table.handle_use_end(model, now_us));
    }

    /// Says how long a model stays loaded after its last request, without a request of its own.
    pub(crate) fn keep_alive(&self, model: ModelId, keep_alive: KeepAlive) {
        self.update(|core, _| core.table.handle_keep_alive(model, keep_alive));
    }

    /// Ends the use of models whose engine is lost.
    pub(crate) fn note_lost_engines(&self) {
        let lost = |slot: &Slot| match slot.state.as_ref()?.engine.state() {
            EngineState::Lost(reason) => Some(format!("its engine has stopped: {reason}")),
            EngineState::Ready | EngineState::Draining => None,
        };
        let lost: Vec<_> = self.lock().slots.iter().map(lost).collect();
        for (index, reason) in lost.into_iter().enumerate() {
            if let Some(reason) = reason {
                self.update(|core, _| core.table.handle_lost(ModelId(index), reason));
            }
        }
    }

    /// Writes the metrics of all models, those of unloaded ones included.
    pub(crate) fn encode_metrics(&self, text: &mut String) -> fmt::Result {
        let slots: Vec<_> = {
            let core = self.lock();
            let metrics = |slot: &Slot| slot.state.as_ref().map(|state| state.metrics.clone());
            let slots = core.slots.iter();
            slots
                .map(|slot| (metrics(slot), slot.past_metrics.clone()))
                .collect()
        };
        if let [(Some(metrics), past)] = &*slots
            && past.is_empty()
        {
            return metrics.encode(text);
        }
        let mut sum = MetricSum::default();
        for (metrics, past) in slots {
            sum.add(&past);
            if let Some(metrics) = metrics {
                let mut now = String::new();
                metrics.encode(&mut now)?;
                sum.add(&MetricSum::of(&now));
            }
        }
        sum.write(text);
        Ok(())
    }

    /// Carries out what the loader's thread reports.
    pub(super) fn handle_planned(&self, model: ModelId, plan: Result<ModelMemory, String>) {
        self.update(|core, now_us| core.table.handle_planned(model, plan, now_us));
    }

    pub(super) fn handle_load(&self, model: ModelId, loaded: Result<Arc<ServerState>, String>) {
        self.update(|core, now_us| match loaded {
            Ok(state) => {
                core.slots[model.0].put(state);
                core.table.handle_loaded(model, now_us);
            }
            Err(reason) => core.table.handle_load_failed(model, reason, now_us),
        });
    }

    /// Returns the state of a model that is to be unloaded, and keeps the counts of its metrics.
    pub(super) fn take_state(&self, model: ModelId) -> Option<Arc<ServerState>> {
        let state = self.state(model)?;
        let mut text = String::new();
        let encoded = state.metrics.encode(&mut text);
        let mut core = self.lock();
        let slot = &mut core.slots[model.0];
        if encoded.is_ok() {
            let mut past = MetricSum::default();
            past.add(&slot.past_metrics);
            past.add(&MetricSum::of(&text).counts());
            slot.past_metrics = Arc::new(past);
        }
        slot.state = None;
        Some(state)
    }

    pub(super) fn handle_unloaded(&self, model: ModelId) {
        self.update(|core, now_us| {
            core.slots[model.0].num_unloads += 1;
            core.table.handle_unloaded(model, now_us);
        });
    }

    /// The model stays as it is, because its memory is not free.
    pub(super) fn handle_stuck(&self, model: ModelId) {
        self.update(|core, _| core.slots[model.0].is_stuck = true);
    }

    /// Waits for the next action, for the loader's thread. Returns `None` when the set is closed.
    pub(super) fn next_action(&self) -> Option<ModelAction> {
        loop {
            // A deadline may have passed.
            self.update(|_, _| ());
            let mut core = self.lock();
            if core.is_closed {
                return None;
            }
            if let Some(action) = core.actions.pop_front() {
                return Some(action);
            }
            let deadline_us = core.table.next_deadline().unwrap_or(u64::MAX);
            core.wakes_us = deadline_us;
            let left = Duration::from_micros(deadline_us.saturating_sub(self.now_us()));
            let waited = self.0.work.wait_timeout(core, left.min(LONGEST_WAIT));
            let (mut core, _) = waited.unwrap_or_else(PoisonError::into_inner);
            core.wakes_us = 0;
        }
    }

    /// Reports a fact to the table, and passes on what follows from it.
    fn update<T>(&self, change: impl FnOnce(&mut Core, u64) -> T) -> T {
        let mut answers = Vec::new();
        let mut core = self.lock();
        let now_us = self.now_us();
        let value = change(&mut core, now_us);
        while let Some(action) = core.table.poll_action(now_us) {
            core.actions.push_back(action);
        }
        while let Some(answer) = core.table.poll_answer() {
            let state = core.slots[answer.model.0].state.clone();
            // A wait that has ended has no answer.
            if let Some(wait) = core.waits.remove(&answer.ticket) {
                answers.push((wait, answer, state));
            }
        }
        let deadline_us = core.table.next_deadline();
        if !core.actions.is_empty() || deadline_us.is_some_and(|at_us| at_us < core.wakes_us) {
            self.0.work.notify_one();
        }
        drop(core);
        self.0.num_updates.send_modify(|num| *num += 1);
        // A use that its request no longer takes ends at once, which takes the lock.
        for (wait, answer, state) in answers {
            let outcome = answer.outcome.map(|()| {
                let state = state.expect("a model can be used that is not loaded");
                ModelUse::new(self.clone(), answer.model, state)
            });
            drop(wait.send(outcome));
        }
        value
    }

    /// The error says that the server drains.
    async fn wait_until(&self, is_so: impl Fn(&Core) -> bool) -> Result<(), ApiError> {
        let mut updates = self.0.num_updates.subscribe();
        while !is_so(&self.lock()) {
            tokio::select! {
                // The sender is part of `self`, so it outlives the wait.
                _ = updates.changed() => {}
                () = self.parts().draining() => return Err(ApiError::draining()),
            }
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.0.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.0.begin.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

/// Condition variables cannot wait for any time that a clock can show.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 3600);

impl Slot {
    fn put(&mut self, state: Arc<ServerState>) {
        let served = &state.served;
        let template = served.chat_template.as_ref();
        let config = state.config.clone();
        let card = ModelCard::of(config, &served.tokenizer, template, served.reply_format);
        self.card = Some(Arc::new(card));
        self.state = Some(state);
    }
}

/// A request that waits for its model, and gives up when it is dropped.
struct Wait<'a> {
    set: &'a ModelSet,
    model: ModelId,
    ticket: Ticket,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.set.update(|core, _| {
            core.table.handle_wait_end(self.model, self.ticket);
            core.waits.remove(&self.ticket);
        });
    }
}

impl FromRef<ModelSet> for Arc<ServerParts> {
    fn from_ref(models: &ModelSet) -> Self {
        models.parts().clone()
    }
}
