//! One model of the table: its state, and the requests that wait for it.

use std::collections::VecDeque;

use super::{Answer, LoadError, ModelSetting, ModelStatus, Ticket, UnloadReason};
use crate::config::keep_alive::KeepAlive;
use crate::model_set::model_loader::{ModelId, ModelMemory};

pub struct ModelEntry {
    pub setting: ModelSetting,
    pub state: State,
    /// The latest `keep_alive` of a request since the load, or the model's.
    keep_alive: KeepAlive,
    /// In order of arrival.
    pub waiting: VecDeque<Waiting>,
    /// The model is to be unloaded when its uses have ended. Later requests wait for the next load.
    pub unload: Option<UnloadReason>,
    /// Whether the model was loaded when the server was put to sleep.
    pub wakes: bool,
}

pub enum State {
    Unloaded,
    /// The loader plans the model's memory.
    Planning,
    /// The model waits for room, or for the end of another load.
    Planned(ModelMemory),
    Loading {
        memory: ModelMemory,
        since_us: u64,
    },
    Loaded(Loaded),
    Unloading {
        memory: ModelMemory,
        /// Why the model cannot be used afterwards.
        error: Option<LoadError>,
    },
    Failed {
        error: LoadError,
        retry_us: u64,
    },
}

pub struct Loaded {
    memory: ModelMemory,
    num_uses: usize,
    /// The last time at which a use began or ended. A load counts as a use.
    last_use_us: u64,
    /// Why the engine is lost.
    error: Option<LoadError>,
}

pub struct Waiting {
    pub ticket: Ticket,
    pub since_us: u64,
    pub keep_alive: Option<KeepAlive>,
    /// Without a request, the operator has asked for the load.
    pub is_request: bool,
}

impl State {
    pub fn is_loading(&self) -> bool {
        matches!(self, Self::Loading { .. })
    }
}

impl ModelEntry {
    pub fn new(setting: ModelSetting) -> Self {
        Self {
            keep_alive: setting.keep_alive,
            setting,
            state: State::Unloaded,
            waiting: VecDeque::new(),
            unload: None,
            wakes: false,
        }
    }

    pub fn status(&self) -> ModelStatus {
        match &self.state {
            State::Unloaded if self.waiting.is_empty() => ModelStatus::Unloaded,
            State::Unloaded | State::Planning | State::Planned(_) => ModelStatus::Waiting,
            State::Loading { memory, since_us } => ModelStatus::Loading {
                memory: *memory,
                since_us: *since_us,
            },
            State::Loaded(loaded) => ModelStatus::Loaded {
                memory: loaded.memory,
                num_uses: loaded.num_uses,
                last_use_us: loaded.last_use_us,
                expires_us: self.expires_us(),
            },
            State::Unloading { .. } => ModelStatus::Unloading,
            State::Failed { error, retry_us } => ModelStatus::Failed {
                error: error.clone(),
                retry_us: *retry_us,
            },
        }
    }

    /// Returns why requests are refused, if they are.
    pub fn error(&self) -> Option<&LoadError> {
        match &self.state {
            State::Loaded(loaded) => loaded.error.as_ref(),
            State::Unloading { error, .. } => error.as_ref(),
            State::Failed { error, .. } => Some(error),
            _ => None,
        }
    }

    /// Makes another load possible if a failed one is long ago.
    pub fn forget_failure(&mut self, now_us: u64) {
        if matches!(self.state, State::Failed { retry_us, .. } if retry_us <= now_us) {
            self.state = State::Unloaded;
        }
    }

    pub fn takes_requests(&self) -> bool {
        matches!(self.state, State::Loaded(_)) && self.unload.is_none()
    }

    pub fn waits_for_load(&self) -> bool {
        let has_not_begun = matches!(
            self.state,
            State::Unloaded | State::Planning | State::Planned(_)
        );
        has_not_begun && !self.waiting.is_empty()
    }

    pub fn is_idle(&self) -> bool {
        matches!(&self.state, State::Loaded(loaded) if loaded.num_uses == 0)
    }

    pub fn is_evictable(&self) -> bool {
        self.takes_requests() && !self.setting.is_pinned
    }

    fn is_there(&self) -> bool {
        self.state.is_loading() || matches!(self.state, State::Loaded(_))
    }

    pub fn is_unloading(&self) -> bool {
        matches!(self.state, State::Unloading { .. })
    }

    /// Returns whether the model's memory stays in use, however much room others need.
    pub fn is_lasting(&self) -> bool {
        self.is_there() && self.setting.is_pinned && self.unload.is_none()
    }

    pub fn planned_bytes(&self) -> u64 {
        match &self.state {
            State::Loading { memory, .. } | State::Unloading { memory, .. } => memory.total(),
            State::Loaded(loaded) => loaded.memory.total(),
            _ => 0,
        }
    }

    pub fn last_use_us(&self) -> u64 {
        match &self.state {
            State::Loaded(loaded) => loaded.last_use_us,
            _ => 0,
        }
    }

    /// Returns when an idle model is unloaded, if it is.
    pub fn expires_us(&self) -> Option<u64> {
        let KeepAlive::For(duration) = self.keep_alive else {
            return None;
        };
        let is_due = self.is_idle() && self.waiting.is_empty() && !self.setting.is_pinned;
        let idle_us = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        is_due.then(|| self.last_use_us().saturating_add(idle_us))
    }

