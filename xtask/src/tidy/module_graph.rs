//! The dependencies between the files of a crate, by paths that begin with `crate::` or `super::`.

use std::collections::{BTreeMap, BTreeSet};

use super::{Tree, rust_code};

/// Limits the files of a circle. A module may name its children, which does not count.
const MAX_CIRCLE: usize = 3;

/// The crates checked for circles.
const CRATES: [&str; 3] = [
    "crates/corella-core/src/",
    "crates/corella-cluster/src/",
    "crates/corella-server/src/",
];

pub fn circles(tree: &Tree) -> Vec<String> {
    let crates = CRATES.iter().map(|folder| ModuleGraph::of(tree, folder));
    let circles = crates.flat_map(|graph| graph.circles());
    circles
        .filter(|files| files.len() > MAX_CIRCLE)
        .map(|files| {
            format!(
                "{} files use each other in a circle, of at most {MAX_CIRCLE}: {}",
                files.len(),
                files.join(", ")
            )
        })
        .collect()
}

pub struct ModuleGraph<'a> {
    /// The files by the paths of their modules, such as `cache::kv_cache`. The crate's path is empty.
    files: BTreeMap<String, &'a str>,
    /// The paths of names that modules re-export from their children, by the resulting paths.
    re_exports: BTreeMap<String, Vec<String>>,
    /// The paths that each module uses outside the tests in its file.
    uses: BTreeMap<String, BTreeSet<Vec<String>>>,
}

impl<'a> ModuleGraph<'a> {
    /// `folder` contains the crate's `lib.rs`.
    pub fn of(tree: &'a Tree, folder: &str) -> Self {
        let mut graph = Self {
            files: BTreeMap::new(),
            re_exports: BTreeMap::new(),
            uses: BTreeMap::new(),
        };
        for (path, text) in tree.rust_files() {
            let Some(file) = path.strip_prefix(folder) else {
                continue;
            };
            let module = file.trim_end_matches(".rs").replace('/', "::");
            let code = rust_code::without_text(text);
            let code = match code.find("#[cfg(test)]\nmod tests") {
                Some(tests) => &code[..tests],
                None => &code,
            };
            let module = if module == "lib" { "" } else { &*module }.to_string();
            let own: Vec<String> = module.split_terminator("::").map(String::from).collect();
            let re_exports = code.split("pub use ").skip(1).flat_map(use_paths);
            for path in re_exports.filter(|path| !["crate", "super", "self"].contains(&&*path[0])) {
                // The name of a module leads to the module, even if the module has something of its own name.
                if let [first, .., name] = &path[..]
                    && first != name
                {
                    let name = [&own[..], std::slice::from_ref(name)].concat();
                    graph
                        .re_exports
                        .insert(name.join("::"), [&own[..], &path].concat());
                }
            }
            if module.is_empty() {
                graph.files.insert(module, path);
                continue;
            }
            graph.files.insert(module.clone(), path);
            let from_root = code.split("crate::").skip(1).flat_map(use_paths);
            let above = &own[..own.len() - 1];
            let from_above = code.split("super::").skip(1).flat_map(use_paths);
            let from_above = from_above.map(|path| [above, &path].concat());
            let uses = from_root.chain(from_above).collect();
            graph.uses.insert(module, uses);
        }
        graph
    }

    /// The modules except `lib.rs`, each with its file.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        let files = self.files.iter().filter(|(module, _)| !module.is_empty());
        files.map(|(module, file)| (&**module, *file))
    }

    /// Returns the modules that a module uses. An error has the first name of a path to no module.
    pub fn used_by(&self, module: &str) -> impl Iterator<Item = Result<&str, &str>> {
        let uses = self.uses.get(module).into_iter().flatten();
        uses.map(|path| {
            self.module_of(path)
                .ok_or_else(|| path.first().map_or("", |name| name))
        })
    }

    fn module_of(&self, path: &[String]) -> Option<&str> {
        let mut beginnings = (1..=path.len())
            .rev()
            .map(|length| path[..length].join("::"));
        if let Some(path) = beginnings
            .clone()
            .find_map(|name| self.re_exports.get(&name))
        {
            // The child may re-export the name from a child of its own.
            return self.module_of(path);
        }
        let found = beginnings.find_map(|module| self.files.get_key_value(&module))?;
        Some(&**found.0)
    }

    /// Returns the largest sets of files in which each file leads to all others.
    fn circles(&self) -> Vec<Vec<&'a str>> {
        let modules: Vec<&str> = self.files().map(|(module, _)| module).collect();
        let is_child = |module: &str, other: &str| {
            other
                .strip_prefix(module)
                .is_some_and(|rest| rest.starts_with("::"))
        };
        let reach: BTreeMap<&str, BTreeSet<&str>> = modules
            .iter()
            .map(|&from| {
                let mut reached = BTreeSet::new();
                let mut open = vec![from];
                while let Some(module) = open.pop() {
                    let next = self.used_by(module).flatten();
                    let next = next.filter(|other| *other != module && !is_child(module, other));
                    open.extend(next.filter(|other| reached.insert(*other)));
                }
                (from, reached)
            })
            .collect();
        let mut circles = Vec::new();
        let mut seen = BTreeSet::new();
        for &module in &modules {
            let leads_back = |other: &&&str| reach[**other].contains(module);
            let circle: Vec<&str> = reach[module].iter().filter(leads_back).copied().collect();
            if circle.len() > 1 && seen.insert(circle.clone()) {
                circles.push(circle.iter().map(|module| self.files[*module]).collect());
            }
        }
        circles
    }
}

