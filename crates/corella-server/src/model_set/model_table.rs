//! Decides which models are loaded, and which requests wait for them.

mod model_entry;
#[cfg(test)]
mod random_test;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fmt;

use crate::config::keep_alive::KeepAlive;
use crate::model_set::model_loader::{Bytes, ModelId, ModelMemory};
use model_entry::{ModelEntry, State, Waiting};

/// A model that could not be loaded is tried again no earlier.
const RETRY_US: u64 = 30_000_000;

/// A model whose first request has waited this long for room is loaded before all later ones, and the loaded models get
/// no further requests until there is room. A load that the operator has asked for waits as long as it takes, because
/// it has no time limit.
const FAIR_WAIT_US: u64 = 10_000_000;

/// Limits the models that requests add.
const MAX_ADDED_MODELS: usize = 256;

/// The models of a server, and the requests that use them or wait for them.
///
/// The table has no clock and starts nothing: facts come in by `handle_*`, with the time. After every call, and at
/// [`next_deadline`](Self::next_deadline), the driver takes actions from [`poll_action`](Self::poll_action) and answers
/// from [`poll_answer`](Self::poll_answer) until both return `None`. It carries actions out in order, and reports the
/// end of each.
///
/// A model's planned bytes count from [`ModelAction::Load`] to [`handle_unloaded`](Self::handle_unloaded), and never
/// exceed the budget in sum. The driver limits the number of waiting requests: each has a connection.
pub struct ModelTable {
    budget_bytes: u64,
    models: Vec<ModelEntry>,
    num_added: usize,
    num_tickets: u64,
    actions: VecDeque<ModelAction>,
    answers: VecDeque<Answer>,
    is_asleep: bool,
}

/// A model of the table, as the operator has configured it.
#[derive(Clone, Debug)]
pub struct ModelSetting {
    /// The first name is the model's; the others are aliases. No other model may have any of them.
    pub names: Vec<String>,
    /// Further accepted names. If several models have one, the table leaves it to the first of them, and to a model that
    /// is named so.
    pub other_names: Vec<String>,
    /// The adapters that are loaded with the model. No other model or adapter has any of these names.
    pub adapters: Vec<String>,
    /// A pinned model is neither evicted nor unloaded when it is idle.
    pub is_pinned: bool,
    pub keep_alive: KeepAlive,
    /// Whether requests may ask for another `keep_alive`, which holds until the model is unloaded.
    pub takes_keep_alive: bool,
}

/// A waiting request. Tickets are numbered in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

#[derive(Clone, Debug, PartialEq)]
pub enum Admission {
    /// The request uses the model until [`ModelTable::handle_use_end`].
    Ready,
    /// The request waits for its [`Answer`].
    Wait(Ticket),
    Refused(LoadError),
}

/// The end of a request's wait.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub model: ModelId,
    pub ticket: Ticket,
    /// With `Ok`, the request uses the model until [`ModelTable::handle_use_end`].
    pub outcome: Result<(), LoadError>,
}

