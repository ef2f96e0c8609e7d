//! One session on a prefill node, fault by fault.

use corella_core::session::{
    AbortReason, Allocated, ExportTask, Finish, PrefillAction, PrefillEnd, SessionFinish,
    SessionKey, SubmissionError, ToDecode, ToPrefill,
};
use corella_core::{
    FinishReason, KvFact, Namespace, NodeId, PageId, PageTable, RequestId, SessionId, StepId,
    StoppingCriteria,
};

use crate::session::fixture::{
    DECODE, SECOND_US, config, first_token, hello, key, output, peer, submission, tokens,
};

const SESSION: SessionId = SessionId(1);

/// All actions. The engine takes every run, and gives it the run's number as its id.
pub fn actions(end: &mut PrefillEnd) -> Vec<PrefillAction> {
    let mut actions = Vec::new();
    end.check_invariants();
    while let Some(action) = end.poll_action() {
        if let PrefillAction::SubmitLocally { session, run, .. } = &action {
            end.handle_submitted(*session, *run, RequestId((*run).into()), 0);
        }
        actions.push(action);
    }
    end.check_invariants();
    actions
}

pub fn delete(key: SessionKey) -> PrefillAction {
    PrefillAction::Export(ExportTask::Delete { key })
}

fn release(run: u64) -> PrefillAction {
    let request = RequestId(run);
    PrefillAction::Export(ExportTask::ReleaseHold { request })
}

pub fn abort_run(run: u64) -> PrefillAction {
    PrefillAction::AbortLocal {
        session: SESSION,
        request: RequestId(run),
    }
}

/// The run had to give its pages back before any of its rows was computed.
fn fail_export(end: &mut PrefillEnd, now_us: u64) {
    let fact = KvFact::ExportEnded {
        request: RequestId(0),
        num_rows: 0,
        state: None,
    };
    end.handle_kv_fact(&fact, now_us);
}

pub fn say(
    end: &mut PrefillEnd,
    key: SessionKey,
    message: ToPrefill,
    now_us: u64,
) -> Vec<PrefillAction> {
    end.handle_message(key, message, now_us);
    actions(end)
}

/// The decode node is lost, and placement knows no other.
pub fn lose_the_only_node(end: &mut PrefillEnd, now_us: u64) -> Vec<PrefillAction> {
    end.handle_stream_closed(key(1, 0), now_us);
    assert_eq!(tries_next(&actions(end)), Some(&[DECODE][..]));
    end.handle_placement(SESSION, None, now_us);
    actions(end)
}

/// The session has asked for pages on the decode node.
pub fn opened() -> PrefillEnd {
    let mut end = PrefillEnd::new(config(), hello(5)).expect("valid times");
    end.submit(submission(1), Some(peer(2, 5)), 0).unwrap();
    let did = actions(&mut end);
    let open = PrefillAction::OpenStream {
        key: key(1, 0),
        node: DECODE,
    };
    assert_eq!((&did[0], did.len()), (&open, 3));
    end
}

/// The prompt is being computed.
pub fn prefilling() -> PrefillEnd {
    let mut end = opened();
    let did = allocated(&mut end, key(1, 0), 0);
    let [
        PrefillAction::SubmitLocally {
            run: 0, request, ..
        },
        PrefillAction::Export(ExportTask::Open { first_row: 4, .. }),
    ] = &did[..]
    else {
        panic!("{did:?}");
    };
    assert!(request.exports_kv && request.stopping.max_tokens == Some(1));
    end
}

pub fn allocated(end: &mut PrefillEnd, key: SessionKey, now_us: u64) -> Vec<PrefillAction> {
    say(end, key, ToPrefill::Hello(Box::new(hello(5))), now_us);
    let message = ToPrefill::Allocated(Allocated {
        num_cached_rows: 4,
        granted_as: Some(1),
    });
    say(end, key, message, now_us)
}

/// The first token has been drawn, and sent to client and decode node.
pub fn transferring() -> PrefillEnd {
    let mut end = prefilling();
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 0);
    let did = actions(&mut end);
    assert_eq!(emitted(&did), [3]);
    assert!(did.contains(&PrefillAction::Send {
        key: key(1, 0),
        message: ToDecode::FirstToken({
            let mut first_token = first_token(3);
            first_token.num_cached_tokens = 4;
            first_token
        }),
    }));
    end
}

