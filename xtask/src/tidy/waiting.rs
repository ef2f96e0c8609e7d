//! Tests wait for conditions: they neither sleep nor compare elapsed times.

use super::Tree;
use super::timing::{Language, Timing, timings};
use super::{python_code, test_code};

/// Contains the allowed waits of Rust tests.
const RUST_PATIENCE: &str = "crates/corella-test/";
/// Contains the allowed waits of Python tests.
const PYTHON_PATIENCE: &str = "tests/client/patience.py";
const PYTHON_TESTS: [&str; 2] = ["tests/client/", "tests/python/"];

/// A line that may sleep or look at a clock.
struct Exception {
    file: &'static str,
    /// A part of the line.
    what: &'static str,
    reason: &'static str,
}

const EXCEPTIONS: &[Exception] = &[
    Exception {
        file: "crates/corella-bench/src/thread_time.rs",
        what: ">= SPAN",
        reason: "The times are those of a thread on the processor, which no other program makes longer.",
    },
    Exception {
        file: "crates/corella-bench/src/thread_time.rs",
        what: "waited < SPAN",
        reason: "The times are those of a thread on the processor, which no other program makes longer.",
    },
    Exception {
        file: "crates/corella-bench/src/thread_time.rs",
        what: "waited + SPAN",
        reason: "The times are those of a thread on the processor, which no other program makes longer.",
    },
    Exception {
        file: "crates/corella-bench/tests/serve.rs",
        what: "FIRST } else { NEXT }",
        reason: "The server paces its tokens so that the load generator has gaps to measure; their order is asserted.",
    },
    Exception {
        file: "crates/corella-cluster/tests/suite/transport/fixture.rs",
        what: "left.is_zero()",
        reason: "A lower bound holds however slow the machine is.",
    },
    Exception {
        file: "crates/corella-model/src/mock_executor/step_time.rs",
        what: "ready, [2500",
        reason: "The clock of the mock is asked for a plan, and no time passes.",
    },
    Exception {
        file: "tests/client/hub_server.py",
        what: "time.sleep(pause_s)",
        reason: "A slow hub is what the client is tested against; no test says how long it takes.",
    },
    Exception {
        file: "tests/client/soak.py",
        what: "began_at + self.seconds",
        reason: "A soak goes on for as long as it is told.",
    },
    Exception {
        file: "tests/client/soak.py",
        what: "time.sleep(0.05)",
        reason: "A client of a soak asks a killed node again at a pace that leaves it room to start.",
    },
    Exception {
        file: "tests/client/soak.py",
        what: "time.sleep(leaves_after_s)",
        reason: "A client that leaves at a random moment is a fault of the soak.",
    },
    Exception {
        file: "tests/client/tcp_proxy.py",
        what: "time.sleep(max(pause_s, 0))",
        reason: "A slow link is a fault that tests cause; they assert order and outcome.",
    },
    Exception {
        file: "tests/client/test_traces.py",
        what: "READING_NS <= whole",
        reason: "Timestamps of one clock are in order however slow the machine is.",
    },
    Exception {
        file: "tests/client/test_traces.py",
        what: "<= arrived_ns",
        reason: "Timestamps of one clock are in order however slow the machine is.",
    },
];

pub fn waiting(tree: &Tree) -> Vec<String> {
    check(tree, EXCEPTIONS)
}

fn check(tree: &Tree, exceptions: &[Exception]) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut used = vec![false; exceptions.len()];
    for (path, line_number, timing) in found(tree) {
        let text = tree.text(path).unwrap_or_default();
        let line = text.lines().nth(line_number - 1).unwrap_or_default();
        let allows =
            |exception: &Exception| exception.file == path && line.contains(exception.what);
        match exceptions.iter().position(allows) {
            Some(index) => used[index] = true,
            None => complaints.push(format!("{path}:{line_number}: {}", advice(path, timing))),
        }
    }
    for (exception, is_used) in exceptions.iter().zip(used) {
        let Exception { file, what, reason } = exception;
        if !is_used {
            complaints.push(format!(
                "xtask/src/tidy/waiting.rs: no line of {file} with {what:?} needs an exception any more"
            ));
        }
        let is_sentence = reason.starts_with(char::is_uppercase)
            && reason.ends_with('.')
            && reason.split_whitespace().count() >= 4;
        if !is_sentence {
            complaints.push(format!(
                "xtask/src/tidy/waiting.rs: the exception for {file} gives its reason in no sentence: {reason:?}"
            ));
        }
    }
    complaints
}

