//! Tests of the errors that the mock executor has to catch. The conformance suite covers the rest.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use corella_core::SamplingParams;

use super::*;
use crate::{BatchBuilder, CostModel, Executor, MockEcho, MockEnd};

const GREEDY: SamplingParams = SamplingParams::GREEDY;

fn mock() -> MockExecutor {
    MockExecutor::new(MockConfig::new(50, 8, 4))
}

fn step(mock: &mut MockExecutor, batch: &mut BatchBuilder) -> Result<Vec<TokenId>, String> {
    let batch = batch.build();
    mock.submit(batch.clone()).unwrap();
    mock.sample(batch.step, Vec::new()).unwrap();
    match mock.wait() {
        Ok(output) => Ok(output
            .samples
            .into_iter()
            .map(|(_, sample)| sample.token)
            .collect()),
        Err(error) => Err(error.to_string()),
    }
}

#[test]
fn tokens_are_those_of_the_formula_without_pages() {
    let prompt = [3, 1, 4, 1, 5, 9];
    let expected = mock().config.lone_tokens(&prompt, &GREEDY, 3);
    let mut mock = mock();
    let mut batch = BatchBuilder::new(0);
    batch
        .start(0, 6, &GREEDY)
        .pages(0, 0, &[6, 2])
        .span(0, 0, &prompt, true);
    let mut drawn = step(&mut mock, &mut batch).unwrap();
    for position in [6, 7] {
        batch.span(0, position, &drawn[position - 6..], true);
        drawn.extend(step(&mut mock, &mut batch).unwrap());
    }
    assert_eq!(drawn, expected);
}

#[test]
fn a_prompt_is_scored_by_the_formula_in_chunks_and_whole() {
    let prompt = [3, 1, 4, 1, 5, 9];
    let sampling = SamplingParams {
        prompt_logprobs: Some(2),
        ..GREEDY
    };
    let expected = mock().config.lone_prompt_logprobs(&prompt, 2);
    for chunk in [1, 4, 6] {
        let mut mock = mock();
        let mut batch = BatchBuilder::new(0);
        batch.start(0, 6, &sampling).pages(0, 0, &[6, 2]);
        let mut found = Vec::new();
        for start in (0..5).step_by(chunk) {
            let end = 6.min(start + chunk);
            let next = prompt.get(end).copied();
            let last = end as u32 + u32::from(next.is_some());
            batch
                .span(0, start, &prompt[start..end], false)
                .logprobs(start as u32 + 1..last, next);
            let batch = batch.build();
            mock.submit(batch.clone()).unwrap();
            mock.sample(batch.step, Vec::new()).unwrap();
            let output = mock.wait().unwrap();
            found.extend(output.logprobs.into_iter().flat_map(|(_, scored)| scored));
        }
        assert_eq!(found, expected, "chunks of {chunk}");
    }
}

/// Every kind of wrong batch, and the message of its refusal.
#[test]
fn wrong_batches_fail_their_step_and_say_why() {
    type Build = fn(&mut BatchBuilder) -> &mut BatchBuilder;
    let cases: [(Build, &str); 13] = [
        (|b| b.release(3), "slot 3 is released but holds no request"),
        (
            |b| b.start(0, 1, &GREEDY),
            "slot 0 is started for request 4294967296 but still holds request 0",
        ),
        (
            |b| b.pages(0, 3, &[1]),
            "slot 0 is given entry 3 of a page table of 2",
        ),
        (
            |b| b.pages(0, 2, &[8]),
            "slot 0 is given page 8, which does not exist",
        ),
        (|b| b.pages(7, 0, &[1]), "slot 7 holds no request"),
        (
            |b| b.span(0, 5, &[1], true),
            "a span of slot 0 starts at position 5 of a history of 6",
        ),
        (
            |b| b.span(0, 6, &[1, 2, 3], true),
            "position 8 of slot 0 is beyond its 2 pages",
        ),
        (
            |b| b.span(0, 6, &[50], true),
            "slot 0: token 50 does not exist",
        ),
        (
            |b| b.span_from_step(0, 6, 7),
            "slot 0 wants the token of step 7 and slot 0, which drew none for it",
        ),
        (
            |b| b.copy(5, 4, 1),
            "a row to copy from page 5 was never written",
        ),
        (
            |b| b.pages(0, 1, &[5]).span(0, 6, &[1], true),
            "slot 0 reads token 4 at position 4 from row 0 of page 5 in layer 0, \
             which was never written",
        ),
        (
            |b| b.pages(0, 0, &[1]).pages(0, 1, &[0]).span(0, 6, &[1], true),
            "slot 0 reads token 0 at position 0 from row 0 of page 1 in layer 0, \
             which holds token 4 at position 4 of another history",
        ),
        // The page belongs to another request. It has the same tokens, but other tokens come before them.
        (
            |b| {
                b.start_cached(1, 9, &GREEDY, &[9, 9, 9, 9, 4, 5])
                    .pages(1, 0, &[2, 1]);
                b.start(2, 4, &GREEDY)
                    .pages(2, 0, &[2])
                    .span(2, 0, &[9, 9, 9, 9], false);
                b.span(1, 6, &[1], true)
            },
            "slot 1 reads token 4 at position 4 from row 0 of page 1 in layer 0, \
             which holds token 4 at position 4 of another history",
        ),
    ];
    for (build, reason) in cases {
        let mut mock = mock();
        let mut batch = BatchBuilder::new(0);
        batch
            .start(0, 6, &GREEDY)
            .pages(0, 0, &[0, 1])
            .span(0, 0, &[0, 1, 2, 3, 4, 5], true);
        step(&mut mock, &mut batch).unwrap();
        build(&mut batch);
        assert_eq!(
            step(&mut mock, &mut batch).unwrap_err(),
            format!("step 1 failed: {reason}")
        );
    }
}

