//! A step that fails or panics ends only the requests in it. A step that hangs is counted as slow
//! if it returns; if it never returns, or if the executor or the loop is lost, every request ends.

use std::path::PathBuf;
use std::time::Duration;

use corella_core::{BatchOutput, FinishReason, RequestError, SamplingParams, StepId};
use corella_engine::{Engine, EngineConfig, EngineState, StreamEvent, SubmitError};
use corella_model::{Fault, MockExecutor};
use corella_test::wait_until;

use crate::fixture::{
    Altered, LONG, assert_at_rest, assert_failed, assert_lost, finish, limits, model, start,
    start_with, submission, submit_one,
};

#[test]
fn a_failing_or_panicking_step_ends_its_own_requests_only() {
    for fault in [Fault::Fail, Fault::Panic] {
        for max_inflight_steps in [1, 2] {
            let limits = limits(200, max_inflight_steps);
            let mut mock = model(&limits);
            let lone = mock.clone();
            mock.faults = vec![(StepId(5), fault)];
            let mut config = EngineConfig::new(limits);
            config.step_log_path = dump_path(&format!("{fault:?}-{max_inflight_steps}"));
            let dump = config.step_log_path.clone();
            let engine = start_with(config, mock);

            let mut victim = submit_one(&engine, submission(vec![1, 2, 3], 40));
            let (tokens, reason) = finish(&mut victim);
            assert_failed(&reason, "fault was injected");
            let expected = lone.lone_tokens(&[1, 2, 3], &SamplingParams::GREEDY, 40);
            assert!(!tokens.is_empty() && tokens.len() < 40);
            assert_eq!(tokens, expected[..tokens.len()]);

            // When the same prompt is submitted again, it must not reuse any KV of the failed step.
            let mut next = submit_one(&engine, submission(vec![1, 2, 3], 40));
            assert_eq!(finish(&mut next), (expected, FinishReason::Length));
            assert_at_rest(&engine);
            let stats = engine.stats();
            assert_eq!(stats.num_failed_steps, 1);
            assert_eq!(stats.num_finished_error, 1);
            assert_eq!(engine.state(), EngineState::Ready);
            assert_eq!(dump.exists(), fault == Fault::Panic);
            if fault == Fault::Panic {
                let text = std::fs::read_to_string(&dump).unwrap();
                assert!(text.starts_with("step 5 panicked: a fault was injected"));
                // The log has a heading and then one line for each step. Step 5 is the sixth
                // because steps are numbered from 0, and with overlap one more step had already
                // been planned.
                assert_eq!(text.lines().count() as u32, 1 + 5 + max_inflight_steps);
                std::fs::remove_file(&dump).unwrap();
            }
        }
    }
}

#[test]
fn what_cannot_be_drawn_from_ends_one_request() {
    for max_inflight_steps in [1, 2] {
        let limits = limits(200, max_inflight_steps);
        let mut mock = model(&limits);
        let lone = mock.clone();
        mock.faults = vec![(StepId(5), Fault::Undrawn)];
        let engine = start(limits, mock);
        let prompts = [vec![1, 2, 3], vec![1, 2, 4], vec![9, 8, 7]];
        let mut streams = prompts
            .clone()
            .map(|prompt| submit_one(&engine, submission(prompt, 40)));
        let ends = streams.each_mut().map(finish);
        let failed = ends.iter().filter(|(tokens, _)| tokens.len() < 40);
        assert_eq!(failed.count(), 1);
        for (prompt, (tokens, reason)) in prompts.iter().zip(&ends) {
            let expected = lone.lone_tokens(prompt, &SamplingParams::GREEDY, 40);
            assert_eq!(*tokens, expected[..tokens.len()]);
            if tokens.len() < 40 {
                assert_failed(reason, "no token can be drawn: a fault was injected");
            }
        }
        assert_at_rest(&engine);
        assert_eq!(engine.stats().num_failed_steps, 0);
    }
}

