//! The detections of a target: panics, memory, and the repetition of cases.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use corella_fuzz::{Random, Target, Verdict, mutate_bytes, mutate_json};
use serde_json::{Value, json};

fn mutate(random: &mut Random, input: &mut Vec<u8>) {
    mutate_bytes(random, input, b"other");
}

/// The message of a failed `run`.
fn failure(target: Target, parse: impl Fn(&Vec<u8>) -> Verdict) -> String {
    let corpus = [b"a valid input".to_vec()];
    let run = || target.run(&corpus, mutate, parse);
    let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("it fails");
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => (*panic.downcast::<&str>().expect("a text")).to_owned(),
    }
}

#[test]
fn a_panic_for_a_changed_input_is_seen() {
    let said = failure(Target::new("panic", 1 << 20, 1), |input| {
        assert!(input.len() != 20, "a length of 20");
        Verdict::Accepted
    });
    assert_eq!(said, "a length of 20");
}

#[test]
fn a_panic_of_another_thread_is_seen() {
    let said = failure(
        Target::new("thread", 1 << 20, 1).watching_threads(),
        |input| {
            let is_bad = input.len() == 20;
            let _ = std::thread::spawn(move || assert!(!is_bad)).join();
            Verdict::Accepted
        },
    );
    assert_eq!(said, "a thread has panicked");
}

#[test]
fn memory_without_proportion_is_seen() {
    // A parser that allocates as much as a number in its input says.
    let said = failure(Target::new("memory", 4096, 2), |input| {
        let len = input.get(..2).map_or(0, |len| usize::from(len[0]) << 12);
        Verdict::from(
            &Vec::<u8>::new().try_reserve_exact(if input[..] == *b"a valid input" {
                0
            } else {
                len
            }),
        )
    });
    assert!(said.contains("are allowed"), "{said}");
}

#[test]
fn a_corpus_that_is_refused_is_seen() {
    let said = failure(Target::new("corpus", 4096, 2), |_| Verdict::Refused);
    assert!(said.contains("input 0 of the corpus"), "{said}");
}

#[test]
fn cases_repeat_and_differ() {
    let inputs = || {
        let seen = RefCell::new(Vec::new());
        let corpus = [b"a valid input".to_vec()];
        let stop = || seen.borrow().len() > 500;
        let run = || {
            Target::new("repeat", 1 << 30, 1).run(&corpus, mutate, |input| {
                seen.borrow_mut().push(input.clone());
                assert!(!stop());
                Verdict::Accepted
            });
        };
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        seen.into_inner()
    };
    let (first, second) = (inputs(), inputs());
    assert_eq!(first, second);
    let distinct: std::collections::HashSet<_> = first.iter().collect();
    assert!(distinct.len() > 250, "{}", distinct.len());
}

#[test]
fn changed_json_is_json_and_every_place_is_changed() {
    let whole = json!({"size": 8, "names": ["a", "b"], "inner": {"flag": true, "text": "t"}});
    let mut changed = std::collections::BTreeSet::new();
    for case in 0..3000 {
        let mut value = whole.clone();
        mutate_json(&mut Random::new(1, case), &mut value, &["word"]);
        let text = value.to_string();
        if let Err(error) = serde_json::from_str::<Value>(&text) {
            assert!(
                error.to_string().contains("recursion limit"),
                "{error} in {text}"
            );
        }
        for pointer in [
            "",
            "/size",
            "/names",
            "/names/1",
            "/inner",
            "/inner/flag",
            "/inner/text",
        ] {
            if value.pointer(pointer) != whole.pointer(pointer) {
                changed.insert(pointer);
            }
        }
    }
    assert_eq!(changed.len(), 7);
}
