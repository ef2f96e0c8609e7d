//! Tests that are allowed to take long, with the reason.

use crate::tidy::Tree;

/// Limits a test's seconds on two quiet cores, unless it is in `REASONS`.
pub const BOUND_S: f64 = 20.0;

/// The last part of a test's name, and the reason for its time.
const REASONS: [(&str, &str); 2] = [
    (
        "four_stages_of_unequal_length",
        "Of the models here only the built-in one has layers for four stages, and it is the largest.",
    ),
    (
        "calls_that_are_demanded_are_made_in_every_format_whole_and_streamed",
        "Replies are drawn at random in each format of calls, and a mask is made for each token.",
    ),
];

/// Returns whether a test, named with its package and binary, may take longer.
pub fn has_reason(test: &str) -> bool {
    let name = test.rsplit([':', ' ']).next().unwrap_or(test);
    REASONS.iter().any(|(slow, _)| *slow == name)
}

/// A rule of `tidy`: each test in the list exists, and its reason is a sentence.
pub fn reasons_of_slow_tests(tree: &Tree) -> Vec<String> {
    complaints(tree, &REASONS)
}

fn complaints(tree: &Tree, reasons: &[(&str, &str)]) -> Vec<String> {
    let mut complaints = Vec::new();
    for (name, reason) in reasons {
        let function = format!("fn {name}(");
        if !tree.rust_files().any(|(_, text)| text.contains(&function)) {
            complaints.push(format!(
                "xtask/src/test/slow_test.rs: there is no test {name}"
            ));
        }
        if !reason.ends_with('.') || !reason.contains(' ') {
            complaints.push(format!(
                "xtask/src/test/slow_test.rs: the reason of {name} is no sentence"
            ));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_test_exists_and_has_a_reason() {
        let tree = Tree::of(&[("crates/a/tests/b.rs", "#[test]\nfn slow() {}\n")]);
        assert!(complaints(&tree, &[("slow", "It plays all seeds.")]).is_empty());
        assert_eq!(complaints(&tree, &[("slow", "seeds")]).len(), 1);
        assert_eq!(
            complaints(&tree, &[("gone", "It plays all seeds.")]).len(),
            1
        );
    }
}