#[test]
fn a_page_written_since_by_another_request_is_noticed() {
    let mut mock = mock();
    let mut batch = BatchBuilder::new(0);
    batch
        .start(0, 2, &GREEDY)
        .pages(0, 0, &[0])
        .span(0, 0, &[1, 2], true);
    let drawn = step(&mut mock, &mut batch).unwrap();
    batch
        .start(1, 2, &GREEDY)
        .pages(1, 0, &[0])
        .span(1, 0, &[1, 3], true);
    step(&mut mock, &mut batch).unwrap();
    batch.span(0, 2, &drawn, true);
    let error = step(&mut mock, &mut batch).unwrap_err();
    assert!(
        error.contains("position 1 from row 1 of page 0 in layer 0, which holds token 3"),
        "{error}"
    );
}

/// The executor has not begun the first step when the second one is submitted.
#[test]
fn a_page_that_a_step_in_flight_reads_is_not_given_away() {
    let mut mock = mock();
    let mut batch = BatchBuilder::new(0);
    for slot in [0, 1] {
        batch
            .start(slot, 2, &GREEDY)
            .pages(slot, 0, &[0])
            .span(slot, 0, &[1, 2], true);
        let batch = batch.build();
        mock.submit(batch.clone()).unwrap();
        mock.sample(batch.step, Vec::new()).unwrap();
    }
    mock.wait().unwrap();
    let error = mock.wait().unwrap_err().to_string();
    assert_eq!(
        error,
        "step 1 failed: page 0 is written while step 0 reads it"
    );
}

#[test]
fn end_tokens_come_when_they_are_asked_for_and_not_before_min_tokens() {
    let mut config = MockConfig::new(50, 8, 16);
    config.end = Some(MockEnd {
        token: 7,
        probability: 0.0,
        at_output: Some(3),
    });
    let drawn = config.lone_tokens(&[1, 2], &GREEDY, 3);
    assert_eq!((drawn[2], drawn[..2].contains(&7)), (7, false));
    config.end = Some(MockEnd {
        token: 7,
        probability: 0.25,
        at_output: None,
    });
    let drawn = config.lone_tokens(&[1, 2], &GREEDY, 4000);
    let num_ends = drawn.iter().filter(|&&token| token == 7).count();
    // The interval is four standard deviations around 1000.
    assert!((890..1110).contains(&num_ends), "{num_ends} ends");
    config.drawable = vec![20, 21, 22];
    let drawn = config.lone_tokens(&[1, 2], &GREEDY, 100);
    assert!(drawn.iter().all(|token| [7, 20, 21, 22].contains(token)));
}

