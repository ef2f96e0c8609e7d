//! The uses between the files of a crate, by their paths.

use std::collections::{BTreeMap, BTreeSet};

use super::Tree;
use super::layering::sources;
use super::rust_code::{has_word, without_tests, without_text};

/// The largest number of files in a circle, a parent and its children included.
const MAX_CIRCLE: usize = 3;
/// The largest number of modules through which a name is imported.
const MAX_IMPORTS: usize = 20;

pub fn circles(tree: &Tree) -> Vec<String> {
    let crates = sources(tree);
    let circles = crates.flat_map(|folder| ModuleGraph::of(tree, folder).circles());
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

/// Files of tests are left out. A module uses another if its code has a path to a name of the other. A re-export does
/// not count as a use. A child that has an `impl` of its parent's type continues the parent, so the type's name does
/// not count either.
pub struct ModuleGraph<'a> {
    /// The files by the paths of their modules, such as `cache::kv_cache`. The crate's path is empty.
    files: BTreeMap<String, &'a str>,
    /// The paths of imported names, by the paths at which modules import them.
    imports: BTreeMap<String, Vec<String>>,
    /// The paths that each module uses.
    uses: BTreeMap<String, BTreeSet<Vec<String>>>,
}

impl<'a> ModuleGraph<'a> {
    /// `folder` contains the crate's `lib.rs`.
    pub fn of(tree: &'a Tree, folder: &str) -> Self {
        let mut graph = Self {
            files: BTreeMap::new(),
            imports: BTreeMap::new(),
            uses: BTreeMap::new(),
        };
        let mut codes = Vec::new();
        for (path, text) in tree.rust_files() {
            let Some(file) = path.strip_prefix(folder) else {
                continue;
            };
            let parts = file.trim_end_matches(".rs").split('/').map(String::from);
            let module: Vec<String> = parts.filter(|part| part != "lib").collect();
            if !module.iter().any(|part| part == "tests") {
                graph.files.insert(module.join("::"), path);
                codes.push((module, without_text(without_tests(text))));
            }
        }
        for (module, code) in codes {
            graph.read(&module, &code);
        }
        graph
    }

    fn read(&mut self, module: &[String], code: &str) {
        let (imports, body) = divide(code);
        let mut uses = BTreeSet::new();
        for (is_public, import) in imports {
            for Import { path, name } in paths_of(import) {
                let Some(path) = self.absolute(module, &path) else {
                    continue;
                };
                let is_used = |name: &String| !is_public || has_word(&body, name);
                if name.as_ref().is_none_or(is_used) {
                    uses.insert(path.clone());
                }
                if let Some(name) = name {
                    let name = [module, &[name]].concat().join("::");
                    self.imports.insert(name, path);
                }
            }
        }
        for start in path_starts(&body) {
            let paths = paths_of(&body[start..]).into_iter();
            uses.extend(paths.filter_map(|import| self.absolute(module, &import.path)));
        }
        let continued: BTreeSet<&str> = continued_types(&body).collect();
        uses.retain(|path| {
            let is_continued = path.last().is_some_and(|name| continued.contains(&**name));
            let file = self.module_of(path).filter(|_| is_continued);
            file.is_none_or(|file| !is_below(&module.join("::"), file))
        });
        if !module.is_empty() {
            self.uses.insert(module.join("::"), uses);
        }
    }

