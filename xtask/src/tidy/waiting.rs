//! Tests wait for conditions: they neither sleep nor compare elapsed times. This rule reads single lines. A reviewer
//! looks for times that pass through variables.

use super::Tree;
use super::{python_code, test_code};

/// Contains the allowed waits of Rust tests.
const RUST_PATIENCE: &str = "crates/corella-test/";
/// Contains the allowed waits of Python tests.
const PYTHON_PATIENCE: &str = "tests/client/patience.py";
const PYTHON_TESTS: [&str; 2] = ["tests/client/", "tests/python/"];

const SLEEPS: [&str; 4] = ["sleep(", "sleep_until(", "sleep_ms(", "wait_for_timeout("];
/// Calls that return a point in time or a length of time.
const CLOCKS: [&str; 8] = [
    ".elapsed()",
    "duration_since(",
    "Instant::now()",
    "SystemTime::now()",
    "monotonic()",
    "perf_counter()",
    "time.time()",
    "time_ns()",
];
const COMPARISONS: [&str; 5] = [" < ", " > ", " <= ", " >= ", "assert"];

/// A line that may sleep or look at a clock.
struct Exception {
    file: &'static str,
    /// A part of the line.
    what: &'static str,
    reason: &'static str,
}

const EXCEPTIONS: &[Exception] = &[
    Exception {
        file: "crates/corella-bench/tests/serve.rs",
        what: "FIRST } else { NEXT }",
        reason: "The server paces its tokens so that the load generator has gaps to measure; their order is asserted.",
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
        file: "tests/client/model_soak.py",
        what: "time.monotonic() < ends_at",
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
];

pub fn waiting(tree: &Tree) -> Vec<String> {
    check(tree, EXCEPTIONS)
}

fn check(tree: &Tree, exceptions: &[Exception]) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut used = vec![false; exceptions.len()];
    for (path, code) in tests(tree) {
        let text = tree.text(path).unwrap_or_default();
        for (at, advice) in timings(&code) {
            let line = text.lines().nth(at).unwrap_or_default();
            let allows =
                |exception: &Exception| exception.file == path && line.contains(exception.what);
            match exceptions.iter().position(allows) {
                Some(index) => used[index] = true,
                None => complaints.push(format!(
                    "{path}:{}: {advice}, with `wait_until` of corella-test or of tests/client/patience.py",
                    at + 1
                )),
            }
        }
    }
    for (exception, is_used) in exceptions.iter().zip(used) {
        let Exception { file, what, reason } = exception;
        if !is_used {
            complaints.push(format!(
                "xtask/src/tidy/waiting.rs: no line of {file} with {what:?} needs an exception any more ({reason})"
            ));
        }
    }
    complaints
}

/// Returns the code of tests without comments and literals, by path.
fn tests(tree: &Tree) -> Vec<(&str, String)> {
    let mut tests = test_code::of_crates(tree);
    tests.retain(|(path, _)| !path.starts_with(RUST_PATIENCE));
    for (path, text) in tree.texts() {
        let is_test = PYTHON_TESTS.iter().any(|folder| path.starts_with(folder));
        if is_test && path.ends_with(".py") && path != PYTHON_PATIENCE {
            tests.push((path, python_code::without_text(text)));
        }
    }
    tests
}

/// Returns the lines that sleep or compare times, from 0 on, with advice.
fn timings(code: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    // The clock of a test with `start_paused` only moves when all tasks wait.
    let mut is_virtual = false;
    let mut attribute = false;
    for (at, line) in code.lines().enumerate() {
        attribute |= line.contains("start_paused = true");
        if line.contains("fn ") {
            is_virtual = std::mem::take(&mut attribute);
        }
        if is_virtual {
            continue;
        }
        let has = |words: &[&str]| words.iter().any(|word| line.contains(word));
        if SLEEPS.iter().any(|call| sleeps(line, call)) {
            found.push((
                at,
                "a test does not sleep; wait for a condition or hold a process still",
            ));
        } else if has(&CLOCKS) && has(&COMPARISONS) {
            found.push((
                at,
                "a test does not compare times, because a busy machine makes any of them long; assert order, counts \
                 or outcome, and wait for a condition",
            ));
        }
    }
    found
}