/// The reason why a model cannot be used.
#[derive(Clone, Debug, PartialEq)]
pub enum LoadError {
    /// The text of the loader, or of a lost engine.
    Failed(String),
    /// The model exceeds `room_bytes`: the budget without the pinned models that are loaded.
    TooLarge {
        memory: ModelMemory,
        room_bytes: u64,
    },
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(reason) => f.write_str(reason),
            Self::TooLarge { memory, room_bytes } => write!(
                f,
                "it needs {memory}, and --model-memory leaves {} to models that are not pinned",
                Bytes(*room_bytes)
            ),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelAction {
    /// Ends with [`ModelTable::handle_planned`].
    Plan(ModelId),
    /// Ends with [`ModelTable::handle_loaded`] or [`ModelTable::handle_load_failed`].
    Load(ModelId),
    /// Ends with [`ModelTable::handle_unloaded`], when the memory is free.
    Unload(ModelId, UnloadReason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnloadReason {
    /// The model had no use for this long.
    Idle { idle_us: u64 },
    /// Another model needs the room.
    Room { of: ModelId },
    /// The server was put to sleep, at this level.
    Sleep { level: u8 },
    /// The operator has asked for it.
    Asked,
    /// The model's engine is lost.
    Lost,
}

/// A model's state, for lists.
#[derive(Clone, Debug, PartialEq)]
pub enum ModelStatus {
    Unloaded,
    /// Requests wait for the model, whose load has not begun.
    Waiting,
    Loading {
        memory: ModelMemory,
        since_us: u64,
    },
    Loaded {
        memory: ModelMemory,
        num_uses: usize,
        last_use_us: u64,
        /// `None` while the model is in use, or stays loaded.
        expires_us: Option<u64>,
    },
    Unloading,
    /// Requests are refused until `retry_us`.
    Failed {
        error: LoadError,
        retry_us: u64,
    },
}

impl ModelTable {
    /// The error names a name that two models have.
    pub fn new(mut settings: Vec<ModelSetting>, budget_bytes: u64) -> Result<Self, String> {
        let mut known: Vec<String> = Vec::new();
        for name in settings.iter().flat_map(|setting| &setting.names) {
            if known.contains(name) {
                return Err(format!("two models are named `{name}`"));
            }
            known.push(name.clone());
        }
        for setting in &mut settings {
            let ModelSetting {
                names, other_names, ..
            } = setting;
            other_names.retain(|name| names.contains(name) || !known.contains(name));
            known.extend_from_slice(other_names);
        }
        Ok(Self {
            budget_bytes,
            models: settings.into_iter().map(ModelEntry::new).collect(),
            num_added: 0,
            num_tickets: 0,
            actions: VecDeque::new(),
            answers: VecDeque::new(),
            is_asleep: false,
        })
    }

    /// Adds a model that a request has named. Names that other models have stay theirs. Returns `None` if requests have
    /// added too many models.
    pub fn add(&mut self, mut setting: ModelSetting) -> Option<ModelId> {
        let known = setting.names.iter().find_map(|name| self.find_named(name));
        if known.is_some() || self.num_added == MAX_ADDED_MODELS {
            return known;
        }
        setting.other_names.retain(|name| self.find(name).is_none());
        self.num_added += 1;
        self.models.push(ModelEntry::new(setting));
        Some(ModelId(self.models.len() - 1))
    }

    /// Returns the model that has `name` as one of its names, which short names are not.
    pub fn find_named(&self, name: &str) -> Option<ModelId> {
        let mut models = self.models.iter();
        let position = models.position(|model| model.setting.names.iter().any(|own| own == name));
        position.map(ModelId)
    }

    /// Returns the model with this name, with this adapter, or with this other name.
    pub fn find(&self, name: &str) -> Option<ModelId> {
        let having = |names: fn(&ModelSetting) -> &Vec<String>| {
            let mut models = self.models.iter();
            let is_it =
                |model: &ModelEntry| names(&model.setting).iter().any(|known| known == name);
            models.position(is_it).map(ModelId)
        };
        self.find_named(name)
            .or_else(|| having(|setting| &setting.adapters))
            .or_else(|| having(|setting| &setting.other_names))
    }

    pub fn setting(&self, model: ModelId) -> &ModelSetting {
        &self.models[model.0].setting
    }

    pub fn status(&self, model: ModelId) -> ModelStatus {
        self.models[model.0].status()
    }

    /// A request names `model`. Without a `keep_alive`, the latest one stays in force.
    pub fn handle_request(
        &mut self,
        model: ModelId,
        keep_alive: Option<KeepAlive>,
        now_us: u64,
    ) -> Admission {
        let is_held = self.is_held(model, now_us);
        let ticket = Ticket(self.num_tickets);
        let entry = &mut self.models[model.0];
        entry.forget_failure(now_us);
        if let Some(error) = entry.error() {
            return Admission::Refused(error.clone());
        }
        let request = Waiting {
            ticket,
            since_us: now_us,
            keep_alive,
            is_request: true,
        };
        if entry.takes_requests() && !is_held {
            entry.begin_use(&request, now_us);
            return Admission::Ready;
        }
        self.num_tickets += 1;
        entry.waiting.push_back(request);
        Admission::Wait(ticket)
    }

    /// A waiting request gives up. Returns whether it was still waiting. Otherwise its answer says whether it has a use.
    pub fn handle_wait_end(&mut self, model: ModelId, ticket: Ticket) -> bool {
        let waiting = &mut self.models[model.0].waiting;
        match waiting.binary_search_by_key(&ticket, |request| request.ticket) {
            Ok(index) => waiting.remove(index).is_some(),
            Err(_) => false,
        }
    }

    pub fn handle_use_end(&mut self, model: ModelId, now_us: u64) {
        self.models[model.0].end_use(now_us);
    }

    /// The operator asks for a load, without a request. Returns `false` if the model is loaded, or will be.
    pub fn handle_load_asked(&mut self, model: ModelId, now_us: u64) -> Result<bool, LoadError> {
        let entry = &mut self.models[model.0];
        entry.forget_failure(now_us);
        if let Some(error) = entry.error() {
            return Err(error.clone());
        }
        if entry.keep() {
            self.is_asleep = false;
            return Ok(true);
        }
        if entry.state.is_loading() || !entry.waiting.is_empty() || entry.takes_requests() {
            return Ok(false);
        }
        entry.waiting.push_back(Waiting {
            ticket: Ticket(self.num_tickets),
            since_us: now_us,
            keep_alive: None,
            is_request: false,
        });
        self.num_tickets += 1;
        Ok(true)
    }

    /// The operator asks for an unload, which comes when the model's uses have ended. Returns whether there is
    /// anything to unload, or a load to give up. Waiting requests load the model all the same.
    pub fn handle_unload_asked(&mut self, model: ModelId) -> bool {
        let gives_up = self.models[model.0].give_up_asked_load();
        self.models[model.0].ask_unload(UnloadReason::Asked);
        gives_up || self.has_pending_unload(model)
    }

    /// A request says how long a model stays, and does not use it. A model that is not loaded is left so.
    pub fn handle_keep_alive(&mut self, model: ModelId, keep_alive: KeepAlive) {
        self.models[model.0].change_keep_alive(keep_alive);
    }

    /// The operator puts the server to sleep: all models are unloaded. A request wakes its model.
    pub fn handle_sleep(&mut self, level: u8) {
        self.is_asleep = true;
        for entry in &mut self.models {
            entry.wakes |= entry.ask_unload(UnloadReason::Sleep { level });
        }
    }

    /// Returns whether the model is to be unloaded when its uses have ended, or is being unloaded.
    pub fn has_pending_unload(&self, model: ModelId) -> bool {
        let entry = &self.models[model.0];
        entry.unload.is_some() || entry.is_unloading()
    }

    /// Models that the sleep has unloaded are loaded again. Returns these models.
    pub fn handle_wake(&mut self, now_us: u64) -> Vec<ModelId> {
        self.is_asleep = false;
        let mut woken = Vec::new();
        for index in 0..self.models.len() {
            let entry = &mut self.models[index];
            if !std::mem::take(&mut entry.wakes) {
                continue;
            }
            woken.push(ModelId(index));
            match entry.unload {
                Some(UnloadReason::Sleep { .. }) => entry.unload = None,
                // A model that cannot be loaded stays as it is.
                _ => drop(self.handle_load_asked(ModelId(index), now_us)),
            }
        }
        woken
    }

    /// Returns whether the server was put to sleep, and no model is loaded.
    pub fn is_asleep(&self) -> bool {
        self.is_asleep && self.models.iter().all(|entry| entry.planned_bytes() == 0)
    }

    pub fn handle_planned(
        &mut self,
        model: ModelId,
        plan: Result<ModelMemory, String>,
        now_us: u64,
    ) {
        match plan {
            Ok(memory) => self.models[model.0].state = State::Planned(memory),
            Err(reason) => self.fail(model, LoadError::Failed(reason), now_us),
        }
    }

    pub fn handle_loaded(&mut self, model: ModelId, now_us: u64) {
        let entry = &mut self.models[model.0];
        entry.begin(now_us);
        // These requests are the reason for the load, so none of them waits for fairness again.
        entry.admit_waiting(model, now_us, &mut self.answers);
    }

    pub fn handle_load_failed(&mut self, model: ModelId, reason: String, now_us: u64) {
        self.fail(model, LoadError::Failed(reason), now_us);
    }

    pub fn handle_unloaded(&mut self, model: ModelId, now_us: u64) {
        if let Some(error) = self.models[model.0].end() {
            self.fail(model, error, now_us);
        }
    }

    /// A loaded model's engine is lost. Requests of this model are refused, and it is unloaded when the running ones
    /// have ended.
    pub fn handle_lost(&mut self, model: ModelId, reason: String) {
        let error = LoadError::Failed(reason);
        let entry = &mut self.models[model.0];
        if entry.lose(&error) {
            entry.refuse_waiting(model, &error, &mut self.answers);
        }
    }

    /// Returns the next end of a wait.
    pub fn poll_answer(&mut self) -> Option<Answer> {
        self.answers.pop_front()
    }

    /// Returns the next action. It counts as begun.
    pub fn poll_action(&mut self, now_us: u64) -> Option<ModelAction> {
        self.settle(now_us);
        if self.actions.is_empty() {
            self.unload_unused(now_us);
            self.advance_loads(now_us);
            // An unload or a refusal may have ended a hold.
            self.settle(now_us);
        }
        self.actions.pop_front()
    }

    /// Returns when a model may have to be unloaded, unless something happens before.
    pub fn next_deadline(&self) -> Option<u64> {
        self.models.iter().filter_map(ModelEntry::expires_us).min()
    }

    /// Forgets plans without a waiting request, and lets requests use loaded models that are no longer held.
    fn settle(&mut self, now_us: u64) {
        for index in 0..self.models.len() {
            let is_held = self.is_held(ModelId(index), now_us);
            let entry = &mut self.models[index];
            if entry.waiting.is_empty() && matches!(entry.state, State::Planned(_)) {
                entry.state = State::Unloaded;
            }
            if entry.takes_requests() && !is_held {
                entry.admit_waiting(ModelId(index), now_us, &mut self.answers);
            }
        }
    }

    fn unload_unused(&mut self, now_us: u64) {
        for index in 0..self.models.len() {
            if let Some(reason) = self.models[index].due_unload(now_us) {
                self.begin_unload(ModelId(index), reason);
            }
        }
    }

    fn begin_unload(&mut self, model: ModelId, reason: UnloadReason) {
        self.models[model.0].begin_unload();
        self.actions.push_back(ModelAction::Unload(model, reason));
    }

    /// Plans or loads the models that requests wait for, in order of arrival. A model without room lets later ones pass,
    /// but not for long.
    fn advance_loads(&mut self, now_us: u64) {
        for (model, since_us) in self.load_queue() {
            let may_go_on = match self.models[model.0].state {
                State::Unloaded if !self.has(|state| matches!(state, State::Planning)) => {
                    self.models[model.0].state = State::Planning;
                    self.actions.push_back(ModelAction::Plan(model));
                    true
                }
                State::Planned(memory) if !self.has(State::is_loading) => {
                    self.try_load(model, memory, now_us)
                }
                _ => true,
            };
            let still_waits = self.models[model.0].waits_for_load();
            if !may_go_on || still_waits && is_old(since_us, now_us) {
                return;
            }
        }
    }

    /// Loads a model, or makes room for it, or refuses it. Returns whether a later model may be loaded before it.
    fn try_load(&mut self, model: ModelId, memory: ModelMemory, now_us: u64) -> bool {
        let needed_bytes = memory.total();
        let room_bytes = self.budget_bytes - self.lasting_bytes();
        if needed_bytes > room_bytes {
            let error = LoadError::TooLarge { memory, room_bytes };
            self.fail(model, error, now_us);
            return true;
        }
        let free_bytes = self.budget_bytes - self.planned_bytes();
        if needed_bytes <= free_bytes {
            self.is_asleep = false;
            self.models[model.0].begin_load(memory, now_us);
            self.actions.push_back(ModelAction::Load(model));
            return true;
        }
        let missing_bytes = needed_bytes.saturating_sub(self.free_soon_bytes());
        let Some(victims) = self.victims(missing_bytes) else {
            return true;
        };
        for victim in victims {
            self.begin_unload(victim, UnloadReason::Room { of: model });
        }
        false
    }

    /// Chooses idle models that free `missing_bytes` together, the least recently used first. Returns `None` if all of
    /// them are too small.
    fn victims(&self, missing_bytes: u64) -> Option<Vec<ModelId>> {
        let mut idle: Vec<_> = (0..self.models.len()).map(ModelId).collect();
        idle.retain(|model| self.models[model.0].is_idle() && self.models[model.0].is_evictable());
        idle.sort_by_key(|model| self.models[model.0].last_use_us());
        let bytes = |model: &ModelId| self.models[model.0].planned_bytes();
        let mut victims = Vec::new();
        let mut freed_bytes = 0;
        for model in idle {
            if freed_bytes >= missing_bytes {
                break;
            }
            freed_bytes += bytes(&model);
            victims.push(model);
        }
        if freed_bytes < missing_bytes {
            return None;
        }
        // A large victim may make others unnecessary. Among these, the most recently used stay loaded.
        let mut needed = Vec::new();
        for model in victims.into_iter().rev() {
            match freed_bytes - bytes(&model) >= missing_bytes {
                true => freed_bytes -= bytes(&model),
                false => needed.push(model),
            }
        }
        needed.reverse();
        Some(needed)
    }

    /// The models whose load was asked for and has not begun, in order of arrival, each with the time of its first
    /// request. A load that only the operator has asked for has none.
    fn load_queue(&self) -> Vec<(ModelId, Option<u64>)> {
        let mut queue: Vec<_> = (self.models.iter().enumerate())
            .filter(|(_, entry)| entry.waits_for_load())
            .filter_map(|(index, entry)| {
                let first = entry.waiting.front()?;
                let request = entry.waiting.iter().find(|waiting| waiting.is_request);
                let since_us = request.map(|request| request.since_us);
                Some((first.ticket, ModelId(index), since_us))
            })
            .collect();
        queue.sort_unstable();
        queue
            .into_iter()
            .map(|(_, model, since_us)| (model, since_us))
            .collect()
    }

    /// Returns whether requests of a loaded model wait until another model, which has waited for long, has room.
    fn is_held(&self, model: ModelId, now_us: u64) -> bool {
        if !self.models[model.0].is_evictable() || self.has(State::is_loading) {
            return false;
        }
        let mut queue = self.load_queue().into_iter();
        let first = queue.find(|(_, since_us)| is_old(*since_us, now_us));
        first.is_some_and(|(first, _)| {
            matches!(self.models[first.0].state, State::Planned(memory)
                if memory.total() > self.free_soon_bytes())
        })
    }

    fn fail(&mut self, model: ModelId, error: LoadError, now_us: u64) {
        let entry = &mut self.models[model.0];
        entry.refuse_waiting(model, &error, &mut self.answers);
        entry.fail(error, now_us + RETRY_US);
    }

    fn has(&self, is_such: impl Fn(&State) -> bool) -> bool {
        self.models.iter().any(|entry| is_such(&entry.state))
    }

    fn planned_bytes(&self) -> u64 {
        self.models.iter().map(ModelEntry::planned_bytes).sum()
    }

    /// The bytes that no unload makes free: those of pinned models.
    fn lasting_bytes(&self) -> u64 {
        let lasting = self.models.iter().filter(|entry| entry.is_lasting());
        lasting.map(ModelEntry::planned_bytes).sum()
    }

    /// The bytes that are free when all unloads have ended.
    fn free_soon_bytes(&self) -> u64 {
        let stay = (self.models.iter()).filter(|entry| !entry.is_unloading());
        self.budget_bytes - stay.map(ModelEntry::planned_bytes).sum::<u64>()
    }

    /// Panics on a defect of the table. To be called when `poll_action` has returned `None`.
    #[cfg(test)]
    fn check_invariants(&self, now_us: u64) {
        assert!(self.planned_bytes() <= self.budget_bytes, "over the budget");
        let count = |is_such: fn(&State) -> bool| {
            let states = self.models.iter().map(|entry| &entry.state);
            states.filter(|state| is_such(state)).count()
        };
        assert!(count(|state| matches!(state, State::Planning)) <= 1);
        assert!(count(State::is_loading) <= 1);
        for (index, entry) in self.models.iter().enumerate() {
            entry.check_invariants();
            let is_held = self.is_held(ModelId(index), now_us);
            assert!(
                entry.waiting.is_empty() || !entry.takes_requests() || is_held,
                "requests wait for a model that they could use"
            );
        }
    }
}

fn is_old(since_us: Option<u64>, now_us: u64) -> bool {
    since_us.is_some_and(|since_us| now_us.saturating_sub(since_us) >= FAIR_WAIT_US)
}
