//! Local runs of a prefill node, and decode nodes that are lost or give up.

use corella_core::session::{
    AbortReason, PrefillAction, PrefillEnd, SessionFinish, ToDecode, ToPrefill,
};
use corella_core::{AdmissionError, NodeId, SessionId, StoppingCriteria};

use crate::session::fixture::{DECODE, config, hello, key, peer, submission};
use crate::session::prefill_end::{
    actions, finish, lose_the_only_node, opened, prefilling, runs_locally, say, transferring,
    tries_next,
};

const SESSION: SessionId = SessionId(1);

fn refuse(end: &mut PrefillEnd, run: u32, now_us: u64) -> Vec<PrefillAction> {
    let (num_waiting, limit) = (8, 8);
    let error = AdmissionError::QueueFull { num_waiting, limit };
    end.handle_local_refused(SESSION, run, error, now_us);
    actions(end)
}

fn is_abort(action: &PrefillAction) -> bool {
    matches!(action, PrefillAction::AbortLocal { .. })
}

#[test]
fn only_the_present_run_ends_a_session_when_it_is_refused() {
    let refused = AdmissionError::QueueFull {
        num_waiting: 8,
        limit: 8,
    };
    let refused = SessionFinish::Refused(refused);
    let mut end = prefilling();
    assert_eq!(refuse(&mut end, 1, 1), []);
    assert_eq!(finish(&refuse(&mut end, 0, 2)), Some(&refused));

    // The request continues here with run 1.
    let mut end = transferring();
    let did = lose_the_only_node(&mut end, 1);
    assert_eq!(runs_locally(&did), Some(&[3][..]));
    assert_eq!(refuse(&mut end, 0, 2), []);
    assert_eq!(finish(&refuse(&mut end, 1, 3)), Some(&refused));
}

#[test]
fn a_run_that_has_ended_is_not_aborted() {
    let mut end = transferring();
    assert!(end.cancel(SESSION, 1));
    let did = actions(&mut end);
    assert!(!did.iter().any(is_abort), "{did:?}");
    let mut end = prefilling();
    assert!(end.cancel(SESSION, 1));
    assert!(actions(&mut end).iter().any(is_abort));
}

/// The client sets no limit, so this node's limit holds on both nodes.
#[test]
fn decode_node_and_local_run_are_told_where_the_request_ends() {
    let mut submission = submission(1);
    submission.request.stopping = StoppingCriteria {
        max_tokens: None,
        min_tokens: 2,
        end_token_ids: vec![90],
        stop_token_ids: vec![91, 92],
    };
    let expected = StoppingCriteria {
        max_tokens: Some(8),
        ..submission.request.stopping.clone()
    };
    let mut end = PrefillEnd::new(config(), hello(5)).expect("valid times");
    end.submit(submission, Some(peer(2, 5)), 0).unwrap();
    let told = actions(&mut end)
        .into_iter()
        .find_map(|action| match action {
            PrefillAction::Send {
                message: ToDecode::Allocate(allocate),
                ..
            } => Some(allocate.stopping),
            _ => None,
        });
    assert_eq!(told.as_ref(), Some(&expected));
    end.handle_stream_closed(key(1, 0), 1);
    end.handle_placement(SESSION, None, 2);
    let run = actions(&mut end)
        .into_iter()
        .find_map(|action| match action {
            PrefillAction::SubmitLocally { request, .. } => Some(request.stopping),
            _ => None,
        });
    assert_eq!(run, Some(expected));
}

#[test]
fn a_lost_node_ends_the_sessions_with_it_and_no_others() {
    let mut end = opened();
    end.submit(submission(2), Some(peer(3, 5)), 0).unwrap();
    actions(&mut end);
    end.handle_peer_lost(NodeId(9), 1);
    assert_eq!(actions(&mut end), []);
    end.handle_peer_lost(DECODE, 1);
    let did = actions(&mut end);
    let closes = |session| PrefillAction::CloseStream {
        key: key(session, 0),
    };
    assert!(
        did.contains(&closes(1)) && !did.contains(&closes(2)),
        "{did:?}"
    );
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
}

/// A decode node that gives up for want of heartbeats may be cut off. With another reason it is reachable.
#[test]
fn a_decode_node_that_hears_nothing_is_suspect() {
    let suspect = PrefillAction::MarkSuspect { node: DECODE };
    for (reason, is_suspect) in [
        (AbortReason::PeerLost, true),
        (AbortReason::LoadFailed, false),
    ] {
        let mut end = prefilling();
        let did = say(&mut end, key(1, 0), ToPrefill::Abort(reason), 1);
        assert_eq!(did.contains(&suspect), is_suspect, "{did:?}");
        assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    }
}
