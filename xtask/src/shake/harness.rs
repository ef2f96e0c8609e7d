//! Reads the results of single tests from the output of a test harness.

use super::watched_run::End;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harness {
    /// Rust's, whose tests all run in one process.
    Libtest,
    Pytest,
}

/// The failure of a run of some tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// The cause of the failure, if more than tests failed: a signal, or a hang.
    pub what: Option<String>,
    /// The failed tests, or the unfinished ones.
    pub tests: Vec<String>,
}

impl Harness {
    /// Returns the failure of a run of these tests; `None` if it succeeded.
    pub fn failure(self, end: &End, output: &str, tests: &[String]) -> Option<Failure> {
        let unended = |what: String| {
            let tests = tests.iter().filter(|name| !self.has_ended(output, name));
            Some(Failure {
                what: Some(what),
                tests: tests.cloned().collect(),
            })
        };
        let status = match end {
            End::Exited(status) if status.success() => return None,
            End::Exited(status) => status,
            End::Hung => return unended("wrote nothing for 20 minutes".into()),
        };
        let failed = match self {
            Self::Libtest => failed_of_libtest(output),
            Self::Pytest => failed_of_pytest(output),
        };
        match failed.is_empty() {
            true => unended(format!("ended by itself, {status}")),
            false => Some(Failure {
                what: None,
                tests: failed,
            }),
        }
    }

    /// Returns whether a test has a result in the output. Other text may precede it on its line.
    fn has_ended(self, output: &str, name: &str) -> bool {
        let results: &[&str] = match self {
            Self::Libtest => &["ok", "FAILED", "ignored"],
            Self::Pytest => &["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"],
        };
        let starts = match self {
            Self::Libtest => vec![
                format!("test {name} ... "),
                format!("test {name} - should panic ... "),
            ],
            Self::Pytest => vec![format!("{name} ")],
        };
        let has = |start: &String| {
            let mut places = output.match_indices(start.as_str());
            places.any(|(at, _)| {
                let rest = &output[at + start.len()..];
                results.iter().any(|result| rest.starts_with(result))
            })
        };
        starts.iter().any(has)
    }

    /// Returns the tests in a list printed by the harness.
    pub fn listed(self, output: &str) -> Vec<String> {
        let name = |line: &str| match self {
            Self::Libtest => line.strip_suffix(": test").map(str::to_owned),
            Self::Pytest => line.contains("::").then(|| line.to_string()),
        };
        output.lines().filter_map(name).collect()
    }
}

/// The names below the last line `failures:`. An earlier such line precedes the tests' output.
fn failed_of_libtest(output: &str) -> Vec<String> {
    let Some((_, list)) = output.rsplit_once("\nfailures:\n") else {
        return Vec::new();
    };
    let names = list.lines().map_while(|line| line.strip_prefix("    "));
    names.map(str::to_owned).collect()
}

fn failed_of_pytest(output: &str) -> Vec<String> {
    let Some((_, summary)) = output.rsplit_once("short test summary info") else {
        return Vec::new();
    };
    let name = |line: &str| {
        let rest = line
            .strip_prefix("FAILED ")
            .or_else(|| line.strip_prefix("ERROR "))?;
        // A message may follow. Names have spaces only in the values of parameters.
        Some(
            rest.split_once(" - ")
                .map_or(rest, |(name, _)| name)
                .to_string(),
        )
    };
    let mut names: Vec<String> = summary.lines().filter_map(name).collect();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    use super::*;

    const LIBTEST: &str = "\nrunning 4 tests\ntest a::b ... ok\ntest a::c ... FAILED\n\
                           from elsewheretest d - should panic ... ok\n\nfailures:\n\n---- a::c stdout ----\n\
                           failures:\n    none\n\n\nfailures:\n    a::c\n    a::e\n\ntest result: FAILED. 2 passed\n";

    const PYTEST: &str = "tests/client/test_a.py::test_b PASSED      [ 50%]\n\
                          tests/client/test_a.py::test_c[x y] FAILED [100%]\n\
                          tests/client/test_a.py::test_d \n\
                          === short test summary info ===\n\
                          FAILED tests/client/test_a.py::test_c[x y] - assert 1 == 2\n\
                          ERROR tests/client/test_a.py::test_e\n=== 1 failed ===\n";

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| name.to_string()).collect()
    }

    fn exited(wait_status: i32) -> End {
        End::Exited(ExitStatus::from_raw(wait_status))
    }

    #[test]
    fn failed_tests_are_named() {
        let failure = |harness: Harness, output| harness.failure(&exited(1 << 8), output, &[]);
        let found = failure(Harness::Libtest, LIBTEST).unwrap();
        assert_eq!((found.what, found.tests), (None, names(&["a::c", "a::e"])));
        let found = failure(Harness::Pytest, PYTEST).unwrap();
        let expected = [
            "tests/client/test_a.py::test_c[x y]",
            "tests/client/test_a.py::test_e",
        ];
        assert_eq!((found.what, found.tests), (None, names(&expected)));
        assert_eq!(Harness::Libtest.failure(&exited(0), LIBTEST, &[]), None);
    }

    #[test]
    fn a_run_that_does_not_end_names_the_tests_that_have_not() {
        let tests = names(&["a::b", "a::c", "a::cc", "d", "e"]);
        let found = Harness::Libtest
            .failure(&End::Hung, LIBTEST, &tests)
            .unwrap();
        assert!(found.what.unwrap().contains("20 minutes"));
        assert_eq!(found.tests, names(&["a::cc", "e"]));
        let tests = ["b", "c[x y]", "d"].map(|name| format!("tests/client/test_a.py::test_{name}"));
        let found = Harness::Pytest.failure(&End::Hung, PYTEST, &tests).unwrap();
        assert_eq!(found.tests, names(&["tests/client/test_a.py::test_d"]));
    }

    #[test]
    fn a_run_that_a_signal_ends_names_the_tests_that_ran() {
        let output = "running 2 tests\ntest a ... ok\n";
        let found = Harness::Libtest
            .failure(&exited(11), output, &names(&["a", "b"]))
            .unwrap();
        assert!(found.what.unwrap().contains("signal: 11"));
        assert_eq!(found.tests, names(&["b"]));
    }

    #[test]
    fn lists_of_tests_are_read() {
        let libtest = "a::b: test\nc: benchmark\nd: test\n\n2 tests, 1 benchmark\n";
        assert_eq!(Harness::Libtest.listed(libtest), names(&["a::b", "d"]));
        let pytest = "tests/client/test_a.py::test_b[x]\n\n1 test collected in 0.1s\n";
        let expected = names(&["tests/client/test_a.py::test_b[x]"]);
        assert_eq!(Harness::Pytest.listed(pytest), expected);
    }
}