/// Returns the paths of a `use`, or the one path, at the start of `code`.
fn use_paths(code: &str) -> Vec<Vec<String>> {
    let mut paths = Vec::new();
    read_paths(code, &[], &mut paths);
    paths
}

/// Reads a path, or a group of them in braces, that continues `before`. Returns the rest.
fn read_paths<'a>(code: &'a str, before: &[String], paths: &mut Vec<Vec<String>>) -> &'a str {
    if let Some(mut rest) = code.strip_prefix('{') {
        loop {
            rest = read_paths(rest.trim_start(), before, paths);
            // A name may be followed by `as` and its new name.
            rest = &rest[rest.find([',', '}']).unwrap_or(rest.len())..];
            match rest.strip_prefix(',') {
                Some(behind) => rest = behind,
                None => return rest.strip_prefix('}').unwrap_or(rest),
            }
        }
    }
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let end = code.find(|c| !is_part(c)).unwrap_or(code.len());
    let (name, rest) = code.split_at(end);
    if name.is_empty() {
        if rest.starts_with(['*', '<']) {
            paths.push(before.to_vec());
        }
        return rest;
    }
    let path = [before, &[name.to_string()]].concat();
    match rest.strip_prefix("::") {
        Some(behind) => read_paths(behind, &path, paths),
        None => {
            paths.push(path);
            rest
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(files: &[(&str, &str)]) -> usize {
        let path = |file: &str| format!("{}{file}", CRATES[0]);
        let files: Vec<_> = files
            .iter()
            .map(|(file, text)| (path(file), *text))
            .collect();
        let files: Vec<_> = files.iter().map(|(file, text)| (&**file, *text)).collect();
        circles(&Tree::of(&files)).len()
    }

    #[test]
    fn four_files_are_a_circle_too_many() {
        let files = [
            ("lib.rs", "pub use d::{self, Named};"),
            ("a.rs", "use crate::{x::{Y, Z}, b};"),
            ("b.rs", "fn b() { crate::c::f() }"),
            ("c.rs", "use crate::Named;"),
            ("d.rs", "use crate::a::A;"),
        ];
        assert_eq!(circles_of(&files), 1);
        assert_eq!(circles_of(&files[..4]), 0);
        // Names in comments and tests do not count.
        let mut files = files;
        files[4].1 = "// crate::a has more.\n#[cfg(test)]\nmod tests { use crate::a::A; }";
        assert_eq!(circles_of(&files), 0);
    }

    #[test]
    fn a_module_may_name_its_children() {
        let family = [
            ("lib.rs", ""),
            ("a.rs", "use crate::a::one::One;\nuse crate::a::two::Two;"),
            ("a/one.rs", "use crate::a::A;"),
            ("a/two.rs", "use super::A;"),
            ("a/three.rs", "use crate::a::A;"),
        ];
        assert_eq!(circles_of(&family), 0);
        // Another file leads back to them.
        let mut files = family;
        files[1].1 = "use crate::b::B;";
        files[4].1 = "use super::one::One;";
        let mut files = files.to_vec();
        files.push(("b.rs", "use crate::a::three::Three;"));
        assert_eq!(circles_of(&files), 1);
    }

    #[test]
    fn names_that_a_parent_has_from_its_children_lead_to_the_children() {
        let mut files = [
            ("lib.rs", "pub use a::One;"),
            ("a.rs", "pub use one::One;\npub use two::{Two, Three};"),
            ("a/one.rs", "use super::Two;"),
            ("a/two.rs", "use crate::b::B;"),
            ("b.rs", "use crate::c::C;"),
            ("c.rs", "use crate::One;"),
        ];
        assert_eq!(circles_of(&files), 1);
        files[5].1 = "use crate::a::A;";
        assert_eq!(circles_of(&files), 0);
        files[0].1 = "pub use b::b;";
        files[5].1 = "use crate::b;";
        assert_eq!(circles_of(&files), 0);
    }

    #[test]
    fn paths_of_groups_are_told_apart() {
        let paths = |code: &str| {
            let paths = use_paths(code).into_iter();
            paths.map(|path| path.join("::")).collect::<Vec<_>>()
        };
        assert_eq!(paths("a::B, c"), ["a::B"]);
        assert_eq!(
            paths("{a, b::{C, d::E}, F};"),
            ["a", "b::C", "b::d::E", "F"]
        );
        assert_eq!(paths("a::{B as C,\n    D,\n};"), ["a::B", "a::D"]);
        assert_eq!(paths("a::*; {b}"), ["a"]);
        assert_eq!(paths("a::B { c: 1 }"), ["a::B"]);
    }
}