#[test]
fn faults_hit_their_step_and_the_executor_goes_on() {
    let mut config = MockConfig::new(50, 8, 4);
    config.faults = vec![
        (StepId(0), Fault::Fail),
        (StepId(1), Fault::Panic),
        (StepId(2), Fault::Hang(Duration::from_millis(1))),
        (StepId(4), Fault::Lost),
    ];
    let expected = config.lone_tokens(&[1, 2], &GREEDY, 1);
    let mut mock = MockExecutor::new(config);
    let mut batch = BatchBuilder::new(0);
    let begin = |batch: &mut BatchBuilder| {
        batch
            .start(0, 2, &GREEDY)
            .pages(0, 0, &[0])
            .span(0, 0, &[1, 2], true);
    };
    begin(&mut batch);
    assert_eq!(
        step(&mut mock, &mut batch).unwrap_err(),
        "step 0 failed: a fault was injected"
    );
    batch.release(0);
    begin(&mut batch);
    let unwound =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| step(&mut mock, &mut batch)));
    assert!(unwound.is_err());
    batch.release(0);
    begin(&mut batch);
    assert_eq!(step(&mut mock, &mut batch).unwrap(), expected);
    batch.span(0, 2, &expected, true);
    step(&mut mock, &mut batch).unwrap();
    for _ in 0..2 {
        let error = step(&mut mock, &mut batch).unwrap_err();
        assert_eq!(error, "the executor is lost: a fault was injected");
    }
}

/// `step_time.rs` defines the time of a step.
#[test]
fn a_step_returns_no_earlier_than_its_time() {
    let mut config = MockConfig::new(50, 8, 4);
    let mut batch = BatchBuilder::new(0);
    batch
        .start(0, 2, &GREEDY)
        .pages(0, 0, &[0])
        .span(0, 0, &[1, 2], true);
    let batch = batch.build();
    for (per_step_us, is_done) in [(3600e6, false), (0.0, true)] {
        config.cost = Some(CostModel::per_step(per_step_us));
        let mut mock = MockExecutor::new(config.clone());
        mock.submit(batch.clone()).unwrap();
        mock.sample(batch.step, Vec::new()).unwrap();
        assert_eq!(mock.try_wait().unwrap().is_some(), is_done);
    }
}

#[test]
fn a_gate_holds_steps_and_lets_them_through() {
    let config = MockConfig::new(50, 8, 4);
    let gate = config.gate.clone();
    let num_wakes = Arc::new(AtomicUsize::new(0));
    let mut mock = MockExecutor::new(config);
    let mut batch = BatchBuilder::new(0);
    gate.close();
    for step in 0..4 {
        mock.submit(batch.build()).unwrap();
        mock.sample(StepId(step), Vec::new()).unwrap();
    }
    assert_eq!(mock.try_wait(), Ok(None));
    gate.let_through(1);
    assert_eq!(mock.try_wait().unwrap().unwrap().step, StepId(0));
    assert_eq!(mock.try_wait(), Ok(None));
    gate.let_through(1);
    gate.let_through(1);
    assert_eq!(mock.wait().unwrap().step, StepId(1));
    assert_eq!(mock.wait().unwrap().step, StepId(2));
    assert_eq!(mock.try_wait(), Ok(None));

    let counted = num_wakes.clone();
    mock.set_waker(Arc::new(move || {
        counted.fetch_add(1, Ordering::SeqCst);
    }));
    gate.open();
    assert_eq!(num_wakes.load(Ordering::SeqCst), 1);
    assert_eq!(mock.wait().unwrap().step, StepId(3));
}

#[test]
fn misuse_of_the_calls_is_refused() {
    let mut mock = mock();
    assert!(mock.wait().is_err());
    assert!(mock.sample(StepId(0), Vec::new()).is_err());
    mock.submit(BatchBuilder::new(0).build()).unwrap();
    assert!(
        mock.wait()
            .unwrap_err()
            .to_string()
            .contains("before it is sampled")
    );
}