pub fn emitted(did: &[PrefillAction]) -> Vec<u32> {
    let events = did.iter().filter_map(|action| match action {
        PrefillAction::Emit { event, .. } => event.sample.as_ref(),
        _ => None,
    });
    events.map(|sample| sample.token).collect()
}

pub fn finish(did: &[PrefillAction]) -> Option<&SessionFinish> {
    did.iter().find_map(|action| match action {
        PrefillAction::Emit { event, .. } => event.finish.as_ref(),
        _ => None,
    })
}

/// The tokens after which a run of the whole request begins.
pub fn runs_locally(did: &[PrefillAction]) -> Option<&[u32]> {
    did.iter().find_map(|action| match action {
        PrefillAction::SubmitLocally { request, .. } if !request.exports_kv => {
            Some(&request.output[..])
        }
        _ => None,
    })
}

pub fn tries_next(did: &[PrefillAction]) -> Option<&[NodeId]> {
    did.iter().find_map(|action| match action {
        PrefillAction::TryNext { tried, .. } => Some(&tried[..]),
        _ => None,
    })
}

#[test]
fn tokens_pass_through_in_order_each_once() {
    let (mut end, key) = (transferring(), key(1, 0));
    let did = say(&mut end, key, ToPrefill::LoadDone, 1);
    assert_eq!(did, [delete(key)]);
    end.handle_deleted(key, 2);
    assert_eq!(actions(&mut end), [release(0)]);
    assert_eq!(emitted(&say(&mut end, key, tokens(1, &[4, 5]), 3)), [4, 5]);
    // The last token is repeated, with one more after it.
    assert_eq!(emitted(&say(&mut end, key, tokens(2, &[5, 6]), 3)), [6]);
    let message = ToPrefill::Finish(Finish {
        reason: FinishReason::EndToken,
        num_output_tokens: 4,
    });
    let did = say(&mut end, key, message, 4);
    let finished = SessionFinish::Finished(FinishReason::EndToken);
    assert_eq!(finish(&did), Some(&finished));
    assert_eq!(end.stats().num_sessions, 0);
    assert_eq!(end.stats().num_exports, 0);
}

/// Transport and engine report through different threads.
#[test]
fn rows_may_be_loaded_before_the_engine_says_that_they_are_computed() {
    let (mut end, key) = (prefilling(), key(1, 0));
    let did = say(&mut end, key, ToPrefill::LoadDone, 1);
    assert_eq!(did, [delete(key)]);
    end.handle_deleted(key, 1);
    assert_eq!(actions(&mut end), []);
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 2);
    let did = actions(&mut end);
    assert_eq!((emitted(&did), runs_locally(&did)), (vec![3], None));
    assert!(did.iter().any(|action| matches!(
        action,
        PrefillAction::Send {
            message: ToDecode::FirstToken(_),
            ..
        }
    )));
    assert_eq!(did.last(), Some(&release(0)));
    assert_eq!(emitted(&say(&mut end, key, tokens(1, &[4]), 3)), [4]);
}

#[test]
fn a_token_that_is_missing_is_computed_here_and_not_skipped() {
    let (mut end, key) = (transferring(), key(1, 0));
    let did = say(&mut end, key, tokens(2, &[5]), 1);
    assert_eq!(emitted(&did), []);
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    end.handle_placement(SESSION, None, 1);
    assert_eq!(runs_locally(&actions(&mut end)), Some(&[3][..]));
    // Later messages of the decode node have no recipient.
    assert_eq!(say(&mut end, key, tokens(1, &[4]), 2), []);
    end.handle_local_output(output(1, Some(4), None), 3);
    assert_eq!(emitted(&actions(&mut end)), [4]);
}

