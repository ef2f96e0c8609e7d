//! Checks the layers of crates, which import from lower rows only, and the rooms within some of them.

use super::Tree;
use super::manifest::{dependencies, packages};
use super::module_graph::ModuleGraph;

const ROWS: [&[&str]; 6] = [
    &[
        "corella-core",
        "corella-hub",
        "corella-test",
        "corella-text",
    ],
    &["corella-model"],
    &["corella-cpu", "corella-cuda"],
    &[
        "corella-engine",
        "corella-cluster",
        "corella-quantize",
        "corella-sim",
    ],
    &["corella", "corella-server", "corella-bench"],
    &["corella-fuzz", "corella-python"],
];

/// Allowed imports within a row.
const EXCEPTIONS: [(&str, &str); 3] = [
    ("corella-cluster", "corella-engine"),
    ("corella", "corella-server"),
    ("corella", "corella-bench"),
];

/// The largest number of files in a crate without rooms. In other crates, the documentation of `lib.rs` lists the
/// rooms, from bottom to top, in lines of the form "//! * `room`: its content".
const MAX_FILES: usize = 6;

/// Both packages work without `std`. The hash identifies pages outside the process.
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

/// The folders of the crates' sources.
pub fn sources(tree: &Tree) -> impl Iterator<Item = &str> {
    let paths = tree.rust_files().map(|(path, _)| path);
    let folders = paths.filter_map(|path| path.strip_suffix("lib.rs"));
    folders.filter(|folder| {
        folder.starts_with("crates/")
            && folder.ends_with("/src/")
            && folder.matches('/').count() == 3
    })
}

/// A room is a file, or a file and a folder. It only names rooms before it in the list, by their paths or by their
/// names in `lib.rs`.
pub fn rooms(tree: &Tree) -> Vec<String> {
    sources(tree)
        .flat_map(|folder| rooms_of(tree, folder))
        .collect()
}

fn rooms_of(tree: &Tree, folder: &str) -> Vec<String> {
    let list = format!("{folder}lib.rs");
    let lines = tree.text(&list).unwrap_or_default().lines();
    let rooms: Vec<&str> = lines.filter_map(listed_room).collect();
    let place = |room: &str| rooms.iter().position(|other| *other == room);
    let room_of = |module: &'_ str| module.split("::").next().unwrap_or_default().to_string();
    let program = tree.text(&format!("{folder}main.rs")).unwrap_or_default();
    let is_of_program = |room: &str| room == "main" || program.contains(&format!("mod {room};"));
    let graph = ModuleGraph::of(tree, folder);
    if rooms.is_empty() && graph.files().count() <= MAX_FILES {
        return Vec::new();
    }
    let mut complaints = Vec::new();
    for (module, path) in graph.files() {
        let room = room_of(module);
        if is_of_program(&room) {
            continue;
        }
        let Some(own) = place(&room) else {
            complaints.push(format!(
                "{path}: give room `{room}` a line in the list of {list}"
            ));
            continue;
        };
        for used in graph.used_by(module) {
            let name = used.map_or_else(str::to_string, room_of);
            if place(&name).is_none_or(|other| other > own) {
                complaints.push(format!(
                    "{path}: `crate::{name}` is no room before `{room}` in {list}"
                ));
            }
        }
    }
    complaints
}

fn listed_room(line: &str) -> Option<&str> {
    Some(line.strip_prefix("//! * `")?.split_once('`')?.0)
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
    fn rooms_name_lower_rooms_only() {
        let complaints = |room: &str, code: &str| {
            let list = "//! * `low`: a room.\n//! * `high`: another.\n//! * `low_er`: the top.\n";
            let file = format!("crates/corella-cpu/src/{room}");
            rooms(&Tree::of(&[
                ("crates/corella-cpu/src/lib.rs", list),
                (&file, code),
            ]))
        };
        assert!(complaints("high.rs", "use crate::low::A;\nuse crate::high::part::B;").is_empty());
        assert!(complaints("high/part.rs", "// crate::low_er has more.\n").is_empty());
        assert_eq!(complaints("low/part.rs", "use crate::high::A;").len(), 1);
        assert_eq!(
            complaints("low.rs", "fn a() { crate::low_er::b() }").len(),
            1
        );
        assert_eq!(complaints("low.rs", "use crate::{high, low};").len(), 1);
        assert_eq!(complaints("low.rs", "use crate::ReExported;").len(), 1);
        assert_eq!(complaints("attic.rs", "").len(), 1);
        assert!(complaints("main.rs", "use crate::low_er::A;").is_empty());
    }

    #[test]
    fn a_large_crate_lists_its_rooms() {
        let paths: Vec<String> = (0..=MAX_FILES)
            .map(|file| format!("crates/corella-cpu/src/a{file}.rs"))
            .chain(["crates/corella-cpu/src/lib.rs".to_string()])
            .collect();
        let files: Vec<(&str, &str)> = paths.iter().map(|path| (&**path, "")).collect();
        assert_eq!(rooms(&Tree::of(&files)).len(), MAX_FILES + 1);
        assert!(rooms(&Tree::of(&files[1..])).is_empty());
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
