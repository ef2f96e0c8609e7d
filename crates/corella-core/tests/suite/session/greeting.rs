//! Greetings: mismatches between two nodes, and answers from an earlier incarnation of a node.

use corella_core::session::{
    AbortReason, Hello, KvShape, Mismatch, PrefillAction, ToDecode, ToPrefill,
};

use crate::session::fixture::{DECODE, hello, key};
use crate::session::prefill_end::{opened, say, tries_next};

/// The answer is older than the incarnation that was asked, so it proves no restart.
#[test]
fn an_earlier_life_of_a_node_is_given_up_and_nothing_is_learned_from_it() {
    let mut end = opened();
    let did = say(&mut end, key(1, 0), ToPrefill::Hello(Box::new(hello(4))), 1);
    let abort = PrefillAction::Send {
        key: key(1, 0),
        message: ToDecode::Abort(AbortReason::ProtocolViolated),
    };
    assert!(did.contains(&abort), "{did:?}");
    assert_eq!(tries_next(&did), Some(&[DECODE][..]));
    let marks_restart = |action: &_| matches!(action, PrefillAction::MarkRestarted { .. });
    assert!(!did.iter().any(marks_restart), "{did:?}");
}

#[test]
fn a_mismatch_is_named_with_both_sides() {
    let check = |change: fn(&mut Hello)| {
        let mut other = hello(5);
        change(&mut other);
        hello(5).check(&other)
    };
    assert_eq!(
        check(|it| it.protocol_major = 2),
        Err(Mismatch::Protocol(1, 2))
    );
    assert_eq!(
        check(|it| it.group = "batch".into()),
        Err(Mismatch::Group("".into(), "batch".into()))
    );
    assert_eq!(
        check(|it| it.model_fingerprint = 21),
        Err(Mismatch::Model(11, 21))
    );
    assert_eq!(
        check(|it| it.tokenizer_digest = 22),
        Err(Mismatch::Tokenizer(12, 22))
    );
    let ours = hello(5).kv_shape;
    let theirs = KvShape {
        num_kv_heads: 4,
        ..ours
    };
    assert_eq!(
        check(|it| it.kv_shape.num_kv_heads = 4),
        Err(Mismatch::KvShape(ours, theirs))
    );
}

/// Pages of groups with windows are sent whole. Without windows, rows fit into pages of any size.
#[test]
fn page_sizes_have_to_be_equal_where_there_are_windows() {
    let with_window = |page_size| {
        let mut hello = hello(5);
        hello.kv_shape.window_digest = 7;
        hello.page_size = page_size;
        hello
    };
    assert_eq!(with_window(16).check(&with_window(16)), Ok(()));
    let mismatch = Err(Mismatch::PageSize(16, 32));
    assert_eq!(with_window(16).check(&with_window(32)), mismatch);
}