/// A client that gets an end token before the end of the request takes it for text.
#[test]
fn the_last_token_and_the_end_are_one_event_whatever_the_decode_node_says_then() {
    let mut submission = submission(1);
    submission.request.stopping.end_token_ids = vec![9];
    submission.request.stopping.stop_token_ids = vec![8];
    for (last, reason) in [
        (vec![9], FinishReason::EndToken),
        (vec![4, 8], FinishReason::StopToken),
        (vec![4, 5, 6, 7, 4, 5, 6], FinishReason::Length),
    ] {
        let mut end = PrefillEnd::new(config(), hello(5)).expect("valid times");
        let key = key(1, 0);
        end.submit(submission.clone(), Some(peer(2, 5)), 0).unwrap();
        allocated(&mut end, key, 0);
        end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 0);
        say(&mut end, key, ToPrefill::LoadDone, 1);
        end.handle_deleted(key, 1);
        let num_output_tokens = last.len() as u32 + 1;
        let did = say(&mut end, key, tokens(1, &last), 2);
        assert_eq!(emitted(&did), last);
        let ends = did.iter().filter_map(|action| match action {
            PrefillAction::Emit { event, .. } if event.finish.is_some() => Some(event),
            _ => None,
        });
        let ends: Vec<_> = ends.collect();
        assert_eq!(ends.len(), 1);
        assert_eq!(
            ends[0].finish,
            Some(SessionFinish::Finished(reason.clone()))
        );
        assert_eq!(
            ends[0].sample.as_ref().map(|sample| sample.token),
            last.last().copied()
        );
        assert_eq!(ends[0].num_output_tokens, num_output_tokens);
        // The decode node has freed everything by itself, and is not told.
        let is_told = |action: &PrefillAction| matches!(action, PrefillAction::Send { .. });
        assert!(!did.iter().any(is_told));
        let message = ToPrefill::Finish(Finish {
            reason,
            num_output_tokens,
        });
        assert_eq!(say(&mut end, key, message, 3), []);
        end.handle_stream_closed(key, 4);
        assert_eq!(actions(&mut end), []);
        assert_eq!(end.stats().num_sessions, 0);
        assert_eq!(end.stats().num_exports, 0);
    }
}

#[test]
fn an_end_that_leaves_tokens_out_is_none() {
    let (mut end, key) = (transferring(), key(1, 0));
    let message = ToPrefill::Finish(Finish {
        reason: FinishReason::EndToken,
        num_output_tokens: 3,
    });
    let did = say(&mut end, key, message, 1);
    assert_eq!(finish(&did), None);
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
}

/// A run that had to give its pages back may be waiting for the very pages that are held for it.
#[test]
fn pages_of_an_export_that_is_cut_short_are_let_go_while_the_run_goes_on() {
    let (mut end, key) = (prefilling(), key(1, 0));
    fail_export(&mut end, 1);
    let did = actions(&mut end);
    assert!(did.contains(&delete(key)));
    assert_eq!((tries_next(&did), runs_locally(&did)), (None, None));
    end.handle_deleted(key, 2);
    assert_eq!(actions(&mut end), [release(0)]);
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 3);
    assert_eq!(runs_locally(&actions(&mut end)), Some(&[3][..]));
}

/// The announced rows were computed, and the run did not reach the others.
#[test]
fn a_decode_node_is_told_at_once_that_rows_are_missing() {
    let (mut end, key) = (prefilling(), key(1, 0));
    let (request, step) = (RequestId(0), StepId(1));
    let announced = KvFact::Exported {
        request,
        step,
        first_row: 0,
        end_row: 8,
        tables: vec![PageTable {
            num_gone: 0,
            pages: vec![PageId(3), PageId(4)],
        }],
    };
    end.handle_kv_fact(&announced, 1);
    end.handle_layer_done(step, 0);
    end.handle_layer_done(step, 1);
    assert_eq!(actions(&mut end).len(), 3);
    let cut_short = KvFact::ExportEnded {
        request,
        num_rows: 8,
        state: None,
    };
    end.handle_kv_fact(&cut_short, 2);
    let message = ToDecode::Abort(AbortReason::LoadFailed);
    assert!(actions(&mut end).contains(&PrefillAction::Send { key, message }));
}

/// The rows were read while a step that has failed computed them, so the first token does not prove them valid.
#[test]
fn rows_that_were_loaded_of_an_export_that_is_cut_short_are_worth_nothing() {
    let (mut end, key) = (prefilling(), key(1, 0));
    say(&mut end, key, ToPrefill::LoadDone, 1);
    fail_export(&mut end, 2);
    let message = ToDecode::Abort(AbortReason::LoadFailed);
    assert!(actions(&mut end).contains(&PrefillAction::Send { key, message }));
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 3);
    assert_eq!(runs_locally(&actions(&mut end)), Some(&[3][..]));
}

