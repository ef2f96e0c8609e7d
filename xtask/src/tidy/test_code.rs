//! The parts of the Rust sources compiled only for tests.

use std::collections::HashSet;

use super::Tree;
use super::rust_code::{has_word, without_text};

/// Returns the test code of each crate's files, by path. Comments, literals and all other code become spaces; lines
/// stay.
pub fn of_crates(tree: &Tree) -> Vec<(&str, String)> {
    by_file(tree)
        .into_iter()
        .map(|(path, code, is_test)| match is_test {
            true => (path, code),
            false => (path, test_items(&code)),
        })
        .filter(|(_, code)| !code.trim().is_empty())
        .collect()
}

/// Returns the paths of the crates' files that only tests compile.
pub fn files(tree: &Tree) -> HashSet<&str> {
    let files = by_file(tree).into_iter();
    files
        .filter_map(|(path, _, is_test)| is_test.then_some(path))
        .collect()
}

/// Returns each file of the crates with its code, and whether only tests compile the file.
fn by_file(tree: &Tree) -> Vec<(&str, String, bool)> {
    let crates = |(path, _): &(&str, &str)| path.starts_with("crates/");
    let sources: Vec<(&str, String)> = tree
        .rust_files()
        .filter(crates)
        .map(|(path, text)| (path, without_text(text)))
        .collect();
    let modules: Vec<String> = sources
        .iter()
        .flat_map(|(path, code)| test_modules(path, code))
        .collect();
    let is_test_file = |path: &str| {
        let in_crate = path.splitn(3, '/').nth(2).unwrap_or_default();
        in_crate.starts_with("tests/")
            || path.ends_with("/tests.rs")
            || modules.iter().any(|module| {
                let rest = path.strip_prefix(module.as_str());
                rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
            })
    };
    let sources = sources.into_iter();
    sources
        .map(|(path, code)| (path, code, is_test_file(path)))
        .collect()
}

/// Returns the code of the items with `#[cfg(test)]` above them.
fn test_items(code: &str) -> String {
    let mut kept: Vec<u8> = code
        .bytes()
        .map(|byte| if byte == b'\n' { b'\n' } else { b' ' })
        .collect();
    for (start, end) in items(code) {
        kept[start..end].copy_from_slice(&code.as_bytes()[start..end]);
    }
    String::from_utf8(kept).expect("whole items were copied")
}

/// Returns the paths, without `.rs`, of a file's test-only modules that have files of their own.
fn test_modules(path: &str, code: &str) -> Vec<String> {
    let Some((folder, file)) = path.rsplit_once('/') else {
        return Vec::new();
    };
    let folder = match file {
        "lib.rs" | "main.rs" | "mod.rs" => folder,
        _ => path.strip_suffix(".rs").unwrap_or(path),
    };
    let declared = items(code).into_iter().filter_map(|(start, end)| {
        let words = code[start..end].split(|c: char| !(c.is_alphanumeric() || c == '_'));
        let mut words = words.skip_while(|&word| word != "mod");
        let name = code[start..end].ends_with(';').then(|| words.nth(1))??;
        Some(format!("{folder}/{name}"))
    });
    declared.collect()
}

/// Returns the spans of test-only items, from their attribute to their end.
fn items(code: &str) -> Vec<(usize, usize)> {
    let mut items: Vec<(usize, usize)> = Vec::new();
    for (start, _) in code.match_indices("#[cfg(") {
        let is_inside = items.last().is_some_and(|&(_, end)| start < end);
        let Some(length) = code[start..].find(']') else {
            continue;
        };
        if !is_inside && is_for_tests(&code[start..start + length]) {
            items.push((start, item_end(code, start + length + 1)));
        }
    }
    items
}

/// Returns whether an attribute restricts its item to tests.
fn is_for_tests(attribute: &str) -> bool {
    let condition = attribute.trim_start_matches("#[cfg(");
    let is_needed = condition.starts_with("test") || condition.starts_with("all(");
    is_needed && has_word(condition, "test") && !condition.contains("not(test)")
}

/// Returns the end of the item at `at`: after its body, or its semicolon if it has none.
fn item_end(code: &str, at: usize) -> usize {
    let mut depth = 0usize;
    for (index, byte) in code.bytes().enumerate().skip(at) {
        match byte {
            b'{' | b'(' | b'[' => depth += 1,
            b'}' | b')' | b']' => {
                depth = depth.saturating_sub(1);
                if byte == b'}' && depth == 0 {
                    return index + 1;
                }
            }
            b';' if depth == 0 => return index + 1,
            _ => {}
        }
    }
    code.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[(&str, &str)]) -> Vec<String> {
        let tree = Tree::of(files);
        let found = of_crates(&tree);
        let line = |(path, code): &(&str, String)| {
            let words: Vec<&str> = code.split_whitespace().collect();
            format!("{path}: {}", words.join(" "))
        };
        found.iter().map(line).collect()
    }

    #[test]
    fn files_below_tests_are_test_code() {
        let suite = ("crates/a/tests/suite/b.rs", "f(); // comment");
        assert_eq!(of(&[suite]), ["crates/a/tests/suite/b.rs: f();"]);
        assert!(of(&[("crates/a/src/suite.rs", "f();")]).is_empty());
        assert!(of(&[("xtask/tests/b.rs", "f();")]).is_empty());
        let tests = ("crates/a/src/b/tests.rs", "f();");
        assert_eq!(of(&[tests]), ["crates/a/src/b/tests.rs: f();"]);
    }

    #[test]
    fn items_for_tests_are_test_code() {
        let source = "fn f() { g(); }\n\
                      #[cfg(test)]\nuse a::{b, c};\n\
                      #[cfg(not(test))] fn g() {}\n\
                      #[cfg(all(test, feature = \"x\"))]\nmod tests {\n fn h(a: [u8; 2]) { i(); }\n}\n\
                      fn j() {}\n";
        let found = of(&[("crates/a/src/lib.rs", source)]);
        assert_eq!(found.len(), 1);
        for kept in ["use a::{b, c}", "fn h(a: [u8; 2]) { i(); } }"] {
            assert!(found[0].contains(kept), "{found:?}");
        }
        for left_out in ["fn f", "fn g", "fn j"] {
            assert!(!found[0].contains(left_out), "{found:?}");
        }
    }

    #[test]
    fn files_of_modules_for_tests_are_test_code() {
        let files = [
            (
                "crates/a/src/lib.rs",
                "#[cfg(test)]\nmod model;\nmod other;",
            ),
            ("crates/a/src/model.rs", "f();"),
            ("crates/a/src/model/part.rs", "g();"),
            ("crates/a/src/models.rs", "h();"),
            (
                "crates/a/src/other.rs",
                "#[cfg(test)] pub(crate) mod inner;",
            ),
            ("crates/a/src/other/inner.rs", "i();"),
        ];
        let found = of(&files);
        let paths: Vec<&str> = found
            .iter()
            .filter_map(|line| line.split(':').next())
            .collect();
        assert_eq!(
            paths,
            [
                "crates/a/src/lib.rs",
                "crates/a/src/model.rs",
                "crates/a/src/model/part.rs",
                "crates/a/src/other.rs",
                "crates/a/src/other/inner.rs",
            ]
        );
    }
}
