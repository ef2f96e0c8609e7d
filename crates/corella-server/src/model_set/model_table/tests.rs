//! The rules of the table, one script each, in virtual time.

use std::time::Duration;

use super::*;

const S: u64 = 1_000_000;
const A: ModelId = ModelId(0);
const B: ModelId = ModelId(1);
const C: ModelId = ModelId(2);
const D: ModelId = ModelId(3);

/// A table whose models are named `a`, `b` and so on, and stay loaded for 300 s.
struct Script {
    table: ModelTable,
    bytes: Vec<u64>,
    now_us: u64,
}

fn setting(names: &[&str]) -> ModelSetting {
    ModelSetting {
        names: names.iter().map(|&name| name.to_owned()).collect(),
        other_names: Vec::new(),
        adapters: Vec::new(),
        is_pinned: false,
        keep_alive: KeepAlive::For(Duration::from_secs(300)),
        takes_keep_alive: true,
    }
}

fn memory(bytes: u64) -> ModelMemory {
    ModelMemory {
        weights: bytes,
        ..ModelMemory::default()
    }
}

fn unload_for(model: ModelId, of: ModelId) -> ModelAction {
    ModelAction::Unload(model, UnloadReason::Room { of })
}

impl Script {
    /// Models of these sizes. Those at the positions `pinned` are pinned.
    fn new(bytes: &[u64], pinned: &[usize], budget_bytes: u64) -> Self {
        let settings = (0..bytes.len()).map(|index| ModelSetting {
            is_pinned: pinned.contains(&index),
            ..setting(&[&char::from(b'a' + index as u8).to_string()])
        });
        Self {
            table: ModelTable::new(settings.collect(), budget_bytes).expect("names differ"),
            bytes: bytes.to_vec(),
            now_us: 0,
        }
    }

    fn at(&mut self, now_us: u64) -> &mut Self {
        assert!(now_us >= self.now_us, "time goes on");
        self.now_us = now_us;
        self
    }

    /// Returns the actions of this moment. Plans are made at once.
    fn actions(&mut self) -> Vec<ModelAction> {
        let mut actions = Vec::new();
        while let Some(action) = self.table.poll_action(self.now_us) {
            match action {
                ModelAction::Plan(model) => {
                    let plan = memory(self.bytes[model.0]);
                    self.table.handle_planned(model, Ok(plan), self.now_us);
                }
                action => actions.push(action),
            }
        }
        self.table.check_invariants(self.now_us);
        actions
    }

    fn answers(&mut self) -> Vec<(Ticket, Result<(), LoadError>)> {
        let answers = std::iter::from_fn(|| self.table.poll_answer());
        answers
            .map(|answer| (answer.ticket, answer.outcome))
            .collect()
    }

    fn request(&mut self, model: ModelId) -> Admission {
        self.table.handle_request(model, None, self.now_us)
    }

    fn wait(&mut self, model: ModelId) -> Ticket {
        match self.request(model) {
            Admission::Wait(ticket) => ticket,
            other => panic!("{model:?} should make a request wait: {other:?}"),
        }
    }

    /// Loads a model for a request, whose use goes on.
    fn load(&mut self, model: ModelId) {
        let ticket = self.wait(model);
        assert_eq!(self.actions(), [ModelAction::Load(model)]);
        self.table.handle_loaded(model, self.now_us);
        assert_eq!(self.answers(), [(ticket, Ok(()))]);
        assert_eq!(self.actions(), []);
    }

    fn end_use(&mut self, model: ModelId) {
        self.table.handle_use_end(model, self.now_us);
    }

    fn load_idle(&mut self, model: ModelId) {
        self.load(model);
        self.end_use(model);
    }

    fn unloaded(&mut self, model: ModelId) {
        self.table.handle_unloaded(model, self.now_us);
    }

    fn is_loaded(&self, model: ModelId) -> bool {
        matches!(self.table.status(model), ModelStatus::Loaded { .. })
    }
}

