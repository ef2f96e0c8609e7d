//! Plays servers with random models and requests, against an oracle that counts bytes, uses and waits.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::time::Duration;

use super::*;

const S: u64 = 1_000_000;
const NUM_SEEDS: u64 = 1_000;
const NUM_EVENTS: usize = 250;

/// The longest durations of a run.
const MAX_PLAN_US: u64 = S / 10;
const MAX_LOAD_US: u64 = 8 * S;
const MAX_UNLOAD_US: u64 = S;
const MAX_USE_US: u64 = 6 * S;

/// Xorshift64*: the same order for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival,
    UseEnd(usize),
    GiveUp(usize, u64),
    /// The loader has carried out its first action.
    Done,
}

/// The facts about a model, kept apart from the table.
#[derive(Default)]
struct Fact {
    bytes: u64,
    is_pinned: bool,
    /// Bytes between the begin of a load and the end of the unload.
    held_bytes: u64,
    is_loading: bool,
    is_loaded: bool,
    is_lost: bool,
    /// Whether the model is to be unloaded when its uses have ended, unless the server wakes before.
    is_to_sleep: bool,
    /// The same, whether the server wakes or not.
    is_to_leave: bool,
    num_uses: u64,
    last_use_us: u64,
    keep_alive: Option<u64>,
    /// Requests are refused until then.
    refused_until_us: u64,
}

