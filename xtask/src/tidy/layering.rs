//! Checks the layers of crates: a crate imports from lower rows only.

use super::Tree;
use super::manifest::{dependencies, packages};

const ROWS: [&[&str]; 5] = [
    &["corella-core", "corella-text"],
    &["corella-model"],
    &["corella-cpu", "corella-cuda"],
    &["corella-engine", "corella-cluster", "corella-sim"],
    &["corella", "corella-server", "corella-bench"],
];

/// Imports that are allowed within a row.
const EXCEPTIONS: [(&str, &str); 3] = [
    ("corella-cluster", "corella-engine"),
    ("corella", "corella-server"),
    ("corella", "corella-bench"),
];

/// Both work without `std`. The hash identifies pages outside of the process.
const CORE_MAY_USE: [&str; 2] = ["hashbrown", "xxhash-rust"];

/// Dependencies that do not belong to the job of a crate.
const BANNED: [(&str, &[&str], &str); 4] = [
    (
        "corella-engine",
        &["tokio", "axum", "tokenizers"],
        "the engine knows only tokens and its own thread",
    ),
    (
        "corella-model",
        &["tokio", "axum"],
        "a checkpoint knows nothing of HTTP",
    ),
    (
        "corella-cpu",
        &["tokio", "rayon"],
        "the executor has its own worker pool",
    ),
    (
        "corella-text",
        &["tokio", "axum"],
        "this crate only computes text; the server serves it",
    ),
];

pub fn layers(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (folder, name, manifest) in packages(tree) {
        if folder == "xtask" {
            continue;
        }
        let Some(row) = row_of(name) else {
            complaints.push(format!(
                "{folder}: give the crate a row in xtask/src/tidy/layering.rs and in \
                 ARCHITECTURE.md"
            ));
            continue;
        };
        for dependency in dependencies(manifest) {
            let Some(other_row) = row_of(dependency.name) else {
                continue;
            };
            if other_row >= row && !EXCEPTIONS.contains(&(name, dependency.name)) {
                complaints.push(format!(
                    "{folder}: {name} (row {row}) may not import {} (row {other_row})",
                    dependency.name
                ));
            }
        }
    }
    complaints
}

fn row_of(name: &str) -> Option<usize> {
    ROWS.iter().position(|row| row.contains(&name))
}

pub fn foreign_crates(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (folder, name, manifest) in packages(tree) {
        for dependency in dependencies(manifest) {
            let reason = match name {
                "corella-core" if !dependency.dev && !CORE_MAY_USE.contains(&dependency.name) => {
                    Some("the core needs hashbrown and xxhash-rust and nothing else")
                }
                _ => BANNED
                    .iter()
                    .find(|(banned_in, names, _)| {
                        *banned_in == name && names.contains(&dependency.name)
                    })
                    .map(|(_, _, reason)| *reason),
            };
            if let Some(reason) = reason {
                complaints.push(format!("{folder}: no {} here: {reason}", dependency.name));
            }
        }
    }
    complaints
}

pub fn pure_core(tree: &Tree) -> Vec<String> {
    let path = "crates/corella-core/src/lib.rs";
    let Some(text) = tree.text(path) else {
        return Vec::new();
    };
    ["#![no_std]", "#![forbid(unsafe_code)]"]
        .into_iter()
        .filter(|attribute| !text.lines().any(|line| line == *attribute))
        .map(|attribute| format!("{path}: must say {attribute}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaints(folder: &str, dependencies: &str) -> Vec<String> {
        let manifest = format!("[dependencies]\n{dependencies}\n");
        let path = format!("{folder}/Cargo.toml");
        let tree = Tree::of(&[(&path, &manifest)]);
        [layers(&tree), foreign_crates(&tree)].concat()
    }

    #[test]
    fn imports_go_down_only() {
        let cpu = "crates/corella-cpu";
        assert!(complaints(cpu, "corella-core.workspace = true").is_empty());
        assert_eq!(complaints(cpu, "corella-engine.workspace = true").len(), 1);
        assert_eq!(complaints(cpu, "corella-cuda.workspace = true").len(), 1);
        assert_eq!(
            complaints(cpu, "corella-engine = { workspace = true }").len(),
            1
        );
        assert_eq!(
            complaints("crates/corella-text", "corella-core.workspace = true").len(),
            1
        );
    }

    #[test]
    fn dev_dependencies_obey_too() {
        let manifest = "[dev-dependencies]\ncorella-server.workspace = true\n";
        let tree = Tree::of(&[("crates/corella-engine/Cargo.toml", manifest)]);
        assert_eq!(layers(&tree).len(), 1);
    }

    #[test]
    fn exceptions_hold_in_one_direction() {
        let line = "corella-server.workspace = true";
        assert!(complaints("crates/corella", line).is_empty());
        assert_eq!(complaints("crates/corella-bench", line).len(), 1);
        assert_eq!(
            complaints("crates/corella-server", "corella.workspace = true").len(),
            1
        );
    }

    #[test]
    fn unknown_crates_need_a_row() {
        assert_eq!(complaints("crates/corella-misc", "").len(), 1);
    }

    #[test]
    fn the_core_stays_pure() {
        assert!(complaints("crates/corella-core", "hashbrown.workspace = true").is_empty());
        assert_eq!(
            complaints("crates/corella-core", "log.workspace = true").len(),
            1
        );
        assert_eq!(
            complaints("crates/corella-engine", "tokio.workspace = true").len(),
            1
        );

        let core =
            |text: &str| pure_core(&Tree::of(&[("crates/corella-core/src/lib.rs", text)])).len();
        assert_eq!(core("//! x\n#![no_std]\n#![forbid(unsafe_code)]\n"), 0);
        assert_eq!(core("//! x\n#![forbid(unsafe_code)]\n"), 1);
        assert_eq!(core("//! #![no_std]\n"), 2);
    }
}
