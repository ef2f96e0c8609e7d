//! A decode node computes a prompt itself: both ends of the session, fault by fault.

use corella_core::session::{
    AbortReason, Allocated, DecodeAction, DecodeEnd, ExportTask, Finish, Hello, PrefillAction,
    PrefillEnd, SessionConfig, SessionFinish, SessionKey, ToDecode, ToPrefill,
};
use corella_core::{ComputePlace, FinishReason, RequestId};

use crate::session::fixture::{
    DECODE, NUM_ROWS, PREFILL, SECOND_US, allocate, config, first_token, hello, key, output, peer,
    submission, tokens,
};

fn new_hello() -> Hello {
    Hello {
        protocol_minor: 1,
        ..hello(5)
    }
}

fn actions(end: &mut PrefillEnd) -> Vec<PrefillAction> {
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

fn say(end: &mut PrefillEnd, message: ToPrefill, now_us: u64) -> Vec<PrefillAction> {
    end.handle_message(key(1, 0), message, now_us);
    actions(end)
}

fn allocated(num_cached_rows: u32, granted_as: Option<u64>) -> ToPrefill {
    ToPrefill::Allocated(Allocated {
        num_cached_rows,
        granted_as,
    })
}

fn opened(config: SessionConfig, theirs: Hello) -> PrefillEnd {
    let mut end = PrefillEnd::new(config, new_hello()).expect("valid times");
    let mut asked = submission(1);
    asked.asks_first = true;
    end.submit(asked, Some(peer(2, 5)), 0).unwrap();
    actions(&mut end);
    say(&mut end, ToPrefill::Hello(Box::new(theirs)), 0);
    end
}

/// The decode node has pages and 8 of the 10 rows, and the driver has been asked.
fn asking(config: SessionConfig) -> PrefillEnd {
    let mut end = opened(config, new_hello());
    let decide = PrefillAction::Decide {
        key: key(1, 0),
        node: DECODE,
        num_cached_rows: 8,
    };
    assert_eq!(say(&mut end, allocated(8, Some(1)), 0), [decide]);
    end
}

fn send(message: ToDecode) -> PrefillAction {
    let key = key(1, 0);
    PrefillAction::Send { key, message }
}

/// The decode node has been asked to compute.
fn left(config: SessionConfig) -> PrefillEnd {
    let mut end = asking(config);
    end.handle_decision(key(1, 0), ComputePlace::There, 0);
    assert_eq!(actions(&mut end), [send(ToDecode::Compute)]);
    end
}

/// Whether a run begins that exports rows.
fn computes_here(did: &[PrefillAction]) -> bool {
    did.iter().any(|action| {
        matches!(action, PrefillAction::SubmitLocally { request, .. } if request.exports_kv)
    })
}

fn emitted(did: &[PrefillAction]) -> Vec<(u32, u32)> {
    let events = did.iter().filter_map(|action| match action {
        PrefillAction::Emit { event, .. } => Some(event),
        _ => None,
    });
    let tokens = events.filter_map(|event| {
        Some((
            event.sample.as_ref()?.token,
            event.cache_use.num_cached_tokens,
        ))
    });
    tokens.collect()
}

fn finish(did: &[PrefillAction]) -> Option<&SessionFinish> {
    did.iter().find_map(|action| match action {
        PrefillAction::Emit { event, .. } => event.finish.as_ref(),
        _ => None,
    })
}

#[test]
fn a_decode_node_that_computes_sends_all_tokens() {
    let mut end = left(config());
    // A repeated message has no effect.
    assert_eq!(say(&mut end, allocated(8, Some(1)), 1), []);
    end.handle_decision(key(1, 0), ComputePlace::Here, 1);
    assert_eq!(actions(&mut end), []);
    assert_eq!(
        emitted(&say(&mut end, tokens(0, &[3, 4]), 2)),
        [(3, 8), (4, 8)]
    );
    assert_eq!(emitted(&say(&mut end, tokens(1, &[4, 5]), 3)), [(5, 8)]);
    let end_of_all = ToPrefill::Finish(Finish {
        reason: FinishReason::EndToken,
        num_output_tokens: 3,
    });
    let did = say(&mut end, end_of_all, 4);
    let ended = SessionFinish::Finished(FinishReason::EndToken);
    assert_eq!(finish(&did), Some(&ended));
    assert_eq!(end.stats().num_exports, 0);
}

#[test]
fn a_prompt_that_is_decided_to_be_computed_here_is_sent_as_ever() {
    let mut end = asking(config());
    end.handle_decision(key(1, 0), ComputePlace::Here, 0);
    let did = actions(&mut end);
    assert!(computes_here(&did), "{did:?}");
    let store = PrefillAction::Export(ExportTask::Open {
        key: key(1, 0),
        run: 0,
        first_row: 8,
        num_rows: NUM_ROWS,
    });
    assert!(did.contains(&store), "{did:?}");

    // The decode node has all rows, and reports it before the decision.
    let mut end = opened(config(), new_hello());
    say(&mut end, allocated(NUM_ROWS, Some(1)), 0);
    assert_eq!(say(&mut end, ToPrefill::LoadDone, 0), []);
    end.handle_decision(key(1, 0), ComputePlace::Here, 0);
    assert!(computes_here(&actions(&mut end)));
    end.handle_local_output(output(0, Some(3), Some(FinishReason::Length)), 1);
    let did = actions(&mut end);
    assert!(
        did.iter().any(|action| matches!(
            action,
            PrefillAction::Send {
                message: ToDecode::FirstToken(_),
                ..
            }
        )),
        "{did:?}"
    );
}

/// A node of an earlier version, a node that waits for another choice, and a node of other arithmetic, which would draw
/// other tokens, are not asked to compute.
#[test]
fn not_every_node_is_asked() {
    let mut end = opened(config(), hello(5));
    assert!(computes_here(&say(&mut end, allocated(8, Some(1)), 0)));
    let mut end = opened(config(), new_hello());
    assert!(computes_here(&say(&mut end, allocated(0, None), 0)));
    let others: [fn(&mut Hello); 3] = [
        |hello| hello.weight_format = "int4".into(),
        |hello| hello.kv_format = "int8".into(),
        |hello| hello.instruction_set = "avx2".into(),
    ];
    for change in others {
        let mut theirs = new_hello();
        change(&mut theirs);
        assert_ne!(theirs, new_hello());
        let mut end = opened(config(), theirs);
        assert!(computes_here(&say(&mut end, allocated(8, Some(1)), 0)));
    }
}

#[test]
fn without_a_decision_the_prompt_is_computed_here_when_the_search_is_over() {
    let mut end = asking(config());
    end.handle_timeout(config().allocate_budget_us - 1);
    assert_eq!(actions(&mut end), []);
    end.handle_timeout(config().allocate_budget_us);
    assert!(computes_here(&actions(&mut end)));
    // The decision has already been made.
    end.handle_decision(key(1, 0), ComputePlace::There, SECOND_US);
    assert_eq!(actions(&mut end), []);
}

/// A decode node that is lost before the decision is replaced. The next node is not asked whether it computes the
/// prompt.
#[test]
fn a_node_that_is_lost_before_the_decision_is_replaced() {
    let mut end = asking(config());
    end.handle_stream_closed(key(1, 0), 10);
    let did = actions(&mut end);
    let next = |did: &[PrefillAction]| {
        let mut actions = did.iter();
        actions.any(|action| matches!(action, PrefillAction::TryNext { .. }))
    };
    assert!(next(&did), "{did:?}");
    end.handle_placement(key(1, 0).session, Some(peer(3, 5)), 20);
    actions(&mut end);
    for message in [
        ToPrefill::Hello(Box::new(new_hello())),
        allocated(8, Some(1)),
    ] {
        end.handle_message(key(1, 1), message, 30);
    }
    assert!(computes_here(&actions(&mut end)));
}

#[test]
fn a_node_that_is_lost_while_it_computes_is_replaced_once() {
    let mut end = left(config());
    // The decode node is lost when it has been silent for this long.
    let lost_us = config().lost_after_us;
    end.handle_timeout(lost_us - 1);
    assert_eq!(actions(&mut end), [send(ToDecode::Heartbeat)]);
    end.handle_timeout(lost_us);
    let did = actions(&mut end);
    assert!(did.contains(&send(ToDecode::Abort(AbortReason::PeerLost))));
    end.handle_placement(key(1, 0).session, None, lost_us);
    let did = actions(&mut end);
    let [PrefillAction::SubmitLocally { request, .. }] = &did[..] else {
        panic!("{did:?}");
    };
    assert_eq!(request.output, []);
    // The cached tokens are now those of this node.
    end.handle_local_output(output(0, Some(3), None), lost_us);
    assert_eq!(emitted(&actions(&mut end)), [(3, 4)]);
}

#[test]
fn a_request_goes_on_behind_the_tokens_of_a_lost_node() {
    for resumes_locally in [true, false] {
        let config = SessionConfig {
            resumes_locally,
            ..config()
        };
        let mut end = left(config);
        say(&mut end, tokens(0, &[3, 4]), 1);
        end.handle_stream_closed(key(1, 0), 2);
        actions(&mut end);
        end.handle_placement(key(1, 0).session, None, 2);
        let did = actions(&mut end);
        let resumed = did.iter().find_map(|action| match action {
            PrefillAction::SubmitLocally { request, .. } => Some(&request.output[..]),
            _ => None,
        });
        let lost = SessionFinish::DecodeLost(AbortReason::PeerLost);
        match resumes_locally {
            true => assert_eq!((resumed, finish(&did)), (Some(&[3, 4][..]), None)),
            false => assert_eq!((resumed, finish(&did)), (None, Some(&lost))),
        }
        // Tokens under way are late.
        assert_eq!(say(&mut end, tokens(2, &[5]), 3), []);
    }
}

#[test]
fn a_client_that_leaves_ends_both_waits() {
    for mut end in [asking(config()), left(config())] {
        assert!(end.cancel(key(1, 0).session, 1));
        let did = actions(&mut end);
        assert!(did.contains(&send(ToDecode::Abort(AbortReason::Cancelled))));
        assert_eq!(end.stats().num_sessions, 0);
    }
}

/// Tokens before the decision are out of turn.
#[test]
fn a_node_that_was_told_nothing_sends_no_tokens() {
    let mut end = asking(config());
    let did = say(&mut end, tokens(0, &[3]), 1);
    assert!(did.contains(&send(ToDecode::Abort(AbortReason::ProtocolViolated))));
}

mod on_the_decode_node {
    use super::*;

    const KEY: SessionKey = SessionKey {
        session: corella_core::SessionId(1),
        attempt: 0,
        prefill_incarnation: corella_core::Incarnation(5),
        decode_incarnation: corella_core::Incarnation(5),
    };

    fn acts(end: &mut DecodeEnd) -> Vec<DecodeAction> {
        end.check_invariants();
        std::iter::from_fn(|| end.poll_action()).collect()
    }

    fn tell(end: &mut DecodeEnd, message: ToDecode) -> Vec<DecodeAction> {
        end.handle_message(PREFILL, KEY, message, 1);
        acts(end)
    }

    fn told(message: ToPrefill) -> DecodeAction {
        DecodeAction::Send { key: KEY, message }
    }

    /// Pages are reserved, and this many rows were cached.
    fn reserved(num_cached_rows: u32) -> DecodeEnd {
        let mut end = DecodeEnd::new(config(), new_hello()).expect("valid times");
        tell(&mut end, ToDecode::Hello(Box::new(new_hello())));
        tell(&mut end, ToDecode::Allocate(Box::new(allocate())));
        let allocated = Allocated {
            num_cached_rows,
            granted_as: Some(1),
        };
        end.handle_reserved(KEY, Ok(allocated), 0);
        acts(&mut end);
        end
    }

    /// Returns a node whose cancelled load may write until the cancellation is confirmed.
    fn stopping() -> DecodeEnd {
        let mut end = reserved(8);
        let cancel = DecodeAction::CancelLoad { key: KEY };
        assert_eq!(tell(&mut end, ToDecode::Compute), [cancel]);
        end
    }

    #[test]
    fn it_computes_when_its_load_writes_no_more() {
        let compute = || DecodeAction::Compute { key: KEY };
        let mut end = stopping();
        assert_eq!(tell(&mut end, ToDecode::Compute), []);
        end.handle_load_cancelled(KEY, 2);
        assert_eq!(acts(&mut end), [compute()]);
        assert_eq!(tell(&mut end, ToDecode::Compute), []);
        end.handle_load_failed(KEY, 3);
        end.handle_local_output(KEY, output(0, Some(3), None), 4);
        end.handle_local_output(KEY, output(0, Some(4), Some(FinishReason::Length)), 5);
        let finished = Finish {
            reason: FinishReason::Length,
            num_output_tokens: 2,
        };
        let expected = [
            told(tokens(0, &[3])),
            told(tokens(1, &[4])),
            told(ToPrefill::Finish(finished)),
            DecodeAction::CloseStream { key: KEY },
        ];
        assert_eq!(acts(&mut end), expected);
        assert_eq!(end.stats().num_sessions, 0);

        // With all rows, no load is needed.
        let mut end = reserved(NUM_ROWS);
        assert_eq!(tell(&mut end, ToDecode::Compute), [compute()]);
    }

    #[test]
    fn a_session_that_ends_keeps_its_pages_until_its_load_is_at_rest() {
        let mut end = stopping();
        let did = tell(&mut end, ToDecode::Abort(AbortReason::Cancelled));
        let expected = [
            DecodeAction::CloseStream { key: KEY },
            DecodeAction::AbortLocal { key: KEY },
        ];
        assert_eq!(did, expected);
        assert_eq!(end.stats().num_quarantined, 1);
        end.handle_load_cancelled(KEY, 2);
        assert_eq!(acts(&mut end), [DecodeAction::Release { key: KEY }]);
        assert_eq!(end.stats().num_sessions, 0);

        let mut end = reserved(NUM_ROWS);
        tell(&mut end, ToDecode::Compute);
        let did = tell(&mut end, ToDecode::Abort(AbortReason::Cancelled));
        assert_eq!(did, expected);
        assert_eq!(end.stats().num_sessions, 0);
    }

    #[test]
    fn a_first_token_and_an_order_to_compute_exclude_each_other() {
        let violation = told(ToPrefill::Abort(AbortReason::ProtocolViolated));
        for first in [true, false] {
            let mut messages = [ToDecode::FirstToken(first_token(3)), ToDecode::Compute];
            if !first {
                messages.reverse();
            }
            for num_cached_rows in [8, NUM_ROWS] {
                let mut end = reserved(num_cached_rows);
                let mut did = Vec::new();
                for message in messages.clone() {
                    did.extend(tell(&mut end, message));
                }
                assert!(did.contains(&violation), "{did:?}");
            }
        }
        // Before pages are reserved.
        let mut end = DecodeEnd::new(config(), new_hello()).expect("valid times");
        tell(&mut end, ToDecode::Hello(Box::new(new_hello())));
        assert!(tell(&mut end, ToDecode::Compute).contains(&violation));
    }
}