#[test]
fn a_request_loads_its_model_and_later_ones_use_it() {
    let mut script = Script::new(&[5], &[], 10);
    let [first, second] = [script.wait(A), script.wait(A)];
    assert_eq!(script.table.status(A), ModelStatus::Waiting);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    let loading = ModelStatus::Loading {
        memory: memory(5),
        since_us: 0,
    };
    assert_eq!(script.table.status(A), loading);
    let third = script.wait(A);
    assert_eq!(script.actions(), []);
    script.at(3 * S).table.handle_loaded(A, 3 * S);
    let answers = [first, second, third].map(|ticket| (ticket, Ok(())));
    assert_eq!(script.answers(), answers);
    assert_eq!(script.request(A), Admission::Ready);
    let ModelStatus::Loaded { num_uses, .. } = script.table.status(A) else {
        panic!("the model is loaded");
    };
    assert_eq!(num_uses, 4);
}

#[test]
fn an_unused_model_is_unloaded_and_planned_again() {
    let mut script = Script::new(&[5], &[], 10);
    script.at(10 * S).load(A);
    // A use has no end in sight.
    assert_eq!(script.table.next_deadline(), None);
    script.at(500 * S);
    assert_eq!(script.actions(), []);
    script.end_use(A);
    assert_eq!(script.table.next_deadline(), Some(800 * S));
    script.at(800 * S - 1);
    assert_eq!(script.actions(), []);
    script.at(800 * S);
    let idle = UnloadReason::Idle { idle_us: 300 * S };
    assert_eq!(script.actions(), [ModelAction::Unload(A, idle)]);
    assert_eq!(script.table.status(A), ModelStatus::Unloading);
    script.wait(A);
    assert_eq!(script.actions(), []);
    script.unloaded(A);
    // Its files may have been replaced.
    let action = script.table.poll_action(script.now_us);
    assert_eq!(action, Some(ModelAction::Plan(A)));
}

#[test]
fn a_request_changes_how_long_its_model_stays() {
    let mut script = Script::new(&[5], &[], 10);
    let use_with = |script: &mut Script, keep_alive| {
        let admission = script.table.handle_request(A, keep_alive, script.now_us);
        assert_eq!(admission, Admission::Ready);
        script.end_use(A);
    };
    script.load_idle(A);
    use_with(&mut script, Some(KeepAlive::Forever));
    assert_eq!(script.table.next_deadline(), None);
    // A request that says nothing changes nothing.
    use_with(&mut script, None);
    assert_eq!(script.table.next_deadline(), None);
    let minute = KeepAlive::For(Duration::from_secs(60));
    use_with(&mut script, Some(minute));
    assert_eq!(script.table.next_deadline(), Some(60 * S));
    use_with(&mut script, Some(KeepAlive::For(Duration::ZERO)));
    let idle = UnloadReason::Idle { idle_us: 0 };
    assert_eq!(script.actions(), [ModelAction::Unload(A, idle)]);
    script.unloaded(A);
    // The next load begins with the operator's choice.
    script.load_idle(A);
    assert_eq!(script.table.next_deadline(), Some(300 * S));
}

#[test]
fn the_least_recently_used_idle_model_makes_room() {
    let mut script = Script::new(&[4, 4, 4, 4], &[], 12);
    for (time, model) in [(1, A), (2, B), (3, C)] {
        script.at(time * S).load_idle(model);
    }
    // A is used again, and B's use goes on, so C's last use is longest ago.
    script.at(4 * S);
    assert_eq!(script.request(B), Admission::Ready);
    script.at(5 * S);
    assert_eq!(script.request(A), Admission::Ready);
    script.end_use(A);
    let ticket = script.wait(D);
    assert_eq!(script.actions(), [unload_for(C, D)]);
    // The memory is not free before the unload has ended.
    assert_eq!(script.actions(), []);
    script.unloaded(C);
    assert_eq!(script.actions(), [ModelAction::Load(D)]);
    script.table.handle_loaded(D, script.now_us);
    assert_eq!(script.answers(), [(ticket, Ok(()))]);
    assert!(script.is_loaded(A) && script.is_loaded(B));
}