fn advice(path: &str, timing: Timing) -> String {
    let helpers = match path.ends_with(".py") {
        true => "`wait_until` or `held` of tests/client/patience.py",
        false => "`wait_until` or `HeldProcess` of corella-test",
    };
    match timing {
        Timing::Sleep => format!(
            "a test does not sleep; wait for a condition or hold a process still, with {helpers}"
        ),
        Timing::Comparison => format!(
            "a test does not compare times, because a busy machine makes any of them long; assert \
             order, counts or outcome, and wait with {helpers}"
        ),
    }
}

fn found(tree: &Tree) -> Vec<(&str, usize, Timing)> {
    let mut found = Vec::new();
    for (path, code) in test_code::of_crates(tree) {
        if !path.starts_with(RUST_PATIENCE) {
            let timings = timings(&code, Language::Rust);
            found.extend(
                timings
                    .into_iter()
                    .map(|(line, timing)| (path, line, timing)),
            );
        }
    }
    for (path, text) in tree.texts() {
        let is_test = PYTHON_TESTS.iter().any(|folder| path.starts_with(folder));
        if is_test && path.ends_with(".py") && path != PYTHON_PATIENCE {
            let timings = timings(&python_code::without_text(text), Language::Python);
            found.extend(
                timings
                    .into_iter()
                    .map(|(line, timing)| (path, line, timing)),
            );
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEPS: &str = "fn f() { thread::sleep(PAUSE); }";

    fn complaints(path: &str, text: &str, exceptions: &[Exception]) -> Vec<String> {
        check(&Tree::of(&[(path, text)]), exceptions)
    }

    #[test]
    fn a_test_that_sleeps_is_refused() {
        let found = complaints("crates/a/tests/suite/b.rs", SLEEPS, &[]);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].starts_with("crates/a/tests/suite/b.rs:1: "),
            "{found:?}"
        );
        let python = complaints("tests/client/test_a.py", "f()\ntime.sleep(1)\n", &[]);
        assert_eq!(python.len(), 1);
        assert!(
            python[0].starts_with("tests/client/test_a.py:2: "),
            "{python:?}"
        );
        assert_eq!(
            complaints("tests/python/test_a.py", "time.sleep(1)", &[]).len(),
            1
        );
    }

    #[test]
    fn a_test_that_compares_times_is_refused() {
        let rust = "fn f() { assert!(start.elapsed() < LIMIT); }";
        assert_eq!(complaints("crates/a/tests/b.rs", rust, &[]).len(), 1);
        let in_source = format!("#[cfg(test)]\nmod tests {{ {rust} }}");
        let found = complaints("crates/a/src/b.rs", &in_source, &[]);
        assert!(found[0].starts_with("crates/a/src/b.rs:2: "), "{found:?}");
        let python = "assert time.monotonic() - start < 3\n";
        assert_eq!(complaints("tests/client/test_a.py", python, &[]).len(), 1);
    }

    #[test]
    fn the_helpers_and_all_that_is_no_test_may_wait() {
        for path in [
            "crates/a/src/b.rs",
            "crates/a/examples/b.rs",
            "crates/corella-test/src/lib.rs",
            "crates/corella-test/tests/b.rs",
        ] {
            assert!(complaints(path, SLEEPS, &[]).is_empty(), "{path}");
        }
        for path in [
            "tests/client/patience.py",
            "bench/a.py",
            "tests/golden/a.py",
        ] {
            assert!(complaints(path, "time.sleep(1)", &[]).is_empty(), "{path}");
        }
        let text = "# time.sleep(1)\nprogram = 'time.sleep(1)'\n";
        assert!(complaints("tests/client/test_a.py", text, &[]).is_empty());
    }

    #[test]
    fn an_exception_holds_for_lines_of_a_file_and_says_why() {
        let path = "crates/a/tests/b.rs";
        let exception = |file, what, reason| [Exception { file, what, reason }];
        let reason = "The delay is the subject of the test.";
        assert!(complaints(path, SLEEPS, &exception(path, "sleep(PAUSE)", reason)).is_empty());
        for (file, what) in [
            (path, "sleep(OTHER)"),
            ("crates/a/tests/c.rs", "sleep(PAUSE)"),
        ] {
            let found = complaints(path, SLEEPS, &exception(file, what, reason));
            assert_eq!(found.len(), 2, "{found:?}");
            assert!(found[1].contains("any more"), "{found:?}");
        }
        for reason in [
            "",
            "because",
            "Because.",
            "the delay is the subject.",
            "It needs this delay",
        ] {
            let found = complaints(path, SLEEPS, &exception(path, "sleep(PAUSE)", reason));
            assert_eq!(found.len(), 1, "{found:?}");
        }
    }

    #[test]
    fn each_exception_gives_its_reason() {
        let found = check(&Tree::default(), EXCEPTIONS);
        assert!(
            found.iter().all(|text| !text.contains("no sentence")),
            "{found:?}"
        );
    }
}