/// Rule 43, and pages stay until their last read has ended.
#[test]
fn a_cancel_ends_everything_at_once_and_only_once() {
    let (mut end, key) = (prefilling(), key(1, 0));
    assert!(end.cancel(SESSION, 1));
    let did = actions(&mut end);
    let abort = PrefillAction::Send {
        key,
        message: ToDecode::Abort(AbortReason::Cancelled),
    };
    assert_eq!(
        did[1..],
        [
            abort,
            PrefillAction::CloseStream { key },
            delete(key),
            abort_run(0),
        ]
    );
    assert!(!end.cancel(SESSION, 1));
    assert_eq!(actions(&mut end), []);
    end.handle_deleted(key, 2);
    assert_eq!(actions(&mut end), [release(0)]);
    assert_eq!(end.stats().num_exports, 0);
    let again = end.submit(submission(1), None, 3);
    assert_eq!(again, Err(SubmissionError::Ended));
    assert!(!end.cancel(SessionId(9), 3));
    let late = end.submit(submission(9), None, 4);
    assert_eq!(late, Err(SubmissionError::Ended));
    end.handle_timeout(3 + config().tombstone_us);
    assert_eq!(end.stats(), Default::default());
}

/// Rule 43: in the first case the decode node loads the rows, and in the second case this node has taken its place.
#[test]
fn a_cancel_behind_the_first_token_leaves_nothing_on_the_prefill_node() {
    let (mut end, key) = (transferring(), key(1, 0));
    assert!(end.cancel(SESSION, 1));
    assert!(actions(&mut end).contains(&delete(key)));
    end.handle_deleted(key, 2);
    assert_eq!(actions(&mut end), [release(0)]);

    let mut end = transferring();
    let did = lose_the_only_node(&mut end, 1);
    assert_eq!(runs_locally(&did), Some(&[3][..]));
    assert!(end.cancel(SESSION, 2));
    let did = actions(&mut end);
    assert!(did.contains(&abort_run(1)), "{did:?}");
}

#[test]
fn a_hold_ends_when_nothing_is_loaded_for_its_lease() {
    let (mut end, key) = (transferring(), key(1, 0));
    let lease_us = config().hold_lease_us;
    end.handle_load_progress(key, 20 * SECOND_US);
    let renewed_us = 20 * SECOND_US + lease_us;
    let did = actions(&mut end);
    assert!(
        matches!(did[..], [PrefillAction::Export(ExportTask::RenewHold { until_us, .. })] if until_us == renewed_us)
    );
    for second in 1..50 {
        say(&mut end, key, ToPrefill::Heartbeat, second * SECOND_US);
        end.handle_timeout(second * SECOND_US);
    }
    assert_eq!(runs_locally(&actions(&mut end)), None);
    end.handle_timeout(renewed_us);
    assert_eq!(runs_locally(&actions(&mut end)), Some(&[3][..]));
}

/// The first decode node is lost while the prompt is computed, and the pages have to go while the second decode node is
/// asked.
#[test]
fn a_hold_ends_while_another_decode_node_is_asked() {
    let mut end = prefilling();
    end.handle_stream_closed(key(1, 0), 1);
    let did = actions(&mut end);
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    end.handle_deleted(key(1, 0), 1);
    end.handle_placement(SESSION, Some(peer(3, 5)), 1);
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 2);
    assert_eq!(emitted(&actions(&mut end)), [3]);
    let request = RequestId(0);
    end.handle_kv_fact(&KvFact::LeaseEnded { request }, 3);
    let did = actions(&mut end);
    assert_eq!(tries_next(&did), None);
    assert_eq!(runs_locally(&did), Some(&[3][..]));
    assert!(did.contains(&release(0)), "{did:?}");
}