#[test]
fn only_models_whose_room_is_needed_are_unloaded() {
    let mut script = Script::new(&[1, 6, 2, 5], &[], 9);
    for (time, model) in [(1, A), (2, B), (3, C)] {
        script.at(time * S).load_idle(model);
    }
    // B alone frees 6. A is older, but its byte does not help.
    script.wait(D);
    assert_eq!(script.actions(), [unload_for(B, D)]);
}

#[test]
fn idle_models_stay_if_they_are_too_small() {
    let mut script = Script::new(&[2, 6, 7], &[], 9);
    script.load_idle(A);
    script.at(S).load(B);
    script.wait(C);
    assert_eq!(script.actions(), []);
    assert!(script.is_loaded(A));
    script.end_use(B);
    // A's use was earlier, but B alone frees enough beside the byte that is free.
    assert_eq!(script.actions(), [unload_for(B, C)]);
}

#[test]
fn a_pinned_model_stays() {
    let mut script = Script::new(&[4, 4, 4], &[0], 8);
    let now = KeepAlive::For(Duration::ZERO);
    script.load_idle(A);
    let admission = script.table.handle_request(A, Some(now), script.now_us);
    assert_eq!(admission, Admission::Ready);
    script.end_use(A);
    assert_eq!(script.table.next_deadline(), None);
    script.at(S).load_idle(B);
    script.wait(C);
    assert_eq!(script.actions(), [unload_for(B, C)]);
    // The operator can unload it.
    script.table.handle_sleep(1);
    let sleep = UnloadReason::Sleep { level: 1 };
    assert!(script.actions().contains(&ModelAction::Unload(A, sleep)));
}

#[test]
fn one_model_is_loaded_at_a_time() {
    let mut script = Script::new(&[2, 2], &[], 10);
    script.wait(A);
    script.wait(B);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    script.at(60 * S);
    assert_eq!(script.actions(), []);
    script.table.handle_loaded(A, script.now_us);
    assert_eq!(script.actions(), [ModelAction::Load(B)]);
}

#[test]
fn a_small_model_passes_a_large_one_but_not_for_long() {
    let mut script = Script::new(&[6, 8, 2, 2], &[], 10);
    script.load(A);
    script.wait(B);
    script.at(10 * S - 1);
    script.wait(C);
    assert_eq!(script.actions(), [ModelAction::Load(C)]);
    script.table.handle_loaded(C, script.now_us);
    script.at(10 * S);
    script.wait(D);
    assert_eq!(script.actions(), []);
    // C is still in use, but A frees enough.
    script.end_use(A);
    assert_eq!(script.actions(), [unload_for(A, B)]);
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(B)]);
}

#[test]
fn busy_models_give_way_to_an_old_request() {
    let mut script = Script::new(&[4, 4, 4], &[], 8);
    script.load(A);
    script.load(B);
    let waiting = script.wait(C);
    assert_eq!(script.actions(), []);
    script.at(10 * S - 1);
    assert_eq!(script.request(A), Admission::Ready);
    script.at(10 * S);
    // From now on, requests of both models wait, even if the model is idle.
    let held = script.wait(A);
    assert_eq!(script.actions(), []);
    let held_too = script.wait(B);
    script.end_use(A);
    assert_eq!((script.actions(), script.answers()), (vec![], vec![]));
    script.at(12 * S).end_use(A);
    assert_eq!(script.actions(), [unload_for(A, C)]);
    // B keeps its room, so its request goes on.
    assert_eq!(script.answers(), [(held_too, Ok(()))]);
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(C)]);
    script.table.handle_loaded(C, script.now_us);
    assert_eq!(script.answers(), [(waiting, Ok(()))]);
    // The held request has kept its place.
    let held_in_turn = script.at(20 * S).wait(B);
    script.end_use(C);
    assert_eq!(script.actions(), [unload_for(C, A)]);
    assert_eq!(script.answers(), [(held_in_turn, Ok(()))]);
    script.unloaded(C);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    script.table.handle_loaded(A, script.now_us);
    assert_eq!(script.answers(), [(held, Ok(()))]);
}

