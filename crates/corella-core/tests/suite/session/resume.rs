//! A decode node is lost after tokens that the client has: another one continues the request.

use corella_core::session::{
    Allocate, Allocated, DecodeAction, DecodeEnd, ExportTask, Finish, Hello, PrefillAction,
    PrefillEnd, SessionKey, ToDecode, ToPrefill,
};
use corella_core::{FinishReason, RequestId, SessionId};

use crate::session::fixture::{
    DECODE, NUM_ROWS, PREFILL, allocate, config, first_token, hello, key, output, peer, submission,
    tokens,
};
use crate::session::prefill_end::{
    actions, delete, emitted, runs_locally, say, transferring, tries_next,
};

const SESSION: SessionId = SessionId(1);

fn allocates(did: &[PrefillAction]) -> Option<&Allocate> {
    did.iter().find_map(|action| match action {
        PrefillAction::Send {
            message: ToDecode::Allocate(allocate),
            ..
        } => Some(&**allocate),
        _ => None,
    })
}

fn first_tokens(did: &[PrefillAction]) -> Vec<u32> {
    let told = did.iter().filter_map(|action| match action {
        PrefillAction::Send {
            message: ToDecode::FirstToken(first),
            ..
        } => Some(first.sample.token),
        _ => None,
    });
    told.collect()
}

fn greet(end: &mut PrefillEnd, key: SessionKey, protocol_minor: u32) -> Vec<PrefillAction> {
    let hello = Hello {
        protocol_minor,
        ..hello(5)
    };
    say(end, key, ToPrefill::Hello(Box::new(hello)), 4)
}

fn grant(end: &mut PrefillEnd, key: SessionKey) -> Vec<PrefillAction> {
    let allocated = Allocated {
        num_cached_rows: 4,
        granted_as: Some(1),
    };
    say(end, key, ToPrefill::Allocated(allocated), 5)
}

/// The client has tokens 3 and 4. The decode node that drew token 4 is lost, and node 3 is asked.
fn moved() -> (PrefillEnd, Vec<PrefillAction>) {
    let mut end = transferring();
    say(&mut end, key(1, 0), ToPrefill::LoadDone, 1);
    end.handle_deleted(key(1, 0), 1);
    say(&mut end, key(1, 0), tokens(1, &[4]), 1);
    end.handle_stream_closed(key(1, 0), 2);
    assert_eq!(tries_next(&actions(&mut end)), Some(&[DECODE][..]));
    end.handle_placement(SESSION, Some(peer(3, 5)), 3);
    let did = actions(&mut end);
    (end, did)
}

#[test]
fn another_decode_node_goes_on_behind_the_tokens_of_a_lost_one() {
    let (mut end, did) = moved();
    let next = key(1, 1);
    // A node of an earlier version would read an allocation with earlier tokens as another request.
    assert_eq!(allocates(&did), None);
    let did = greet(&mut end, next, 3);
    let allocate = allocates(&did).expect("the node knows of earlier tokens");
    assert_eq!(
        (&allocate.output[..], allocate.prompt.len()),
        (&[3, 4][..], 10)
    );
    assert_eq!(greet(&mut end, next, 3), []);

    let did = grant(&mut end, next);
    let [
        PrefillAction::SubmitLocally {
            run: 1,
            is_accepted: true,
            request,
            ..
        },
        PrefillAction::Export(ExportTask::Open {
            first_row: 4,
            num_rows,
            ..
        }),
    ] = &did[..]
    else {
        panic!("{did:?}");
    };
    assert_eq!(
        (&request.output[..], request.exports_kv),
        (&[3, 4][..], true)
    );
    // The run draws one token after the two earlier ones.
    assert_eq!(request.stopping.max_tokens, Some(3));
    assert_eq!(*num_rows, NUM_ROWS + 2);

    end.handle_local_output(output(1, Some(5), Some(FinishReason::Length)), 6);
    let did = actions(&mut end);
    assert_eq!((emitted(&did), first_tokens(&did)), (vec![5], vec![5]));
    assert_eq!(emitted(&say(&mut end, next, tokens(3, &[6, 7]), 7)), [6, 7]);
    assert!(end.fallbacks().is_empty());
}

/// The rows are still held, so that they are not computed again.
#[test]
fn a_node_that_is_lost_before_it_has_the_rows_leaves_them_to_the_next() {
    let mut end = transferring();
    end.handle_stream_closed(key(1, 0), 2);
    let did = actions(&mut end);
    assert!(did.contains(&delete(key(1, 0))));
    end.handle_placement(SESSION, Some(peer(3, 5)), 3);
    let did = actions(&mut end);
    assert!(allocates(&did).is_some_and(|allocate| allocate.output.is_empty()));
    greet(&mut end, key(1, 1), 0);
    let did = grant(&mut end, key(1, 1));
    assert!(
        matches!(
            did[0],
            PrefillAction::Export(ExportTask::Open {
                run: 0,
                num_rows: NUM_ROWS,
                ..
            })
        ),
        "{did:?}"
    );
    // The client has the first token, and the new node does not.
    assert_eq!((emitted(&did), first_tokens(&did)), (vec![], vec![3]));
}