#[test]
fn a_first_token_that_ends_the_request_is_told_to_no_decode_node() {
    let mut end = prefilling();
    end.handle_local_output(output(0, Some(3), Some(FinishReason::EndToken)), 1);
    let did = actions(&mut end);
    assert_eq!((emitted(&did), finish(&did).is_some()), (vec![3], true));
    let abort = PrefillAction::Send {
        key: key(1, 0),
        message: ToDecode::Abort(AbortReason::Finished),
    };
    assert!(did.contains(&abort));
}

#[test]
fn a_node_that_was_started_again_is_noticed_by_its_greeting() {
    let mut end = opened();
    let did = say(&mut end, key(1, 0), ToPrefill::Hello(Box::new(hello(6))), 1);
    let noticed = PrefillAction::MarkRestarted {
        node: DECODE,
        incarnation: hello(6).incarnation,
    };
    assert!(did.contains(&noticed), "{did:?}");
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
}

#[test]
fn a_deadline_ends_a_request_on_time_wherever_it_is() {
    let mut end = PrefillEnd::new(config(), hello(5)).expect("valid times");
    let mut submission = submission(1);
    submission.deadline_us = Some(77_000);
    end.submit(submission, Some(peer(2, 5)), 0).unwrap();
    end.handle_timeout(76_999);
    assert_eq!(finish(&actions(&mut end)), None);
    end.handle_timeout(77_000);
    let did = actions(&mut end);
    assert_eq!(finish(&did), Some(&SessionFinish::DeadlinePassed));
}

/// Pages that are still read for an ended session count like a session, so that readers that do not stop never hold
/// more than twice the permitted number of runs.
#[test]
fn what_is_still_read_takes_the_place_of_a_session() {
    let mut config = config();
    config.max_sessions = 1;
    let mut end = PrefillEnd::new(config, hello(5)).expect("valid times");
    end.submit(submission(1), Some(peer(2, 5)), 0).unwrap();
    actions(&mut end);
    allocated(&mut end, key(1, 0), 0);
    assert!(end.cancel(SESSION, 1));
    actions(&mut end);
    let stats = end.stats();
    assert_eq!((stats.num_sessions, stats.num_exports), (0, 1));
    let refused = Err(SubmissionError::TooManySessions { limit: 1 });
    assert_eq!(end.submit(submission(2), None, 2), refused);
    end.handle_deleted(key(1, 0), 3);
    assert_eq!(end.submit(submission(2), None, 4), Ok(()));
}

/// Placement reserves pages for the expected output, not for `max_tokens`.
#[test]
fn outputs_are_expected_to_be_as_long_as_earlier_ones() {
    let mut end = PrefillEnd::new(config(), hello(5)).expect("valid times");
    let ending = |max_tokens| StoppingCriteria {
        max_tokens,
        end_token_ids: vec![9],
        ..StoppingCriteria::default()
    };
    let endless = StoppingCriteria {
        end_token_ids: Vec::new(),
        ..ending(Some(4000))
    };
    let expected = |end: &PrefillEnd, session, stopping: &StoppingCriteria| {
        end.expected_output(SessionId(session), &Namespace::default(), stopping)
    };
    let mean = |end: &PrefillEnd, stopping: &StoppingCriteria| {
        let lengths = (0..100).map(|session| expected(end, session, stopping));
        lengths.sum::<u32>() / 100
    };
    // Nothing is known yet: up to 512 tokens, all lengths are equally likely.
    assert!((200..=312).contains(&mean(&end, &ending(Some(4000)))));
    assert_eq!(expected(&end, 1, &endless), 4000);

    for session in 1..=40 {
        let mut ending_request = submission(session);
        ending_request.request.stopping = ending(Some(4000));
        ending_request.max_tokens = 4000;
        end.submit(ending_request, Some(peer(2, 5)), 0).unwrap();
        allocated(&mut end, key(session, 0), 0);
        end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 0);
        say(&mut end, key(session, 0), tokens(1, &[4; 18]), 0);
        // The twentieth is an end token.
        say(&mut end, key(session, 0), tokens(19, &[9]), 0);
        end.handle_deleted(key(session, 0), 0);
        actions(&mut end);
    }
    let mean_now = mean(&end, &ending(None));
    assert!((20..=60).contains(&mean_now), "{mean_now}");
    assert_eq!(expected(&end, 1, &ending(Some(5))), 5);
    assert_eq!(expected(&end, 1, &endless), 4000);
}