#[test]
fn busy_models_give_no_way_to_a_load_without_a_request() {
    let mut script = Script::new(&[4, 4, 2], &[], 6);
    script.load(A);
    assert_eq!(script.table.handle_load_asked(B, 0), Ok(true));
    assert_eq!(script.actions(), []);
    script.at(60 * S);
    assert_eq!(script.request(A), Admission::Ready);
    // Nor does a later model that has room wait.
    script.load_idle(C);
    // A request for the same model counts from its own arrival.
    let waiting = script.wait(B);
    assert_eq!(script.actions(), []);
    script.at(70 * S - 1);
    assert_eq!(script.request(A), Admission::Ready);
    script.at(70 * S).wait(A);
    for _ in 0..3 {
        script.end_use(A);
    }
    assert_eq!(script.actions(), [unload_for(A, B)]);
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(B)]);
    script.table.handle_loaded(B, script.now_us);
    assert_eq!(script.answers(), [(waiting, Ok(()))]);
}

#[test]
fn an_old_request_behind_a_load_without_one_has_busy_models_give_way() {
    let mut script = Script::new(&[4, 4, 4], &[], 4);
    script.load(A);
    assert_eq!(script.table.handle_load_asked(B, 0), Ok(true));
    let waiting = script.wait(C);
    assert_eq!(script.actions(), []);
    let held = script.at(10 * S).wait(A);
    script.end_use(A);
    // The order of arrival stays.
    assert_eq!(script.actions(), [unload_for(A, B)]);
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(B)]);
    script.table.handle_loaded(B, script.now_us);
    assert_eq!(script.actions(), [unload_for(B, C)]);
    script.unloaded(B);
    assert_eq!(script.actions(), [ModelAction::Load(C)]);
    script.table.handle_loaded(C, script.now_us);
    assert_eq!(script.answers(), [(waiting, Ok(()))]);
    script.end_use(C);
    assert_eq!(script.actions(), [unload_for(C, A)]);
    script.unloaded(C);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    script.table.handle_loaded(A, script.now_us);
    assert_eq!(script.answers(), [(held, Ok(()))]);
}

#[test]
fn a_pinned_model_gives_no_way() {
    let mut script = Script::new(&[4, 4, 4], &[0], 8);
    script.load(A);
    script.load(B);
    script.wait(C);
    assert_eq!(script.actions(), []);
    script.at(10 * S);
    assert_eq!(script.request(A), Admission::Ready);
    script.wait(B);
}

#[test]
fn requests_go_on_when_the_old_one_gives_up() {
    let mut script = Script::new(&[4, 4], &[], 4);
    script.load(A);
    let old = script.wait(B);
    assert_eq!(script.actions(), []);
    script.at(10 * S);
    let held = script.wait(A);
    assert_eq!((script.actions(), script.answers()), (vec![], vec![]));
    assert!(script.table.handle_wait_end(B, old));
    assert!(!script.table.handle_wait_end(B, old));
    assert_eq!(script.actions(), []);
    assert_eq!(script.answers(), [(held, Ok(()))]);
    assert_eq!(script.table.status(B), ModelStatus::Unloaded);
}

#[test]
fn a_failed_load_fails_its_own_requests_and_waits_before_the_next() {
    let mut script = Script::new(&[4, 4], &[], 8);
    script.load(B);
    let [first, second] = [script.wait(A), script.wait(A)];
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    let error = LoadError::Failed("a tensor is missing".to_owned());
    script.at(5 * S);
    let reason = "a tensor is missing".to_owned();
    script.table.handle_load_failed(A, reason, script.now_us);
    let answers = [first, second].map(|ticket| (ticket, Err(error.clone())));
    assert_eq!(script.answers(), answers);
    assert_eq!(script.request(B), Admission::Ready);
    script.at(35 * S - 1);
    assert_eq!(script.request(A), Admission::Refused(error));
    assert_eq!(script.actions(), []);
    script.at(35 * S).wait(A);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
}