#[test]
fn an_earlier_version_continues_nothing() {
    let (mut end, _) = moved();
    let did = greet(&mut end, key(1, 1), 2);
    assert_eq!(allocates(&did), None);
    assert_eq!(tries_next(&did).map(<[_]>::len), Some(2));
}

/// All searches together ask at most the number of nodes that two searches may ask.
#[test]
fn a_request_moves_while_it_advances() {
    let mut end = PrefillEnd::new(config(), hello(5)).expect("valid times");
    let mut long = submission(1);
    long.max_tokens = 100;
    end.submit(long, Some(peer(2, 5)), 0).unwrap();
    actions(&mut end);
    let mut num_tokens = 0;
    for attempt in 0..6 {
        let key = key(1, attempt);
        greet(&mut end, key, 3);
        grant(&mut end, key);
        let first = output(attempt.into(), Some(5), Some(FinishReason::Length));
        end.handle_local_output(first, 6);
        say(&mut end, key, ToPrefill::LoadDone, 6);
        end.handle_deleted(key, 6);
        num_tokens += 2;
        let did = say(&mut end, key, tokens(num_tokens - 1, &[6]), 6);
        assert_eq!(emitted(&did), [6]);
        end.handle_stream_closed(key, 7);
        let did = actions(&mut end);
        if attempt < 5 {
            assert_eq!(tries_next(&did).map(<[_]>::len), Some(attempt as usize + 1));
            end.handle_placement(SESSION, Some(peer(3 + attempt, 5)), 7);
            actions(&mut end);
        } else {
            assert_eq!(tries_next(&did), None);
            assert_eq!(runs_locally(&did).map(<[_]>::len), Some(12));
        }
    }
}

#[test]
fn a_second_node_that_draws_nothing_is_the_last() {
    let (mut end, _) = moved();
    greet(&mut end, key(1, 1), 3);
    grant(&mut end, key(1, 1));
    end.handle_local_output(output(1, Some(5), Some(FinishReason::Length)), 6);
    actions(&mut end);
    end.handle_stream_closed(key(1, 1), 7);
    let did = actions(&mut end);
    assert_eq!(tries_next(&did), None);
    assert_eq!(runs_locally(&did), Some(&[3, 4, 5][..]));
}

#[test]
fn a_decode_node_counts_from_the_tokens_that_it_was_told() {
    let key = key(1, 1);
    let mut end = DecodeEnd::new(config(), hello(5)).expect("valid times");
    let mut say = |message| {
        end.handle_message(PREFILL, key, message, 0);
        end.check_invariants();
    };
    say(ToDecode::Hello(Box::new(hello(5))));
    say(ToDecode::Allocate(Box::new(Allocate {
        output: vec![3, 4],
        ..allocate()
    })));
    let mut did = std::iter::from_fn(|| end.poll_action());
    let reserved = did.find_map(|action| match action {
        DecodeAction::Reserve { allocate, .. } => Some(allocate.into_request(RequestId(1), 0)),
        _ => None,
    });
    assert_eq!(reserved.expect("pages are asked for").output, [3, 4]);
    let allocated = Allocated {
        num_cached_rows: 4,
        granted_as: Some(1),
    };
    end.handle_reserved(key, Ok(allocated), 0);
    let mut did = std::iter::from_fn(|| end.poll_action());
    let loaded = did.find_map(|action| match action {
        DecodeAction::Load { num_rows, .. } => Some(num_rows),
        _ => None,
    });
    assert_eq!(loaded, Some(NUM_ROWS + 2));
    end.handle_message(PREFILL, key, ToDecode::FirstToken(first_token(5)), 0);
    end.handle_load_done(key, 0);
    end.handle_local_output(key, output(1, Some(6), Some(FinishReason::EndToken)), 0);
    let did: Vec<_> = std::iter::from_fn(|| end.poll_action()).collect();
    let send = |message| DecodeAction::Send { key, message };
    assert!(did.contains(&send(tokens(3, &[6]))), "{did:?}");
    let finish = Finish {
        reason: FinishReason::EndToken,
        num_output_tokens: 4,
    };
    assert!(did.contains(&send(ToPrefill::Finish(finish))), "{did:?}");
}
