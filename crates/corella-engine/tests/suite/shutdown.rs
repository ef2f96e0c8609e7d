//! An orderly end: every accepted request is served or ended with an error.

use std::sync::mpsc;
use std::time::Duration;

use corella_core::{BatchOutput, FinishReason};
use corella_engine::{Engine, EngineConfig, EngineState, StreamEvent, SubmitError};
use corella_model::MockExecutor;

use crate::fixture::{
    Altered, assert_at_rest, assert_failed, finish, limits, model, read_outputs, start, submission,
    submit_one,
};

#[test]
fn draining_finishes_what_was_taken_and_refuses_the_rest() {
    let limits = limits(200, 1);
    let mock = model(&limits);
    let gate = mock.gate.clone();
    gate.close();
    let engine = start(limits, mock);
    let streams: Vec<_> = (0..30)
        .map(|i| submit_one(&engine, submission(vec![i], 20)))
        .collect();
    assert!(!engine.wait_idle(Duration::ZERO));
    engine.drain();
    assert_eq!(engine.state(), EngineState::Draining);
    assert_eq!(
        engine.submit(submission(vec![1], 1)).err(),
        Some(SubmitError::Draining)
    );
    gate.open();
    assert_at_rest(&engine);
    for mut stream in streams {
        let (tokens, reason) = finish(&mut stream);
        assert_eq!((tokens.len(), reason), (20, FinishReason::Length));
    }
}

#[test]
fn shutdown_ends_every_stream() {
    let limits = limits(200, 2);
    let mock = model(&limits);
    mock.gate.close();
    let engine = start(limits, mock);
    let mut stream = submit_one(&engine, submission(vec![1], 100));
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    engine.shutdown();
    let (_, reason) = read_outputs(&mut stream);
    assert_failed(&reason, "shut down");
    assert!(matches!(
        engine.submit(submission(vec![1], 1)),
        Err(SubmitError::Lost(_))
    ));
}

/// The loop is held while it takes the output of a step. Meanwhile it is asked to stop, and then a request arrives.
#[test]
fn a_request_behind_a_shutdown_ends() {
    let limits = limits(200, 1);
    let (entered, is_held) = mpsc::channel();
    let (held, is_free) = mpsc::channel::<()>();
    let executor = Altered {
        mock: MockExecutor::new(model(&limits)),
        alter: move |_: &mut BatchOutput| {
            let _ = entered.send(());
            let _ = is_free.recv();
        },
    };
    let config = EngineConfig {
        step_timeout: Duration::ZERO,
        ..EngineConfig::new(limits)
    };
    let engine = Engine::start(config, Box::new(executor)).unwrap();
    let mut first = submit_one(&engine, submission(vec![1], 5));
    is_held.recv().unwrap();
    assert!(!engine.shutdown(), "the step is held");
    assert_eq!(engine.state(), EngineState::Ready);
    let mut second = submit_one(&engine, submission(vec![2], 5));
    drop(held);
    assert_failed(&finish(&mut first).1, "shut down");
    assert_failed(&read_outputs(&mut second).1, "shut down");
}