#[test]
fn a_failed_plan_is_a_failed_load() {
    let mut script = Script::new(&[4], &[], 8);
    let ticket = script.wait(A);
    assert_eq!(script.table.poll_action(0), Some(ModelAction::Plan(A)));
    let reason = "no such folder".to_owned();
    script.table.handle_planned(A, Err(reason.clone()), 0);
    let error = LoadError::Failed(reason);
    assert_eq!(script.actions(), []);
    assert_eq!(script.answers(), [(ticket, Err(error.clone()))]);
    assert_eq!(script.request(A), Admission::Refused(error));
}

#[test]
fn a_model_that_can_never_fit_is_refused_with_the_figures() {
    const MIB: u64 = 1 << 20;
    let mut script = Script::new(&[3 * MIB, 6 * MIB, 4 * MIB], &[0], 8 * MIB);
    script.load_idle(A);
    script.load(C);
    // C could be unloaded, A could not.
    let ticket = script.wait(B);
    assert_eq!(script.actions(), []);
    let error = LoadError::TooLarge {
        memory: memory(6 * MIB),
        room_bytes: 5 * MIB,
    };
    assert_eq!(
        error.to_string(),
        "it needs 6.0 MiB (weights 6.0 MiB, KV cache 0.0 MiB, working memory 0.0 MiB), and \
         --model-memory leaves 5.0 MiB to models that are not pinned"
    );
    assert_eq!(script.answers(), [(ticket, Err(error))]);
    assert!(script.is_loaded(C));
}

#[test]
fn a_pinned_model_may_take_the_room_of_a_waiting_one() {
    let mut script = Script::new(&[6, 7, 4], &[2], 10);
    script.load(A);
    let large = script.wait(B);
    let small = script.at(5 * S).wait(C);
    assert_eq!(script.actions(), [ModelAction::Load(C)]);
    script.table.handle_loaded(C, script.now_us);
    assert_eq!(script.actions(), []);
    let error = LoadError::TooLarge {
        memory: memory(7),
        room_bytes: 6,
    };
    assert_eq!(script.answers(), [(small, Ok(())), (large, Err(error))]);
}

#[test]
fn a_lost_engine_ends_only_its_model() {
    let mut script = Script::new(&[4, 4], &[], 8);
    script.load(A);
    script.load(B);
    let reason = "a file has become shorter".to_owned();
    script.table.handle_lost(A, reason.clone());
    let error = LoadError::Failed(reason);
    assert_eq!(script.request(A), Admission::Refused(error.clone()));
    assert_eq!(script.request(B), Admission::Ready);
    assert_eq!(script.actions(), []);
    script.at(2 * S).end_use(A);
    let lost = ModelAction::Unload(A, UnloadReason::Lost);
    assert_eq!(script.actions(), [lost]);
    assert_eq!(script.request(A), Admission::Refused(error.clone()));
    script.unloaded(A);
    let retry_us = 32 * S;
    assert_eq!(
        script.table.status(A),
        ModelStatus::Failed { error, retry_us }
    );
    script.at(retry_us).wait(A);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
}

#[test]
fn a_sleeping_server_wakes_as_it_was() {
    let mut script = Script::new(&[2, 2, 2, 2], &[], 8);
    script.load_idle(A);
    script.load(B);
    script.load_idle(C);
    script.table.handle_sleep(2);
    let unload = |model| ModelAction::Unload(model, UnloadReason::Sleep { level: 2 });
    assert_eq!(script.actions(), [unload(A), unload(C)]);
    script.unloaded(A);
    script.unloaded(C);
    assert!(!script.table.is_asleep());
    script.end_use(B);
    assert_eq!(script.actions(), [unload(B)]);
    script.unloaded(B);
    assert!(script.table.is_asleep());
    // A request wakes its own model.
    script.load_idle(A);
    assert!(!script.table.is_asleep());
    script.table.handle_wake(script.now_us);
    assert_eq!(script.actions(), [ModelAction::Load(B)]);
    script.table.handle_loaded(B, script.now_us);
    assert_eq!(script.actions(), [ModelAction::Load(C)]);
    script.table.handle_loaded(C, script.now_us);
    assert_eq!((script.actions(), script.answers()), (vec![], vec![]));
    assert_eq!(script.table.status(D), ModelStatus::Unloaded);
}