#[test]
fn a_lost_executor_ends_every_stream_and_refuses_what_follows() {
    let limits = limits(200, 2);
    let mut mock = model(&limits);
    mock.faults = vec![(StepId(4), Fault::Lost)];
    let gate = mock.gate.clone();
    gate.close();
    let mut config = EngineConfig::new(limits);
    config.step_log_path = dump_path("lost");
    let dump = config.step_log_path.clone();
    let engine = start_with(config, mock);
    // More requests than the slots, so that some still wait.
    let streams: Vec<_> = (0..40)
        .map(|i| submit_one(&engine, submission(vec![i], 100)))
        .collect();
    gate.open();
    for mut stream in streams {
        // A stream whose request the loop never saw has no `Accepted`.
        let mut last = None;
        while let Some(event) = stream.next_blocking() {
            last = Some(event);
        }
        let Some(StreamEvent::Output(output)) = last else {
            panic!("{last:?}");
        };
        assert!(matches!(
            output.finish,
            Some(FinishReason::Error(RequestError::EngineLost(_)))
        ));
        assert_failed(&output.finish.unwrap(), "fault was injected");
    }
    assert!(engine.wait_idle(LONG));
    let reason = assert_lost(&engine);
    assert!(reason.contains("fault was injected"));
    assert_eq!(
        engine.submit(submission(vec![1], 1)).err(),
        Some(SubmitError::Lost(reason))
    );
    assert!(engine.reset_prefix_cache().is_err());
    std::fs::remove_file(&dump).expect("the step log was not written");
}

#[test]
fn a_panic_of_the_loop_ends_every_stream_and_leaves_the_step_log() {
    let limits = limits(200, 1);
    let forgetful = Altered {
        mock: MockExecutor::new(model(&limits)),
        alter: |output: &mut BatchOutput| {
            if output.step == StepId(3) {
                output.samples.clear();
            }
        },
    };
    let mut config = EngineConfig::new(limits);
    config.step_log_path = dump_path("loop");
    let dump = config.step_log_path.clone();
    let engine = Engine::start(config, Box::new(forgetful)).unwrap();
    let mut stream = submit_one(&engine, submission(vec![1, 2, 3], 40));
    let (tokens, reason) = finish(&mut stream);
    assert_eq!(tokens.len(), 3);
    assert_failed(&reason, "loop panicked");
    assert!(matches!(engine.state(), EngineState::Lost(_)));
    assert!(engine.wait_idle(LONG));
    let text = std::fs::read_to_string(&dump).unwrap();
    assert_eq!(text.lines().count(), 1 + 4, "{text}");
    std::fs::remove_file(&dump).unwrap();
}

#[test]
fn a_hanging_step_is_noticed_and_stays_correct() {
    let limits = limits(200, 1);
    let mock = model(&limits);
    let expected = mock.lone_tokens(&[7], &SamplingParams::GREEDY, 10);
    let gate = mock.gate.clone();
    gate.close();
    gate.let_through(3);
    let mut config = EngineConfig::new(limits);
    config.step_timeout = Duration::from_millis(50);
    let engine = start_with(config, mock);
    let mut stream = submit_one(&engine, submission(vec![7], 10));
    wait_until("step 3 is late", || engine.stats().num_slow_steps >= 1);
    assert_eq!(engine.state(), EngineState::Ready);
    gate.open();
    assert_eq!(finish(&mut stream), (expected, FinishReason::Length));
}

/// The supervisor of the process has to notice that the engine is lost.
#[test]
fn a_step_that_never_returns_loses_the_engine() {
    let limits = limits(20, 1);
    let mock = model(&limits);
    mock.gate.close();
    mock.gate.let_through(1);
    let mut config = EngineConfig::new(limits);
    config.step_timeout = Duration::from_millis(20);
    config.step_deadline = Duration::from_secs(1);
    let engine = start_with(config, mock);
    let _stream = submit_one(&engine, submission(vec![1, 2, 3], 6));
    let reason = assert_lost(&engine);
    assert!(reason.starts_with("step 1 has not returned"), "{reason}");
    let refused = engine.submit(submission(vec![1], 1));
    assert!(matches!(refused, Err(SubmitError::Lost(_))));
}

fn dump_path(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("corella-test-{}-{name}.log", std::process::id()))
}