#[test]
fn drafts_that_are_not_drawn_are_gone() {
    let mut mock = mock();
    let expected = mock.config.lone_tokens(&[3, 1, 4], &GREEDY, 3);
    let wrong = (expected[1] + 1) % 50;
    let mut batch = BatchBuilder::new(0);
    batch.start(0, 3, &GREEDY).pages(0, 0, &[6, 2]);
    batch.span_with_drafts(0, 0, &[3, 1, 4], &[expected[0], wrong, 7]);
    assert_eq!(step(&mut mock, &mut batch).unwrap(), expected[..2]);
    // The next span overwrites the drafts, and no query reads their rows.
    batch.span(0, 5, &[1], true);
    let error = step(&mut mock, &mut batch).unwrap_err();
    assert!(
        error.contains("starts at position 5 of a history of 4"),
        "{error}"
    );

    let mut mock = self::mock();
    let mut batch = BatchBuilder::new(0);
    batch.start(0, 3, &GREEDY).pages(0, 0, &[6, 2]);
    batch.span_with_drafts(0, 0, &[3, 1, 4], &[expected[0], wrong, 7]);
    step(&mut mock, &mut batch).unwrap();
    batch.copy(2, 4, 1);
    let error = step(&mut mock, &mut batch).unwrap_err();
    assert!(
        error.contains("page 2 holds a draft that was not drawn"),
        "{error}"
    );
    batch.span_with_drafts(0, 4, &[], &[1]);
    let error = step(&mut mock, &mut batch).unwrap_err();
    assert!(error.contains("the drafts of slot 0"), "{error}");
}

#[test]
fn echoes_repeat_and_stray() {
    let mut config = MockConfig::new(50, 8, 4);
    let distance = 5;
    config.echo = Some(MockEcho {
        distance,
        probability: 1.0,
    });
    let prompt = [3, 1, 4, 1, 5];
    let drawn = config.lone_tokens(&prompt, &GREEDY, 12);
    assert_eq!(drawn, [3, 1, 4, 1, 5, 3, 1, 4, 1, 5, 3, 1]);
    config.echo = Some(MockEcho {
        distance,
        probability: 0.75,
    });
    let drawn = config.lone_tokens(&prompt, &GREEDY, 1000);
    let pairs = drawn.iter().zip(&drawn[distance..]);
    let num_echoes = pairs.filter(|(a, b)| a == b).count();
    // The expected share is three quarters, plus a 50th of the rest, with four standard deviations
    // around it.
    assert!((695..806).contains(&num_echoes), "{num_echoes}");
}

/// A mock of a model with recurrent layers. It has kept a state after four tokens, and another state after five tokens.
fn recurrent() -> (MockExecutor, BatchBuilder) {
    let mut config = MockConfig::new(50, 8, 4);
    config.num_snapshots = Some(4);
    let mut mock = MockExecutor::new(config);
    let mut batch = BatchBuilder::new(0);
    batch
        .start(0, 6, &GREEDY)
        .pages(0, 0, &[6, 2])
        .span(0, 0, &[3, 1, 4, 1], false)
        .keep_state(0, 2);
    step(&mut mock, &mut batch).unwrap();
    batch.span(0, 4, &[5], false).keep_state(0, 3);
    step(&mut mock, &mut batch).unwrap();
    (mock, batch)
}

#[test]
fn a_slot_goes_on_from_a_state_that_was_kept() {
    let expected = mock().config.lone_tokens(&[3, 1, 4, 1, 7], &GREEDY, 1);
    let (mut mock, mut batch) = recurrent();
    batch
        .start_cached(1, 5, &GREEDY, &[3, 1, 4, 1])
        .restore_state(2)
        .pages(1, 0, &[6, 3])
        .span(1, 4, &[7], true);
    assert_eq!(step(&mut mock, &mut batch).unwrap(), expected);
}

#[test]
fn a_slot_with_the_state_of_other_tokens_fails_its_step() {
    type Build = fn(&mut BatchBuilder) -> &mut BatchBuilder;
    let cases: [(Build, &str); 5] = [
        (|b| b, "without their recurrent state"),
        (|b| b.restore_state(3), "which is the state behind 5 others"),
        (|b| b.restore_state(1), "which holds no state"),
        (|b| b.restore_state(9), "which holds no state"),
        // A failed step has overwritten this state.
        (|b| b.restore_state(2), "a state that is undefined"),
    ];
    for (at, (build, reason)) in cases.into_iter().enumerate() {
        let (mut mock, mut batch) = recurrent();
        if at == 4 {
            mock.config.faults = vec![(StepId(2), Fault::Fail)];
            batch.span(0, 5, &[9], false).keep_state(0, 2);
            step(&mut mock, &mut batch).unwrap_err();
        }
        batch.start_cached(1, 5, &GREEDY, &[3, 1, 4, 1]);
        build(&mut batch)
            .pages(1, 0, &[6, 3])
            .span(1, 4, &[7], true);
        let error = step(&mut mock, &mut batch).unwrap_err();
        assert!(error.contains(reason), "{error}");
    }
}