#[test]
fn a_server_that_wakes_in_time_keeps_its_model() {
    let mut script = Script::new(&[2], &[], 8);
    script.load(A);
    script.table.handle_sleep(1);
    let waiting = script.wait(A);
    script.table.handle_wake(script.now_us);
    assert_eq!(script.actions(), []);
    assert_eq!(script.answers(), [(waiting, Ok(()))]);
    assert_eq!(script.request(A), Admission::Ready);
}

#[test]
fn requests_after_a_sleep_load_the_model_again() {
    let mut script = Script::new(&[2], &[], 8);
    script.load(A);
    script.table.handle_sleep(1);
    let later = script.wait(A);
    assert_eq!((script.actions(), script.answers()), (vec![], vec![]));
    script.end_use(A);
    let sleep = UnloadReason::Sleep { level: 1 };
    assert_eq!(script.actions(), [ModelAction::Unload(A, sleep)]);
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    script.table.handle_loaded(A, script.now_us);
    assert_eq!(script.answers(), [(later, Ok(()))]);
}

#[test]
fn a_load_that_was_asked_for_needs_no_request() {
    let mut script = Script::new(&[2], &[], 8);
    assert_eq!(script.table.handle_load_asked(A, 0), Ok(true));
    assert_eq!(script.table.handle_load_asked(A, 0), Ok(false));
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    assert_eq!(script.table.handle_load_asked(A, 0), Ok(false));
    script.at(7 * S).table.handle_loaded(A, 7 * S);
    assert_eq!((script.actions(), script.answers()), (vec![], vec![]));
    assert_eq!(script.table.next_deadline(), Some(307 * S));
}

#[test]
fn an_unload_that_was_asked_for_waits_for_the_uses() {
    let mut script = Script::new(&[5, 8], &[], 10);
    assert!(!script.table.handle_unload_asked(A), "it is not loaded");
    script.load(A);
    assert!(script.table.handle_unload_asked(A));
    assert_eq!(script.actions(), []);
    let later = script.wait(A);
    script.end_use(A);
    let unload = |model| ModelAction::Unload(model, UnloadReason::Asked);
    assert_eq!(script.actions(), [unload(A)]);
    assert!(script.table.handle_unload_asked(A), "it is being unloaded");
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(A)]);
    script.table.handle_loaded(A, script.now_us);
    assert_eq!(script.answers(), [(later, Ok(()))]);
    // A load that has not begun is given up.
    let asked = script.table.handle_load_asked(B, script.now_us);
    assert_eq!(asked, Ok(true));
    assert_eq!(script.actions(), []);
    assert!(script.table.handle_unload_asked(B));
    script.end_use(A);
    assert_eq!(script.actions(), []);
    assert_eq!(script.table.status(B), ModelStatus::Unloaded);
    // One that has begun ends with the unload.
    script.table.handle_unload_asked(A);
    assert_eq!(script.actions(), [unload(A)]);
    script.unloaded(A);
    let asked = script.table.handle_load_asked(B, script.now_us);
    assert_eq!(asked, Ok(true));
    assert_eq!(script.actions(), [ModelAction::Load(B)]);
    assert!(script.table.handle_unload_asked(B));
    // The operator may think again.
    let kept = script.table.handle_load_asked(B, script.now_us);
    assert_eq!(kept, Ok(true));
    assert!(script.table.handle_unload_asked(B));
    script.table.handle_loaded(B, script.now_us);
    assert_eq!(script.actions(), [unload(B)]);
}

#[test]
fn a_model_that_was_unloaded_in_its_sleep_does_not_wake() {
    let mut script = Script::new(&[2], &[], 8);
    script.load_idle(A);
    script.table.handle_sleep(1);
    script.actions();
    script.unloaded(A);
    assert!(!script.table.handle_unload_asked(A));
    assert_eq!(script.table.handle_wake(script.now_us), []);
    assert_eq!(script.actions(), []);
}