    /// Returns why the model is to be unloaded now, if it is.
    pub fn due_unload(&self, now_us: u64) -> Option<UnloadReason> {
        if !self.is_idle() {
            return None;
        }
        let idle_us = now_us.saturating_sub(self.last_use_us());
        let has_expired = self.expires_us().is_some_and(|at_us| at_us <= now_us);
        self.unload
            .or_else(|| has_expired.then_some(UnloadReason::Idle { idle_us }))
    }

    /// Returns whether the model will be unloaded for this reason: it is loaded or being loaded, and no stronger reason
    /// came before.
    pub fn ask_unload(&mut self, reason: UnloadReason) -> bool {
        let is_first = matches!(self.unload, None | Some(UnloadReason::Sleep { .. }));
        let is_asked = self.is_there() && is_first;
        if is_asked {
            self.unload = Some(reason);
        }
        is_asked
    }

    /// Cancels an unload that the operator has asked for. Returns whether there was one.
    pub fn keep(&mut self) -> bool {
        let was_asked = matches!(
            self.unload,
            Some(UnloadReason::Sleep { .. } | UnloadReason::Asked)
        );
        if was_asked {
            self.unload = None;
            self.wakes = false;
        }
        was_asked
    }

    /// Forgets that the operator has asked for a load. Returns whether it had not begun.
    pub fn give_up_asked_load(&mut self) -> bool {
        let num_waiting = self.waiting.len();
        self.waiting.retain(|waiting| waiting.is_request);
        self.wakes = false;
        self.waiting.len() < num_waiting
    }

    pub fn begin_load(&mut self, memory: ModelMemory, now_us: u64) {
        self.state = State::Loading {
            memory,
            since_us: now_us,
        };
        self.keep_alive = self.setting.keep_alive;
        self.wakes = false;
    }

    /// The load has ended.
    pub fn begin(&mut self, now_us: u64) {
        let State::Loading { memory, .. } = self.state else {
            unreachable!("a model is loaded that was not being loaded");
        };
        self.state = State::Loaded(Loaded {
            memory,
            num_uses: 0,
            last_use_us: now_us,
            error: None,
        });
    }

    pub fn change_keep_alive(&mut self, keep_alive: KeepAlive) {
        if self.setting.takes_keep_alive {
            self.keep_alive = keep_alive;
        }
    }

    pub fn begin_use(&mut self, request: &Waiting, now_us: u64) {
        if let Some(keep_alive) = request.keep_alive {
            self.change_keep_alive(keep_alive);
        }
        let State::Loaded(loaded) = &mut self.state else {
            unreachable!("a request uses a model that is not loaded");
        };
        loaded.num_uses += 1;
        loaded.last_use_us = now_us;
    }

    pub fn end_use(&mut self, now_us: u64) {
        let State::Loaded(loaded) = &mut self.state else {
            unreachable!("a use outlives its model");
        };
        loaded.num_uses -= 1;
        loaded.last_use_us = now_us;
    }

    pub fn admit_waiting(&mut self, model: ModelId, now_us: u64, answers: &mut VecDeque<Answer>) {
        while let Some(request) = self.waiting.pop_front() {
            if request.is_request {
                self.begin_use(&request, now_us);
                answers.push_back(request.answer(model, Ok(())));
            }
        }
    }

    pub fn refuse_waiting(
        &mut self,
        model: ModelId,
        error: &LoadError,
        answers: &mut VecDeque<Answer>,
    ) {
        let requests = self.waiting.drain(..).filter(|request| request.is_request);
        answers.extend(requests.map(|request| request.answer(model, Err(error.clone()))));
    }

    /// Notes that the engine is lost. Returns whether the model is loaded: if it is not, the engine is an earlier one.
    pub fn lose(&mut self, error: &LoadError) -> bool {
        let State::Loaded(loaded) = &mut self.state else {
            return false;
        };
        loaded.error = Some(error.clone());
        self.unload = Some(UnloadReason::Lost);
        true
    }

    pub fn begin_unload(&mut self) {
        let State::Loaded(loaded) = &mut self.state else {
            unreachable!("a model is unloaded that is not loaded");
        };
        assert_eq!(loaded.num_uses, 0, "a model in use is unloaded");
        self.state = State::Unloading {
            memory: loaded.memory,
            error: loaded.error.take(),
        };
        self.unload = None;
    }

    /// The unload has ended. Returns why the model cannot be used afterwards, if it cannot.
    pub fn end(&mut self) -> Option<LoadError> {
        let State::Unloading { error, .. } = &mut self.state else {
            unreachable!("a model was unloaded unasked");
        };
        let error = error.take();
        self.state = State::Unloaded;
        error
    }

    pub fn fail(&mut self, error: LoadError, retry_us: u64) {
        self.state = State::Failed { error, retry_us };
        self.unload = None;
        self.wakes = false;
    }

    #[cfg(test)]
    pub fn check_invariants(&self) {
        let tickets = self.waiting.iter().map(|request| request.ticket);
        assert!(tickets.is_sorted_by(|a, b| a < b), "tickets are in order");
        assert!(
            self.is_there() || self.unload.is_none(),
            "nothing to unload"
        );
        match &self.state {
            State::Planned(_) => assert!(!self.waiting.is_empty(), "a plan without a request"),
            State::Failed { .. } => assert!(self.waiting.is_empty(), "a request waits in vain"),
            State::Loaded(loaded) if loaded.error.is_some() => {
                assert!(self.waiting.is_empty(), "a request waits for a lost engine");
                assert_eq!(self.unload, Some(UnloadReason::Lost));
            }
            _ => {}
        }
    }
}

impl Waiting {
    fn answer(&self, model: ModelId, outcome: Result<(), LoadError>) -> Answer {
        Answer {
            model,
            ticket: self.ticket,
            outcome,
        }
    }
}
