//! A request gets the same tokens as in a lone run.

use corella_core::{FinishReason, KvGroup, RecurrentState, SchedulerConfig, SchedulerStats};
use corella_engine::{Engine, EngineConfig};
use corella_model::MockExecutor;

use crate::fixture::{finish, limits, model, start, submission};
use crate::load::{Dice, requests_come_and_go};

fn outputs_equal_lone_runs(max_inflight_steps: u32) {
    let stats = limited_outputs_equal_lone_runs(limits(40, max_inflight_steps));
    assert!(stats.num_prefix_hit_tokens > 0, "{stats:?}");
}

fn limited_outputs_equal_lone_runs(limits: SchedulerConfig) -> SchedulerStats {
    let max_inflight_steps = limits.max_inflight_steps;
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let dice = Dice(u64::from(max_inflight_steps));
    let stats = requests_come_and_go(&engine, &mock, dice).scheduler;
    assert_eq!(stats.num_draft_tokens, 0);
    stats
}

#[test]
fn concurrent_outputs_equal_lone_runs() {
    outputs_equal_lone_runs(1);
}

#[test]
fn overlapped_outputs_equal_lone_runs() {
    outputs_equal_lone_runs(2);
}

/// The mock checks every page and row: the pages within the window are present, and belong to the
/// request's own history.
#[test]
fn windows_change_no_token() {
    let models = [
        (60, 1, vec![None, Some(8)]),
        (60, 2, vec![Some(5), None]),
        (80, 2, vec![Some(3), None, Some(12)]),
    ];
    for (num_pages, max_inflight_steps, windows) in models {
        let mut limits = limits(num_pages, max_inflight_steps);
        let group = |window| KvGroup { window };
        limits.kv_groups = windows.into_iter().map(group).collect();
        limits.max_held_pages = 0;
        let stats = limited_outputs_equal_lone_runs(limits);
        assert!(stats.num_prefix_hit_tokens > 0, "{stats:?}");
    }
}

/// The mock checks every restored state: it is the state after the slot's cached tokens.
#[test]
fn recurrent_states_change_no_token() {
    for (num_snapshots, snapshot_interval, max_inflight_steps) in [(1, 1, 1), (6, 2, 2), (40, 3, 2)]
    {
        let mut limits = limits(40, max_inflight_steps);
        limits.set_recurrent_state(RecurrentState {
            num_snapshots,
            snapshot_interval,
            least_distance: 1,
        });
        let stats = limited_outputs_equal_lone_runs(limits);
        // A single snapshot may be overwritten each time before a request begins with its tokens.
        assert!(
            num_snapshots == 1 || stats.num_prefix_hit_tokens > 0,
            "{stats:?}"
        );
    }
}

/// An executor that reads other pages than the scheduler assigns would compute nonsense.
#[test]
fn other_kv_groups_than_the_executors_are_refused() {
    let mut limits = limits(40, 1);
    let mock = model(&limits);
    limits.kv_groups = vec![KvGroup { window: Some(8) }];
    limits.max_held_pages = 0;
    let refused = Engine::start(EngineConfig::new(limits), Box::new(MockExecutor::new(mock)));
    let error = refused.err().expect("the engine started").to_string();
    assert!(error.contains("kv_groups"), "{error}");
}

#[test]
fn choices_are_all_taken_and_differ_by_seed_and_index() {
    let limits = limits(200, 1);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let mut several = submission(vec![3, 1, 4, 1, 5], 12);
    several.sampling.temperature = 1.0;
    several.num_choices = 3;
    let streams = engine.submit(several.clone()).unwrap();
    assert_eq!(streams.len(), 3);
    let mut texts = Vec::new();
    for (choice, mut stream) in streams.into_iter().enumerate() {
        let mut sampling = several.sampling.clone();
        sampling.choice = choice as u32;
        let (tokens, reason) = finish(&mut stream);
        assert_eq!(reason, FinishReason::Length);
        assert_eq!(tokens, mock.lone_tokens(&several.prompt, &sampling, 12));
        texts.push(tokens);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2]);
}
