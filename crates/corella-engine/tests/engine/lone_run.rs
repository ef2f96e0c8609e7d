//! A request gets the same tokens as when it runs alone.

use corella_core::FinishReason;

use crate::fixture::{finish, limits, model, start, submission};
use crate::load::{Dice, requests_come_and_go};

fn outputs_equal_lone_runs(max_inflight_steps: u32) {
    let limits = limits(40, max_inflight_steps);
    let mock = model(&limits);
    let engine = start(limits, mock.clone());
    let dice = Dice(u64::from(max_inflight_steps));
    let stats = requests_come_and_go(&engine, &mock, dice);
    assert_eq!(stats.scheduler.num_draft_tokens, 0);
}

#[test]
fn concurrent_outputs_equal_lone_runs() {
    outputs_equal_lone_runs(1);
}

#[test]
fn overlapped_outputs_equal_lone_runs() {
    outputs_equal_lone_runs(2);
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
