//! The prefix cache after its requests have ended, and the events to subscribers.

use corella_core::{KvEvent, Namespace, PageHash, PinError, SchedulerConfig, TokenId};
use corella_engine::{PinPrefixError, StreamEvent};
use corella_test::wait_until;

use crate::fixture::{VOCAB_SIZE, finish, limits, model, start, submission, submit_one};

#[test]
fn a_pinned_prefix_outlives_want_of_pages_and_a_reset() {
    let mut limits = limits(32, 2);
    limits.max_pinned_pages = 3;
    let mock = model(&limits);
    let engine = start(limits, mock);
    let prefix: Vec<_> = (0..15).collect();
    assert_eq!(engine.pin_prefix(prefix.clone()), Ok(3));
    for first in 20..26 {
        let prompt = (0..100).map(|i| (first + i) % VOCAB_SIZE as TokenId);
        finish(&mut submit_one(&engine, submission(prompt.collect(), 4)));
    }
    assert!(engine.stats().scheduler.num_evicted_pages > 0);
    wait_until("nothing is in use", || engine.reset_prefix_cache().is_ok());
    let mut stream = submit_one(&engine, submission(prefix, 1));
    assert_eq!(stream.next_blocking(), Some(StreamEvent::Accepted));
    let Some(StreamEvent::Output(output)) = stream.next_blocking() else {
        panic!("the stream has no output");
    };
    assert_eq!(output.cache_use.num_cached_tokens, 12);

    let other = engine.pin_prefix((30..34).collect());
    let too_many = PinError::TooMany {
        num_pages: 1,
        num_pinned: 3,
        limit: 3,
    };
    assert_eq!(other, Err(PinPrefixError::Pin(too_many)));
    let too_long = engine.pin_prefix(vec![1; 200]);
    assert!(matches!(too_long, Err(PinPrefixError::Submit(_))));
}

/// The channel holds fewer events than the pages cause, and the engine is idle meanwhile.
#[test]
fn kv_events_name_what_can_be_reused() {
    const SALT: u64 = 3;
    let limits = SchedulerConfig::new(4000, 1, 4000);
    let mock = model(&limits);
    let engine = start(limits, mock);
    let prompt: Vec<_> = (0..2500).map(|i| i % 47).collect();
    finish(&mut submit_one(&engine, submission(prompt.clone(), 1)));
    let replaced = engine.subscribe_kv_events(SALT + 1);
    let events = engine.subscribe_kv_events(SALT);
    let last = loop {
        match replaced.next_blocking() {
            Some(event) => drop(event),
            None => break replaced.next_blocking(),
        }
    };
    assert_eq!(last, None);

    assert_eq!(events.next_blocking(), Some(KvEvent::Cleared));
    let root = PageHash::root(SALT, &Namespace::default());
    let mut before = None;
    for &token in &prompt {
        let page = before.unwrap_or(root).next(SALT, &[token]);
        let stored = KvEvent::Stored {
            page,
            parent: before,
            tokens: [token].into(),
            namespace: Namespace::default(),
        };
        assert_eq!(events.next_blocking(), Some(stored));
        before = Some(page);
    }
    engine.reset_prefix_cache().unwrap();
    for _ in &prompt {
        let event = events.next_blocking();
        assert!(matches!(event, Some(KvEvent::Removed { .. })), "{event:?}");
    }
    assert_eq!(events.try_next(), None);
    engine.shutdown();
    assert_eq!(events.next_blocking(), None);
}
