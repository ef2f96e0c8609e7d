//! The test binaries of packages, built and located by cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::repository::{Repository, output};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct TestBinary {
    pub package: String,
    pub kind: TargetKind,
    /// The name of the target: `suite` for `tests/suite/main.rs`, `corella_core` for a library's unit tests.
    pub name: String,
    pub executable: PathBuf,
    /// The folder of the package's manifest, in which cargo runs the binary.
    pub folder: PathBuf,
}

/// The source of a test binary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetKind {
    Library,
    Program,
    Test,
    Example,
    Bench,
}

/// Builds the test binaries that `cargo test` with these arguments would run, and returns them by package, kind and
/// name. Documentation tests are in no binary.
pub fn find(repository: &Repository, cargo_arguments: &[&str]) -> Result<Vec<TestBinary>, String> {
    let mut build = repository.cargo(&["test", "--no-run", "--locked"]);
    build.args(["--message-format", "json-render-diagnostics"]);
    let messages = output(build.args(cargo_arguments))?;
    let binaries: Result<Vec<_>, String> = messages.lines().filter_map(of_message).collect();
    let mut binaries = binaries?;
    binaries.sort();
    binaries.dedup();
    Ok(binaries)
}

impl TestBinary {
    /// Returns a command that runs the binary like cargo: in its package's folder, which the environment also names.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        command
            .current_dir(&self.folder)
            .env("CARGO_MANIFEST_DIR", &self.folder)
            .env("CARGO_PKG_NAME", &self.package);
        command
    }

    /// Returns the package, and the argument of `cargo test` that selects this binary of it.
    pub fn selection(&self) -> String {
        let target = match self.kind {
            TargetKind::Library => "--lib".to_string(),
            TargetKind::Program => format!("--bin {}", self.name),
            TargetKind::Test => format!("--test {}", self.name),
            TargetKind::Example => format!("--example {}", self.name),
            TargetKind::Bench => format!("--bench {}", self.name),
        };
        format!("{} {target}", self.package)
    }
}

/// Returns the test binary in a line of cargo's output, if any. Programs and examples that tests start are also
/// compiled and have executables, but not with the test profile.
fn of_message(line: &str) -> Option<Result<TestBinary, String>> {
    let text = |object: &str, name: &str| json_text(json_field(object, name)?);
    if text(line, "reason")? != "compiler-artifact" {
        return None;
    }
    if json_field(json_field(line, "profile")?, "test")? != "true" {
        return None;
    }
    let executable = PathBuf::from(text(line, "executable")?);
    let binary = || {
        let target = json_field(line, "target")?;
        let manifest = PathBuf::from(text(line, "manifest_path")?);
        Some(TestBinary {
            package: package_name(&text(line, "package_id")?)?.to_string(),
            kind: target_kind(json_field(target, "kind")?),
            name: text(target, "name")?,
            executable: executable.clone(),
            folder: manifest.parent().map(Path::to_path_buf)?,
        })
    };
    let say = || {
        format!(
            "cargo says too little about {}: {line}",
            executable.display()
        )
    };
    Some(binary().ok_or_else(say))
}

/// Returns the name in the identifier of a package: `path+file:///folder#name@version`, or `path+file:///name#version`
/// if the folder has the package's name.
fn package_name(id: &str) -> Option<&str> {
    let (folder, fragment) = id.rsplit_once('#')?;
    match fragment.split_once('@') {
        Some((name, _)) => Some(name),
        None => folder.rsplit('/').next(),
    }
}

/// Returns the kind of a target from a list such as `["test"]`; a library's list names its build forms.
fn target_kind(list: &str) -> TargetKind {
    match list {
        r#"["bin"]"# => TargetKind::Program,
        r#"["test"]"# => TargetKind::Test,
        r#"["example"]"# => TargetKind::Example,
        r#"["bench"]"# => TargetKind::Bench,
        _ => TargetKind::Library,
    }
}

/// Returns the raw value of a field of a JSON object. Fields of nested objects do not count.
fn json_field<'a>(object: &'a str, name: &str) -> Option<&'a str> {
    let mut at = object.find('{')? + 1;
    loop {
        let key = json_value(object, at)?;
        let after = at + skipped(object, at) + key.len();
        let colon = after + object[after..].find(':')?;
        let value = json_value(object, colon + 1)?;
        if json_text(key).as_deref() == Some(name) {
            return Some(value);
        }
        let end = colon + 1 + skipped(object, colon + 1) + value.len();
        let rest = object[end..].trim_start();
        at = object.len() - rest.strip_prefix(',')?.len();
    }
}

/// Returns the raw JSON value at `at` or after spaces there.
fn json_value(text: &str, at: usize) -> Option<&str> {
    let value = &text[at + skipped(text, at)..];
    let (mut depth, mut in_text, mut escaped) = (0usize, false, false);
    for (index, byte) in value.bytes().enumerate() {
        if in_text {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => {
                    in_text = false;
                    if depth == 0 {
                        return Some(&value[..=index]);
                    }
                }
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_text = true,
            b'{' | b'[' => depth += 1,
            // The end of the enclosing object or list.
            b'}' | b']' if depth == 0 => return (index > 0).then(|| value[..index].trim_end()),
            b'}' | b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(&value[..=index]);
                }
            }
            b',' if depth == 0 => return (index > 0).then(|| value[..index].trim_end()),
            _ => {}
        }
    }
    None
}