struct Run {
    table: ModelTable,
    budget_bytes: u64,
    default_keep_us: u64,
    random: Random,
    now_us: u64,
    facts: Vec<Fact>,
    /// The arrivals of waiting requests, their models, and their `keep_alive`.
    waiting: BTreeMap<u64, (usize, u64, Option<u64>)>,
    /// Actions of the loader thread, in order.
    loader: VecDeque<ModelAction>,
    events: BinaryHeap<Reverse<(u64, usize, Event)>>,
    num_events: usize,
    num_loads: u64,
    num_held: u64,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let num_models = 2 + random.below(4);
        let budget_bytes = 8 + random.below(12);
        let default_keep_us = random.below(40) * S;
        let mut facts = Vec::new();
        let mut settings = Vec::new();
        for index in 0..num_models {
            let is_pinned = random.below(8) == 0;
            facts.push(Fact {
                bytes: 1 + random.below(10),
                is_pinned,
                ..Fact::default()
            });
            settings.push(ModelSetting {
                names: vec![format!("model-{index}")],
                other_names: Vec::new(),
                adapters: Vec::new(),
                is_pinned,
                keep_alive: KeepAlive::For(Duration::from_micros(default_keep_us)),
                takes_keep_alive: true,
            });
        }
        Self {
            table: ModelTable::new(settings, budget_bytes).expect("names differ"),
            budget_bytes,
            default_keep_us,
            random,
            now_us: 0,
            facts,
            waiting: BTreeMap::new(),
            loader: VecDeque::new(),
            events: BinaryHeap::new(),
            num_events: 0,
            num_loads: 0,
            num_held: 0,
        }
    }

    fn push(&mut self, after_us: u64, event: Event) {
        self.num_events += 1;
        let at_us = self.now_us + after_us;
        self.events.push(Reverse((at_us, self.num_events, event)));
    }

    /// The longest wait of a request. When it has waited for `FAIR_WAIT_US`, at most all models are loaded before its
    /// own, each after its plan, the running uses and some unloads. Before that, its own model may have to leave, and
    /// another load may have begun.
    fn max_wait_us(&self) -> u64 {
        let num_models = self.facts.len() as u64;
        let turn_us = MAX_PLAN_US + MAX_USE_US + 2 * num_models * MAX_UNLOAD_US + MAX_LOAD_US;
        FAIR_WAIT_US + (num_models + 2) * turn_us
    }

    fn arrive(&mut self) {
        let index = self.random.below(self.facts.len() as u64) as usize;
        let model = ModelId(index);
        match self.random.below(60) {
            0 => self.lose(index),
            1 => {
                self.table.handle_keep_alive(model, KeepAlive::NONE);
                self.facts[index].keep_alive = Some(0);
            }
            2 => {
                self.table.handle_sleep(1);
                for index in 0..self.facts.len() {
                    self.note_sleep(index);
                }
            }
            3 => {
                self.table.handle_wake(self.now_us);
                for fact in &mut self.facts {
                    fact.is_to_sleep = false;
                }
            }
            4 => self.ask_load(index),
            5 => self.ask_unload(index),
            _ => self.request(index),
        }
    }

    fn lose(&mut self, index: usize) {
        self.table
            .handle_lost(ModelId(index), "the engine is lost".to_owned());
        let is_unloading = self.loader_unloads(index);
        let fact = &mut self.facts[index];
        fact.is_lost |= fact.is_loaded && !is_unloading;
    }

    fn loader_unloads(&self, index: usize) -> bool {
        let mut actions = self.loader.iter();
        actions.any(|action| matches!(action, ModelAction::Unload(model, _) if model.0 == index))
    }

    fn note_sleep(&mut self, index: usize) {
        let is_unloading = self.loader_unloads(index);
        let fact = &mut self.facts[index];
        fact.is_to_sleep |= (fact.is_loaded || fact.is_loading) && !is_unloading;
    }

    fn ask_load(&mut self, index: usize) {
        let asked = self.table.handle_load_asked(ModelId(index), self.now_us);
        if asked.is_ok() && !self.loader_unloads(index) {
            let fact = &mut self.facts[index];
            (fact.is_to_sleep, fact.is_to_leave) = (false, false);
        }
    }

    fn ask_unload(&mut self, index: usize) {
        let is_unloading = self.loader_unloads(index);
        let fact = &mut self.facts[index];
        let is_there = fact.is_loaded || fact.is_loading;
        fact.is_to_leave |= is_there && !is_unloading;
        let is_something = self.table.handle_unload_asked(ModelId(index));
        assert!(is_something || !is_there, "it is not unloaded");
    }

    fn request(&mut self, index: usize) {
        let keep_us = match self.random.below(10) {
            0 => Some(0),
            1 => Some(5 * S),
            2 => Some(u64::MAX),
            _ => None,
        };
        let keep_alive = keep_us.map(|us| match us {
            u64::MAX => KeepAlive::Forever,
            us => KeepAlive::For(Duration::from_micros(us)),
        });
        match self
            .table
            .handle_request(ModelId(index), keep_alive, self.now_us)
        {
            Admission::Ready => {
                let fact = &self.facts[index];
                assert!(!fact.is_to_sleep && !fact.is_to_leave);
                self.begin_use(index, keep_us);
            }
            Admission::Wait(Ticket(ticket)) => {
                if self.facts[index].is_loaded {
                    self.num_held += 1;
                }
                let request = (index, self.now_us, keep_us);
                let before = self.waiting.insert(ticket, request);
                assert!(before.is_none(), "a ticket is used twice");
                if self.random.below(8) == 0 {
                    let after_us = self.random.below(15 * S);
                    self.push(after_us, Event::GiveUp(index, ticket));
                }
            }
            Admission::Refused(error) => self.check_refused(index, &error),
        }
    }

    fn begin_use(&mut self, index: usize, keep_us: Option<u64>) {
        assert!(self.facts[index].is_loaded, "an unloaded model is used");
        assert!(!self.loader_unloads(index), "a leaving model is used");
        let fact = &mut self.facts[index];
        assert!(!fact.is_lost, "a lost engine is used");
        fact.num_uses += 1;
        fact.last_use_us = self.now_us;
        fact.keep_alive = keep_us.or(fact.keep_alive);
        let use_us = self.random.below(MAX_USE_US);
        self.push(use_us, Event::UseEnd(index));
    }

    fn check_refused(&self, index: usize, error: &LoadError) {
        let fact = &self.facts[index];
        if let LoadError::TooLarge { .. } = error {
            let pinned = self.facts.iter().filter(|fact| fact.is_pinned);
            let pinned_bytes: u64 = pinned.map(|fact| fact.bytes).sum();
            assert!(fact.bytes + pinned_bytes > self.budget_bytes);
            return;
        }
        assert!(
            fact.is_lost || self.now_us < fact.refused_until_us,
            "model {index} is refused without a reason: {error}"
        );
    }

    /// The loader carries out its first action.
    fn finish_action(&mut self) {
        let action = self.loader.pop_front().expect("an action has ended");
        let now_us = self.now_us;
        let fails = self.random.below(12) == 0;
        match action {
            ModelAction::Plan(model) if fails => {
                self.facts[model.0].refused_until_us = now_us + 30 * S;
                let reason = "no such folder".to_owned();
                self.table.handle_planned(model, Err(reason), now_us);
            }
            ModelAction::Plan(model) => {
                let plan = ModelMemory {
                    kv_pool: self.facts[model.0].bytes,
                    ..ModelMemory::default()
                };
                self.table.handle_planned(model, Ok(plan), now_us);
            }
            ModelAction::Load(model) if fails => {
                let fact = &mut self.facts[model.0];
                fact.refused_until_us = now_us + 30 * S;
                fact.held_bytes = 0;
                fact.is_loading = false;
                (fact.is_to_sleep, fact.is_to_leave) = (false, false);
                let reason = "a tensor is missing".to_owned();
                self.table.handle_load_failed(model, reason, now_us);
            }
            ModelAction::Load(model) => {
                let fact = &mut self.facts[model.0];
                (fact.is_loading, fact.is_loaded) = (false, true);
                fact.last_use_us = now_us;
                self.table.handle_loaded(model, now_us);
            }
            ModelAction::Unload(model, _) => {
                let fact = &mut self.facts[model.0];
                fact.is_loaded = false;
                fact.held_bytes = 0;
                if std::mem::take(&mut fact.is_lost) {
                    fact.refused_until_us = now_us + 30 * S;
                }
                self.table.handle_unloaded(model, now_us);
            }
        }
        self.start_loader();
    }

    fn start_loader(&mut self) {
        let max_us = match self.loader.front() {
            None => return,
            Some(ModelAction::Plan(_)) => MAX_PLAN_US,
            Some(ModelAction::Load(_)) => MAX_LOAD_US,
            Some(ModelAction::Unload(..)) => MAX_UNLOAD_US,
        };
        let after_us = self.random.below(max_us);
        self.push(after_us, Event::Done);
    }

    fn take_actions(&mut self) {
        while let Some(action) = self.table.poll_action(self.now_us) {
            match &action {
                ModelAction::Plan(_) => {}
                ModelAction::Load(model) => self.check_load(model.0),
                ModelAction::Unload(model, reason) => self.check_unload(model.0, reason),
            }
            self.loader.push_back(action);
            if self.loader.len() == 1 {
                self.start_loader();
            }
        }
        while let Some(answer) = self.table.poll_answer() {
            let index = answer.model.0;
            let waited = self.waiting.remove(&answer.ticket.0);
            let (model, _, keep_us) = waited.expect("an answer belongs to a waiting request");
            assert_eq!(model, index);
            match answer.outcome {
                Ok(()) => self.begin_use(index, keep_us),
                Err(error) => self.note_refused(index, &error),
            }
        }
    }

    fn check_load(&mut self, index: usize) {
        self.num_loads += 1;
        let is_loading = self.facts.iter().any(|fact| fact.is_loading);
        assert!(!is_loading, "two models are loaded at once");
        let fact = &mut self.facts[index];
        assert!(fact.held_bytes == 0, "a loaded model is loaded");
        fact.is_loading = true;
        fact.keep_alive = None;
        fact.held_bytes = fact.bytes;
        let held_bytes: u64 = self.facts.iter().map(|fact| fact.held_bytes).sum();
        assert!(held_bytes <= self.budget_bytes, "the budget is exceeded");
    }

    fn check_unload(&mut self, index: usize, reason: &UnloadReason) {
        let fact = &self.facts[index];
        assert!(fact.is_loaded && !self.loader_unloads(index));
        assert_eq!(fact.num_uses, 0, "a model in use is unloaded");
        match reason {
            UnloadReason::Idle { .. } => {
                assert!(!fact.is_pinned, "a pinned model is unloaded");
                assert!(self.expires_us(index) <= self.now_us, "unloaded too soon");
            }
            UnloadReason::Room { of } => {
                assert!(!fact.is_pinned, "a pinned model is unloaded");
                assert_eq!(self.facts[of.0].held_bytes, 0, "a loaded model needs room");
                self.check_victim(index);
            }
            UnloadReason::Lost => assert!(fact.is_lost),
            UnloadReason::Sleep { .. } => assert!(fact.is_to_sleep),
            UnloadReason::Asked => assert!(fact.is_to_leave),
        }
        let fact = &mut self.facts[index];
        (fact.is_to_sleep, fact.is_to_leave) = (false, false);
    }

    /// No idle model whose last use is longer ago would have freed as much.
    fn check_victim(&self, index: usize) {
        let victim = &self.facts[index];
        for (other, fact) in self.facts.iter().enumerate() {
            let could_go = fact.is_loaded && fact.num_uses == 0 && !fact.is_pinned;
            let is_older = fact.last_use_us < victim.last_use_us;
            let stays = !self.loader_unloads(other);
            let is_queued =
                self.table.actions.iter().any(
                    |action| matches!(action, ModelAction::Unload(model, _) if model.0 == other),
                );
            assert!(
                !(could_go && is_older && stays && !is_queued && fact.bytes >= victim.bytes),
                "model {index} is unloaded instead of {other}"
            );
        }
    }

    fn expires_us(&self, index: usize) -> u64 {
        let fact = &self.facts[index];
        let keep_us = fact.keep_alive.unwrap_or(self.default_keep_us);
        fact.last_use_us.saturating_add(keep_us)
    }

    fn note_refused(&mut self, index: usize, error: &LoadError) {
        if let LoadError::TooLarge { .. } = error {
            let bytes = self.facts[index].bytes;
            let lasting_bytes = self.lasting_bytes();
            assert!(bytes + lasting_bytes > self.budget_bytes, "{bytes} fit");
        }
        self.check_refused(index, error);
    }

    /// The bytes of the pinned models that stay loaded.
    fn lasting_bytes(&self) -> u64 {
        let stays = |index: &usize| {
            let fact = &self.facts[*index];
            let is_to_go = fact.is_lost || fact.is_to_sleep || fact.is_to_leave;
            let is_left = is_to_go || self.loader_unloads(*index);
            fact.is_pinned && !is_left
        };
        let lasting = (0..self.facts.len()).filter(stays);
        lasting.map(|index| self.facts[index].held_bytes).sum()
    }

    /// Checks a moment at which the table has no action left.
    fn check(&self) {
        self.table.check_invariants(self.now_us);
        let max_wait_us = self.max_wait_us();
        for (ticket, (model, since_us, _)) in &self.waiting {
            let wait_us = self.now_us - since_us;
            assert!(
                wait_us <= max_wait_us,
                "request {ticket} of model {model} has waited for {wait_us} µs"
            );
        }
        for (index, fact) in self.facts.iter().enumerate() {
            let is_idle = fact.is_loaded && fact.num_uses == 0 && !fact.is_pinned;
            let is_wanted = self.waiting.values().any(|(model, ..)| *model == index);
            assert!(
                !is_idle
                    || is_wanted
                    || self.loader_unloads(index)
                    || self.expires_us(index) > self.now_us,
                "model {index} stays although it has expired"
            );
            let ModelStatus::Loaded { num_uses, .. } = self.table.status(ModelId(index)) else {
                continue;
            };
            assert_eq!(num_uses as u64, fact.num_uses, "uses of model {index}");
        }
    }

    fn play(&mut self) {
        let mut num_arrivals = NUM_EVENTS;
        let max_gap_us = [S / 10, S, 10 * S][self.random.below(3) as usize];
        self.push(0, Event::Arrival);
        loop {
            self.take_actions();
            self.check();
            let next_us = self.events.peek().map(|Reverse((at_us, ..))| *at_us);
            let deadline_us = self.table.next_deadline();
            if let Some(deadline_us) = deadline_us
                && next_us.is_none_or(|next_us| deadline_us < next_us)
            {
                assert!(deadline_us > self.now_us, "a deadline stays");
                self.now_us = deadline_us;
                continue;
            }
            let Some(Reverse((at_us, _, event))) = self.events.pop() else {
                break;
            };
            self.now_us = at_us;
            match event {
                Event::Arrival => {
                    self.arrive();
                    num_arrivals -= 1;
                    if num_arrivals > 0 {
                        let after_us = self.random.below(max_gap_us);
                        self.push(after_us, Event::Arrival);
                    }
                }
                Event::UseEnd(index) => {
                    self.facts[index].num_uses -= 1;
                    self.facts[index].last_use_us = at_us;
                    self.table.handle_use_end(ModelId(index), at_us);
                }
                Event::GiveUp(index, ticket) => {
                    let waits = self.waiting.remove(&ticket).is_some();
                    let ended = self.table.handle_wait_end(ModelId(index), Ticket(ticket));
                    assert_eq!(ended, waits);
                }
                Event::Done => self.finish_action(),
            }
        }
        assert!(self.waiting.is_empty(), "a request has no answer");
        assert!(self.loader.is_empty(), "an action has not ended");
    }
}

#[test]
fn no_request_is_lost_and_no_byte_is_given_twice() {
    let (mut num_loads, mut num_held) = (0, 0);
    for seed in 0..NUM_SEEDS {
        let mut run = Run::new(seed);
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.play()));
        if let Err(panic) = played {
            eprintln!("seed {seed}, at {} µs", run.now_us);
            std::panic::resume_unwind(panic);
        }
        num_loads += run.num_loads;
        num_held += run.num_held;
    }
    // The runs reach what they are to test.
    assert!(num_loads > 20 * NUM_SEEDS, "{num_loads} loads");
    assert!(num_held > NUM_SEEDS, "{num_held} requests were held");
}
