//! Rules for one source file.

use super::Tree;
use super::rust_code::{without_tests, without_text};
use super::test_code;

const MAX_LINES: usize = 800;
const LONG_LINES: usize = 600;

/// The distance in lines of a reason above its `unsafe`, because the statement may span lines.
const REASON_DISTANCE: usize = 8;

pub fn headers(tree: &Tree) -> Vec<String> {
    tree.rust_files()
        .filter(|(_, text)| {
            let first = text.lines().next().unwrap_or_default();
            first
                .strip_prefix("//!")
                .is_none_or(|idea| idea.trim().is_empty())
        })
        .map(|(path, _)| format!("{path}: the first line must be `//!` and the file's one idea"))
        .collect()
}

pub fn unfinished(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.rust_files() {
        for (number, line) in numbered(&without_text(text)) {
            for name in ["todo!", "unimplemented!", "dbg!"] {
                if line
                    .match_indices(name)
                    .any(|(at, _)| !line[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
                {
                    complaints.push(format!("{path}:{number}: {name} is for drafts"));
                }
            }
        }
    }
    complaints
}

/// Clippy requires a `SAFETY:` comment; this rule requires a reason in it.
pub fn safety(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.rust_files() {
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in numbered(&without_text(text)) {
            if !(line.contains("unsafe {") || line.contains("unsafe impl")) {
                continue;
            }
            let above = number.saturating_sub(1 + REASON_DISTANCE);
            if !lines[above..number].iter().any(|line| gives_reason(line)) {
                complaints.push(format!(
                    "{path}:{number}: say above it, after `SAFETY:`, why this is sound"
                ));
            }
        }
    }
    complaints
}

fn gives_reason(line: &str) -> bool {
    line.split_once("SAFETY:")
        .is_some_and(|(_, reason)| reason.split_whitespace().count() >= 2)
}

/// No comment begins with "Of": such a fragment is unclear without the name of its item.
pub fn fragments(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.rust_files() {
        let mut above_is_comment = false;
        for (number, line) in numbered(text) {
            let comment = comment(line);
            // A later line of a comment may begin with "Of".
            if !above_is_comment && comment.is_some_and(|comment| comment.starts_with("Of ")) {
                complaints.push(format!(
                    "{path}:{number}: a comment that begins with \"Of\" is a fragment; write a \
                     sentence with a subject"
                ));
            }
            above_is_comment = comment.is_some_and(|comment| !comment.is_empty());
        }
    }
    complaints
}

/// Returns the text of a line that is only a comment.
fn comment(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let marks = ["///", "//!", "//"];
    let comment = marks.iter().find_map(|mark| line.strip_prefix(mark))?;
    Some(comment.trim())
}

pub fn lengths(tree: &Tree) -> Vec<String> {
    line_counts(tree)
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(path, lines)| {
            format!("{path}: {lines} lines; more than {MAX_LINES} is more than one idea")
        })
        .collect()
}

/// Returns files that are long but still allowed, as notes.
pub fn long_files(tree: &Tree) -> Vec<String> {
    line_counts(tree)
        .filter(|(_, lines)| (LONG_LINES + 1..=MAX_LINES).contains(lines))
        .map(|(path, lines)| format!("{path} has {lines} lines"))
        .collect()
}

/// The lines of the crates' sources outside tests.
pub fn num_product_lines(tree: &Tree) -> usize {
    let test_files = test_code::files(tree);
    let is_product = |path: &str| {
        let mut parts = path.split('/');
        let is_source = parts.next() == Some("crates") && parts.nth(1) == Some("src");
        is_source && !test_files.contains(path)
    };
    let product = tree.rust_files().filter(|(path, _)| is_product(path));
    product
        .map(|(_, text)| without_tests(text).lines().count())
        .sum()
}

fn line_counts(tree: &Tree) -> impl Iterator<Item = (&str, usize)> {
    tree.rust_files()
        .map(|(path, text)| (path, text.lines().count()))
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    text.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: fn(&Tree) -> Vec<String>, text: &str) -> usize {
        rule(&Tree::of(&[("crates/a/src/lib.rs", text)])).len()
    }

    #[test]
    fn a_file_says_its_idea() {
        assert_eq!(check(headers, "//! One idea.\n"), 0);
        assert_eq!(check(headers, "use std::fs;\n"), 1);
        assert_eq!(check(headers, "//!\n"), 1);
        assert_eq!(check(headers, "\n//! One idea.\n"), 1);
        assert_eq!(check(headers, ""), 1);
    }

    #[test]
    fn drafts_are_found_in_code_only() {
        assert_eq!(check(unfinished, "fn f() { todo!() }"), 1);
        assert_eq!(check(unfinished, "fn f() { unimplemented!(\"x\") }"), 1);
        assert_eq!(check(unfinished, "fn f() { g(dbg!(1)); }"), 1);
        assert_eq!(check(unfinished, "// todo!()\nlet s = \"dbg!\";"), 0);
        assert_eq!(check(unfinished, "my_dbg!(1)"), 0);
    }

    #[test]
    fn unsafe_code_gives_its_reason() {
        assert_eq!(check(safety, "let x = unsafe { f() };"), 1);
        assert_eq!(check(safety, "// SAFETY:\nunsafe { f() };"), 1);
        assert_eq!(check(safety, "// SAFETY: yes\nunsafe { f() };"), 1);
        assert_eq!(
            check(safety, "// SAFETY: f has no conditions.\nunsafe { f() };"),
            0
        );
        assert_eq!(check(safety, "unsafe impl Send for X {}"), 1);
        assert_eq!(check(safety, "// unsafe { is a word here"), 0);
        let far = format!(
            "// SAFETY: a reason far off.\n{}unsafe {{ f() }};",
            "g();\n".repeat(9)
        );
        assert_eq!(check(safety, &far), 1);
    }

    #[test]
    fn a_comment_names_what_it_is_about() {
        for marks in ["///", "//!", "//", "    ///"] {
            assert_eq!(
                check(fragments, &format!("{marks} Of the population.\n")),
                1
            );
            assert_eq!(check(fragments, &format!("{marks} Offsets of pages.\n")), 0);
            assert_eq!(
                check(fragments, &format!("{marks} The mean\n{marks} Of all.\n")),
                0
            );
            assert_eq!(
                check(
                    fragments,
                    &format!("{marks} A mean.\n{marks}\n{marks} Of all.\n")
                ),
                1
            );
        }
        assert_eq!(check(fragments, "let text = \"Of course\";\n"), 0);
        assert_eq!(check(fragments, "f(); // Of course.\n"), 0);
    }

    #[test]
    fn tests_are_no_product() {
        let code = "//! x\nfn f() {}\n#[cfg(test)]\nmod tests {\n}\n";
        let parent = ("crates/a/src/b.rs", "#[cfg(test)]\nmod model;\nmod c;\n");
        let lines = |path: &str| num_product_lines(&Tree::of(&[parent, (path, code)])) - 3;
        assert_eq!(lines("crates/a/src/b/c.rs"), 2);
        for path in [
            "crates/a/src/b/tests.rs",
            "crates/a/src/b/model.rs",
            "crates/a/src/b/model/d.rs",
            "crates/a/tests/c.rs",
            "xtask/src/a.rs",
        ] {
            assert_eq!(lines(path), 0, "{path}");
        }
    }

    #[test]
    fn files_end() {
        assert_eq!(check(lengths, &"//! x\n".repeat(MAX_LINES)), 0);
        assert_eq!(check(lengths, &"//! x\n".repeat(MAX_LINES + 1)), 1);
        assert_eq!(check(long_files, &"//! x\n".repeat(LONG_LINES)), 0);
        assert_eq!(check(long_files, &"//! x\n".repeat(LONG_LINES + 1)), 1);
    }
}