/// The number of bytes of white space at `at`.
fn skipped(text: &str, at: usize) -> usize {
    text[at..].len() - text[at..].trim_start().len()
}

/// Decodes a JSON string; returns `None` for other values.
fn json_text(value: &str) -> Option<String> {
    let inner = value.strip_prefix('"')?.strip_suffix('"')?;
    let mut text = String::with_capacity(inner.len());
    let mut characters = inner.chars();
    while let Some(character) = characters.next() {
        if character != '\\' {
            text.push(character);
            continue;
        }
        text.push(match characters.next()? {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'b' => '\u{8}',
            'f' => '\u{c}',
            'u' => {
                let digits: String = characters.by_ref().take(4).collect();
                if digits.len() != 4 {
                    return None;
                }
                // Cargo writes characters beyond the first 65536 directly, so no character is written as two escapes.
                char::from_u32(u32::from_str_radix(&digits, 16).ok()?)?
            }
            other => other,
        });
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUITE: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/crates/corella-core#0.1.0","manifest_path":"/w/crates/corella-core/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"suite","src_path":"/w/crates/corella-core/tests/suite/main.rs","edition":"2024","doc":false,"doctest":false,"test":true},"profile":{"opt_level":"2","debuginfo":0,"debug_assertions":true,"overflow_checks":true,"test":true},"features":["executable","a:{\"}"],"filenames":["/t/debug/deps/suite-1"],"executable":"/t/debug/deps/suite-1","fresh":true}"#;

    fn suite() -> TestBinary {
        TestBinary {
            package: "corella-core".into(),
            kind: TargetKind::Test,
            name: "suite".into(),
            executable: "/t/debug/deps/suite-1".into(),
            folder: "/w/crates/corella-core".into(),
        }
    }

    #[test]
    fn a_test_binary_is_read_from_a_message() {
        assert_eq!(of_message(SUITE), Some(Ok(suite())));
    }

    #[test]
    fn paths_are_read_with_spaces_and_quotes() {
        let line = SUITE.replace("/t/debug", r#"/t \"\\é/debug"#);
        let found = of_message(&line).unwrap().unwrap();
        assert_eq!(found.executable, Path::new("/t \"\\é/debug/deps/suite-1"));
    }

    #[test]
    fn other_messages_are_no_test_binaries() {
        let program = SUITE.replace(
            r#""overflow_checks":true,"test":true"#,
            r#""overflow_checks":true,"test":false"#,
        );
        assert_ne!(program, SUITE);
        let library = SUITE.replace(
            r#""executable":"/t/debug/deps/suite-1""#,
            r#""executable":null"#,
        );
        let script = SUITE.replace("compiler-artifact", "build-script-executed");
        let end = r#"{"reason":"build-finished","success":true}"#;
        for line in [&program, &library, &script, end, "", "running 3 tests", "{"] {
            assert_eq!(of_message(line), None, "{line}");
        }
    }

    #[test]
    fn a_message_that_says_too_little_is_an_error() {
        let line = SUITE.replace("manifest_path", "manifest");
        assert!(of_message(&line).unwrap().is_err());
    }

    #[test]
    fn packages_are_named_by_their_identifier() {
        let named = "path+file:///w/crates/core#corella-core@0.1.0";
        assert_eq!(package_name(named), Some("corella-core"));
        assert_eq!(package_name("path+file:///w/xtask#0.1.0"), Some("xtask"));
        assert_eq!(package_name("xtask"), None);
    }

    #[test]
    fn a_selection_names_one_binary() {
        let mut binary = suite();
        assert_eq!(binary.selection(), "corella-core --test suite");
        binary.kind = target_kind(r#"["lib"]"#);
        assert_eq!(binary.selection(), "corella-core --lib");
        binary.kind = target_kind(r#"["cdylib","rlib"]"#);
        assert_eq!(binary.selection(), "corella-core --lib");
        binary.kind = target_kind(r#"["bin"]"#);
        assert_eq!(binary.selection(), "corella-core --bin suite");
    }

    #[test]
    fn fields_are_those_of_the_outer_object() {
        let object = r#" { "a" : {"b": 1, "x\"": "}"} , "b":[1,"]",{"c":2}] , "c": null}"#;
        assert_eq!(json_field(object, "a"), Some(r#"{"b": 1, "x\"": "}"}"#));
        assert_eq!(json_field(object, "b"), Some(r#"[1,"]",{"c":2}]"#));
        assert_eq!(json_field(object, "c"), Some("null"));
        assert_eq!(json_field(object, "d"), None);
        for broken in [
            "",
            "{",
            "{\"a\"",
            "{\"a\":",
            "{\"a\":\"x",
            "{\"a\":,",
            "{}",
            "{\"b\":1,",
        ] {
            assert_eq!(json_field(broken, "a"), None, "{broken}");
        }
    }

    #[test]
    fn texts_are_unescaped() {
        let text = json_text(r#""\"\\\/\n\t\u00e9""#);
        assert_eq!(text.as_deref(), Some("\"\\/\n\té"));
        for no_text in ["1", "null", "[\"a\"]", r#""\u00""#] {
            assert_eq!(json_text(no_text), None, "{no_text}");
        }
    }
}