    /// The path from the root of the crate. `None` for a path that begins with a name in scope, or with another crate.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let own = |part: &&String| *part == "self" || *part == "super";
        let num_own = path.iter().take_while(own).count();
        let num_up = path[..num_own]
            .iter()
            .filter(|part| *part == "super")
            .count();
        match &**path.first()? {
            "crate" => Some(path[1..].to_vec()),
            _ if num_own > 0 => {
                let above = &module[..module.len().checked_sub(num_up)?];
                Some([above, &path[num_own..]].concat())
            }
            child => {
                let file = [module, &[child.to_string()]].concat().join("::");
                let is_child = self.files.contains_key(&file);
                is_child.then(|| [module, path].concat())
            }
        }
    }

    /// The modules except `lib.rs`, each with its file.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        let files = self.files.iter().filter(|(module, _)| !module.is_empty());
        files.map(|(module, file)| (&**module, *file))
    }

    /// Returns the modules that a module uses. If a path leads to no module, the item is an error with the path's first
    /// name.
    pub fn used_by(&self, module: &str) -> impl Iterator<Item = Result<&str, &str>> {
        let uses = self.uses.get(module).into_iter().flatten();
        uses.map(|path| {
            self.module_of(path)
                .ok_or_else(|| path.first().map_or("", |name| name))
        })
    }

    fn module_of(&self, path: &[String]) -> Option<&str> {
        let mut path = path.to_vec();
        for _ in 0..MAX_IMPORTS {
            let names = (1..=path.len())
                .rev()
                .map(|length| (length, path[..length].join("::")));
            let mut known = names.filter(|(_, name)| {
                self.files.contains_key(name) || self.imports.contains_key(name)
            });
            let (length, name) = known.next()?;
            if let Some((module, _)) = self.files.get_key_value(&name) {
                return Some(module);
            }
            path = [&self.imports[&name], &path[length..]].concat();
        }
        None
    }

    /// Returns the largest sets of files in which each file leads to all others.
    fn circles(&self) -> Vec<Vec<&'a str>> {
        let modules: Vec<&str> = self.files().map(|(module, _)| module).collect();
        let reach: BTreeMap<&str, BTreeSet<&str>> = modules
            .iter()
            .map(|&from| {
                let mut reached = BTreeSet::new();
                let mut open = vec![from];
                while let Some(module) = open.pop() {
                    let next = self.used_by(module).flatten();
                    let next = next.filter(|other| *other != module);
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

fn is_below(module: &str, other: &str) -> bool {
    let rest = module.strip_prefix(other);
    rest.is_some_and(|rest| rest.starts_with("::"))
}

/// Divides code into the paths of its imports, each with whether it is a re-export, and the other code without
/// declarations of modules.
fn divide(code: &str) -> (Vec<(bool, &str)>, String) {
    let mut imports = Vec::new();
    let mut body = String::with_capacity(code.len());
    let mut rest = code;
    while !rest.is_empty() {
        let line = rest.split_inclusive('\n').next().unwrap_or(rest);
        let item = without_visibility(line);
        let mut length = line.len();
        if let Some(import) = item.strip_prefix("use ") {
            length = rest.find(';').map_or(rest.len(), |end| end + 1);
            imports.push((
                item.len() < line.len(),
                &rest[line.len() - import.len()..length],
            ));
        } else if !(item.starts_with("mod ") && item.trim_end().ends_with(';')) {
            body.push_str(line);
        }
        rest = &rest[length..];
    }
    (imports, body)
}

fn without_visibility(line: &str) -> &str {
    match line.strip_prefix("pub") {
        Some(rest) if rest.starts_with('(') => rest.split_once(") ").map_or(rest, |(_, item)| item),
        Some(rest) => rest.trim_start_matches(' '),
        None => line,
    }
}

/// The places where paths of several names begin, except paths that limit a visibility.
fn path_starts(code: &str) -> impl Iterator<Item = usize> {
    code.match_indices("::").filter_map(|(end, _)| {
        let name = code[..end].rfind(|c| !is_part(c)).map_or(0, |at| at + 1);
        let before = code[..name].trim_end();
        (name < end && !before.ends_with("::") && !before.ends_with("(in")).then_some(name)
    })
}

/// The types that have an `impl` without a trait.
fn continued_types(code: &str) -> impl Iterator<Item = &str> {
    let impls = code.split("\nimpl").skip(1);
    impls.filter_map(|item| {
        let header = item.split_once('{')?.0;
        let mut depth = 0;
        let name = header.find(|c| {
            match c {
                '<' => depth += 1,
                '>' => depth -= 1,
                _ => {}
            }
            depth == 0 && is_part(c)
        })?;
        let end = header[name..]
            .find(|c| !is_part(c))
            .map_or(header.len(), |end| name + end);
        (!header.contains(" for ")).then_some(&header[name..end])
    })
}

fn is_part(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// A path, and the name under which a `use` imports it; `None` for all names.
struct Import {
    path: Vec<String>,
    name: Option<String>,
}

/// Returns the paths of a `use`, or the one path, at the start of `code`.
fn paths_of(code: &str) -> Vec<Import> {
    let mut paths = Vec::new();
    read_paths(code, &[], &mut paths);
    paths
}

/// Reads a path, or a group of them in braces, that continues `before`. Returns the rest.
fn read_paths<'a>(code: &'a str, before: &[String], paths: &mut Vec<Import>) -> &'a str {
    if let Some(mut rest) = code.strip_prefix('{') {
        loop {
            rest = read_paths(rest.trim_start(), before, paths);
            rest = &rest[rest.find([',', '}']).unwrap_or(rest.len())..];
            match rest.strip_prefix(',') {
                Some(behind) => rest = behind,
                None => return rest.strip_prefix('}').unwrap_or(rest),
            }
        }
    }
    let end = code.find(|c| !is_part(c)).unwrap_or(code.len());
    let (name, rest) = code.split_at(end);
    if name.is_empty() {
        if rest.starts_with(['*', '<']) {
            let path = before.to_vec();
            paths.push(Import { path, name: None });
        }
        return rest;
    }
    if let Some(behind) = rest.strip_prefix("::") {
        return read_paths(behind, &[before, &[name.to_string()]].concat(), paths);
    }
    let path = match name {
        "self" => before.to_vec(),
        _ => [before, &[name.to_string()]].concat(),
    };
    let renamed = rest.strip_prefix(" as ");
    let renamed = renamed.and_then(|name| name.split(|c| !is_part(c)).next());
    let name = renamed.map(String::from).or_else(|| path.last().cloned());
    paths.push(Import { path, name });
    rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn circles_of(files: &[(&str, &str)]) -> usize {
        let path = |file: &str| format!("crates/corella-core/src/{file}");
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
        for code in [
            "// crate::a has more.\n#[cfg(test)]\nmod tests { use crate::a::A; }",
            "#[cfg(all(test, unix))]\nmod tests { use crate::a::A; }",
            "pub(in crate::a) fn d() {}",
        ] {
            files[4].1 = code;
            assert_eq!(circles_of(&files), 0, "{code}");
        }
        files[4] = ("d/tests.rs", "use crate::a::A;");
        assert_eq!(circles_of(&files), 0);
    }

    #[test]
    fn a_parent_and_its_children_may_be_a_circle() {
        let mut family = [
            ("lib.rs", ""),
            (
                "a.rs",
                "mod one;\nmod two;\nuse one::One;\nfn a() { two::f(); self::three::f() }",
            ),
            ("a/one.rs", "use crate::a::A;"),
            ("a/two.rs", "use super::A;"),
            ("a/three.rs", "fn f() -> super::A {}"),
        ];
        assert_eq!(circles_of(&family), 1);
        // A file that only lists its children uses no other file.
        family[1].1 = "mod one;\nmod two;\npub use one::One;\npub(crate) use two::Two;";
        assert_eq!(circles_of(&family), 0);
        family[1].1 =
            "mod one;\nmod two;\npub use one::One;\nfn a(_: One) { two::f(); three::f() }";
        assert_eq!(circles_of(&family), 1);
    }

    #[test]
    fn a_child_may_continue_its_parents_type() {
        let parent = "mod one;\nmod two;\nmod three;\nfn a() { one::f(); two::f(); three::f() }";
        let mut family = [
            ("lib.rs", ""),
            ("a.rs", parent),
            ("a/one.rs", "use super::A;\nimpl A {}"),
            (
                "a/two.rs",
                "use crate::a::A;\nimpl<'a, T: Into<B>> A<'a, T> {}",
            ),
            ("a/three.rs", "use super::A;\n\nimpl A {}"),
        ];
        assert_eq!(circles_of(&family), 0);
        for code in [
            "use super::{A, B};\nimpl A {}",
            "use super::A;\nimpl Debug for A {}",
        ] {
            family[2].1 = code;
            family[3].1 = code;
            family[4].1 = code;
            assert_eq!(circles_of(&family), 1, "{code}");
        }
    }

    #[test]
    fn names_that_a_parent_imports_lead_to_their_files() {
        let mut files = [
            ("lib.rs", "pub use a::One;"),
            (
                "a.rs",
                "pub use self::one::One;\nuse two::{Two as Other, Three};",
            ),
            ("a/one.rs", "use super::Other;"),
            ("a/two.rs", "use crate::b::B;"),
            ("b.rs", "use crate::c::C;"),
            ("c.rs", "use crate::One;"),
        ];
        assert_eq!(circles_of(&files), 1);
        files[5].1 = "use crate::a::A;";
        files[2].1 = "";
        assert_eq!(circles_of(&files), 1);
        files[3].1 = "";
        assert_eq!(circles_of(&files), 0);
    }

    #[test]
    fn paths_of_groups_are_told_apart() {
        let paths = |code: &str| {
            let paths = paths_of(code).into_iter();
            paths
                .map(|import| (import.path.join("::"), import.name.unwrap_or_default()))
                .map(|(path, name)| format!("{path} {name}"))
                .collect::<Vec<_>>()
        };
        assert_eq!(paths("a::B, c"), ["a::B B"]);
        assert_eq!(
            paths("{a, b::{self, d::E}, F};"),
            ["a a", "b b", "b::d::E E", "F F"]
        );
        assert_eq!(paths("a::{B as C,\n    D,\n};"), ["a::B C", "a::D D"]);
        assert_eq!(paths("a::*; {b}"), ["a "]);
        assert_eq!(paths("a::B { c: 1 }"), ["a::B B"]);
    }
}