#[test]
fn models_are_found_by_any_name() {
    let with_other = |names: &[&str], other: &str| ModelSetting {
        other_names: vec![other.to_owned()],
        adapters: Vec::new(),
        ..setting(names)
    };
    let settings = vec![
        with_other(&["qwen3-0.6b", "small"], "qwen3"),
        with_other(&["qwen3-8b"], "qwen3"),
        setting(&["qwen3"]),
    ];
    let table = ModelTable::new(settings, 0).expect("names differ");
    let found = ["small", "qwen3-8b", "qwen3", "qwen"].map(|name| table.find(name));
    assert_eq!(found, [Some(A), Some(B), Some(C), None]);
    let twice = ModelTable::new(vec![setting(&["a"]), setting(&["b", "a"])], 0);
    let error = twice.err().expect("a name is given twice");
    assert_eq!(error, "two models are named `a`");
    let only_short = vec![with_other(&["x"], "s"), with_other(&["y"], "s")];
    let table = ModelTable::new(only_short, 0).expect("names differ");
    assert_eq!(table.find("s"), Some(A));
    let others = [A, B].map(|model| table.setting(model).other_names.clone());
    assert_eq!(others, [vec!["s".to_owned()], vec![]]);
}

#[test]
fn requests_add_models_up_to_a_limit() {
    let mut script = Script::new(&[2, 2], &[], 2);
    let added = |name: &str| ModelSetting {
        other_names: vec!["a".to_owned(), "short".to_owned()],
        adapters: Vec::new(),
        ..setting(&[name])
    };
    script.load_idle(A);
    assert_eq!(script.table.add(added("x")), Some(C));
    assert_eq!(script.table.add(added("x")), Some(C));
    assert_eq!(script.table.find("a"), Some(A));
    assert_eq!(script.table.find("short"), Some(C));
    assert_eq!(script.table.add(added("short")), Some(D));
    assert_eq!(script.table.find("short"), Some(D));
    script.bytes.extend([2, 2]);
    let ticket = script.wait(C);
    assert_eq!(script.actions(), [unload_for(A, C)]);
    script.unloaded(A);
    assert_eq!(script.actions(), [ModelAction::Load(C)]);
    script.table.handle_loaded(C, 0);
    assert_eq!(script.answers(), [(ticket, Ok(()))]);
    let more = (2..=MAX_ADDED_MODELS).map(|index| script.table.add(added(&index.to_string())));
    let more: Vec<_> = more.collect();
    assert!(more[..MAX_ADDED_MODELS - 2].iter().all(Option::is_some));
    assert_eq!(more.last(), Some(&None));
}

#[test]
fn a_busy_model_that_is_to_leave_takes_requests_until_it_is_idle() {
    let mut script = Script::new(&[2], &[], 8);
    // A model that is not loaded is not loaded to be unloaded.
    script.table.handle_keep_alive(A, KeepAlive::NONE);
    assert_eq!(script.actions(), []);
    script.load(A);
    script.table.handle_keep_alive(A, KeepAlive::NONE);
    assert_eq!(script.request(A), Admission::Ready);
    script.end_use(A);
    assert_eq!(script.actions(), []);
    script.end_use(A);
    let idle = UnloadReason::Idle { idle_us: 0 };
    assert_eq!(script.actions(), [ModelAction::Unload(A, idle)]);
}

#[test]
fn a_model_whose_time_is_fixed_stays() {
    let fixed = ModelSetting {
        keep_alive: KeepAlive::Forever,
        takes_keep_alive: false,
        ..setting(&["a"])
    };
    let mut script = Script::new(&[2], &[], 8);
    script.table = ModelTable::new(vec![fixed], 8).expect("it has its name alone");
    script.load(A);
    script.table.handle_keep_alive(A, KeepAlive::NONE);
    let admission = script.table.handle_request(A, Some(KeepAlive::NONE), 0);
    assert_eq!(admission, Admission::Ready);
    script.end_use(A);
    script.end_use(A);
    assert_eq!(
        (script.actions(), script.table.next_deadline()),
        (vec![], None)
    );
}