/// Returns whether a line has this call. A Python task that sleeps for 0 only lets others run.
fn sleeps(line: &str, call: &str) -> bool {
    line.match_indices(call).any(|(at, _)| {
        let before = &line[..at];
        let is_name = before.ends_with(|c: char| c.is_alphanumeric() || c == '_');
        let is_definition = before.ends_with("fn ") || before.ends_with("def ");
        !is_name && !is_definition && !line[at + call.len()..].starts_with("0)")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEEPING: &str = "fn f() { thread::sleep(PAUSE); }";

    fn complaints(path: &str, text: &str, exceptions: &[Exception]) -> Vec<String> {
        check(&Tree::of(&[(path, text)]), exceptions)
    }

    #[test]
    fn tests_that_sleep_or_compare_times_are_refused() {
        for (path, text) in [
            ("crates/a/tests/suite/b.rs", SLEEPING),
            (
                "crates/a/tests/b.rs",
                "fn f() { assert!(start.elapsed() < LIMIT); }",
            ),
            (
                "crates/a/src/b.rs",
                "#[cfg(test)] mod tests { fn f() { while Instant::now() < deadline {} } }",
            ),
            ("tests/python/test_a.py", "await asyncio.sleep(0.5)"),
            (
                "tests/client/test_a.py",
                "assert time.monotonic() - start < 3",
            ),
            ("tests/client/test_a.py", "page.wait_for_timeout(300)"),
        ] {
            let found = complaints(path, text, &[]);
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].starts_with(&format!("{path}:1: ")), "{found:?}");
        }
    }

    #[test]
    fn helpers_and_other_code_may_wait() {
        for path in [
            "crates/a/src/b.rs",
            "crates/a/examples/b.rs",
            "crates/corella-test/src/lib.rs",
        ] {
            assert!(complaints(path, SLEEPING, &[]).is_empty(), "{path}");
        }
        for path in ["tests/client/patience.py", "bench/a.py"] {
            assert!(complaints(path, "time.sleep(1)", &[]).is_empty(), "{path}");
        }
        for text in [
            "# time.sleep(1)\nprogram = 'time.sleep(1)'",
            "await asyncio.sleep(0)",
            "def sleep(a):",
            "asleep(1)",
            "deadline = time.monotonic() + 3",
        ] {
            assert!(
                complaints("tests/client/test_a.py", text, &[]).is_empty(),
                "{text}"
            );
        }
    }

    #[test]
    fn a_paused_clock_may_be_looked_at() {
        let test = "#[tokio::test(start_paused = true)]\nasync fn a() {\n sleep(LONG).await;\n}\n";
        assert!(complaints("crates/a/tests/b.rs", test, &[]).is_empty());
        let other = format!("{test}{SLEEPING}");
        assert_eq!(complaints("crates/a/tests/b.rs", &other, &[]).len(), 1);
    }

    #[test]
    fn an_exception_holds_for_lines_of_its_file() {
        let path = "crates/a/tests/b.rs";
        let exception = |file, what| {
            let reason = "The delay is the subject of the test.";
            [Exception { file, what, reason }]
        };
        assert!(complaints(path, SLEEPING, &exception(path, "sleep(PAUSE)")).is_empty());
        for (file, what) in [
            (path, "sleep(OTHER)"),
            ("crates/a/tests/c.rs", "sleep(PAUSE)"),
        ] {
            let found = complaints(path, SLEEPING, &exception(file, what));
            assert_eq!(found.len(), 2, "{found:?}");
            assert!(found[1].contains("any more"), "{found:?}");
        }
    }
}
