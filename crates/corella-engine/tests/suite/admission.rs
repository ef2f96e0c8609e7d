//! Refused requests, in the caller's thread or in the scheduler.

use corella_core::AdmissionError;
use corella_engine::{Engine, EngineConfig, EngineError, StreamEvent, SubmitError};
use corella_model::MockExecutor;
use corella_test::wait_until;

use crate::fixture::{assert_at_rest, limits, model, start, submission};

#[test]
fn what_can_never_run_is_refused_in_the_callers_thread() {
    let engine = start(limits(10, 1), model(&limits(10, 1)));
    assert_eq!(
        engine.submit(submission(vec![], 1)).err(),
        Some(SubmitError::Refused(AdmissionError::EmptyPrompt))
    );
    assert!(matches!(
        engine.submit(submission(vec![1; 100], 29)).err(),
        Some(SubmitError::Refused(AdmissionError::ContextExceeded { .. }))
    ));
    assert!(matches!(
        engine.submit(submission(vec![1; 30], 20)).err(),
        Some(SubmitError::Refused(AdmissionError::PoolExceeded { .. }))
    ));
    assert_at_rest(&engine);
}

#[test]
fn a_full_queue_refuses_all_choices_or_none_and_leaving_makes_room() {
    let mut limits = limits(200, 1);
    limits.max_num_seqs = 2;
    limits.max_queued_requests = 4;
    let mock = model(&limits);
    let gate = mock.gate.clone();
    gate.close();
    let engine = start(limits, mock);
    let full = |num_choices| {
        let mut submission = submission(vec![1, 2], 100);
        submission.num_choices = num_choices;
        let mut streams = match engine.submit(submission) {
            Ok(streams) => streams,
            Err(SubmitError::Refused(AdmissionError::QueueFull { limit, .. })) => {
                assert_eq!(limit, 4);
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let firsts: Vec<_> = streams.iter_mut().map(|s| s.next_blocking()).collect();
        if firsts.iter().all(|e| *e == Some(StreamEvent::Accepted)) {
            return Some(streams);
        }
        for first in firsts {
            let Some(StreamEvent::Refused(AdmissionError::QueueFull { num_waiting, limit })) =
                first
            else {
                panic!("{first:?}");
            };
            assert!(num_waiting + num_choices as usize > limit as usize);
            assert_eq!(limit, if num_choices == 7 { 6 } else { 4 });
        }
        None
    };
    assert!(
        full(7).is_none(),
        "seven choices were queued where two may start and four may wait"
    );
    let running: Vec<_> = (0..2).map(|_| full(1).expect("no slot is free")).collect();
    // The second request starts after the first one's step, and the counters show it after one more step.
    gate.let_through(2);
    wait_until("both run", || engine.stats().scheduler.num_running == 2);
    let mut waiting: Vec<_> = (0..3)
        .map(|_| full(1).expect("the queue is full"))
        .collect();
    assert!(
        full(2).is_none(),
        "two choices were queued where one place is left"
    );
    waiting.push(full(1).expect("the last place is taken"));
    assert!(full(1).is_none());
    drop(waiting.pop());
    assert!(
        full(1).is_some(),
        "a request left the queue, but its place is taken"
    );
    drop((running, waiting));
    gate.open();
    assert_at_rest(&engine);
    assert!(engine.stats().num_refused > 0);
}

#[test]
fn a_pool_of_another_size_is_refused_at_start() {
    let mock = model(&limits(20, 1));
    let started = Engine::start(
        EngineConfig::new(limits(10, 1)),
        Box::new(MockExecutor::new(mock)),
    );
    assert!(matches!(started.err(), Some(EngineError::KvLayout { .. })));
}
