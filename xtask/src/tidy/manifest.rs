//! Checks the Cargo.toml files: every dependency comes from the workspace and is used.

use super::{Tree, rust_code};

pub struct Dependency<'a> {
    pub name: &'a str,
    /// The text after the name.
    value: &'a str,
    pub dev: bool,
}

/// Returns the dependencies of one Cargo.toml, in all sections. It parses only the TOML that
/// manifests use.
pub fn dependencies(manifest: &str) -> Vec<Dependency<'_>> {
    let mut section = "";
    let mut found = Vec::new();
    for line in manifest.lines().map(str::trim) {
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
            if let Some((kind, name)) = section.rsplit_once('.')
                && kind.ends_with("dependencies")
            {
                found.push(Dependency {
                    name,
                    value: "a table of its own",
                    dev: kind.ends_with("dev-dependencies"),
                });
            }
            continue;
        }
        let name_length = line
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '-' || c == '_'))
            .unwrap_or(0);
        if section.ends_with("dependencies") && name_length > 0 {
            found.push(Dependency {
                name: &line[..name_length],
                value: &line[name_length..],
                dev: section.ends_with("dev-dependencies"),
            });
        }
    }
    found
}

/// Returns folder, package name and manifest of every package except the workspace itself.
pub fn packages(tree: &Tree) -> Vec<(&str, &str, &str)> {
    tree.texts()
        .filter_map(|(path, text)| {
            let folder = path.strip_suffix("/Cargo.toml")?;
            let name = folder.rsplit('/').next()?;
            Some((folder, name, text))
        })
        .collect()
}

/// Versions and features are given once, in the root manifest.
pub fn workspace_dependencies(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (folder, _, manifest) in packages(tree) {
        for dependency in dependencies(manifest) {
            let value = dependency.value.replace(' ', "");
            let from_workspace = value == ".workspace=true"
                || (value.starts_with("={") && value.contains("workspace=true"));
            if !from_workspace {
                complaints.push(format!(
                    "{folder}/Cargo.toml: `{}` must be `workspace = true`, with its version in \
                     the root's [workspace.dependencies]",
                    dependency.name
                ));
            }
        }
    }
    complaints
}

/// The code names every dependency; unused ones only cost build time.
pub fn used_dependencies(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (folder, _, manifest) in packages(tree) {
        let code: String = tree
            .rust_files()
            .filter(|(path, _)| {
                path.strip_prefix(folder)
                    .is_some_and(|rest| rest.starts_with('/'))
            })
            .map(|(_, text)| rust_code::without_text(text))
            .collect();
        for dependency in dependencies(manifest) {
            if !rust_code::has_word(&code, &dependency.name.replace('-', "_")) {
                complaints.push(format!(
                    "{folder}/Cargo.toml: `{}` is used nowhere in the crate",
                    dependency.name
                ));
            }
        }
    }
    let root = tree.text("Cargo.toml").unwrap_or_default();
    for dependency in dependencies(root) {
        let used = packages(tree).iter().any(|(_, _, manifest)| {
            dependencies(manifest)
                .iter()
                .any(|other| other.name == dependency.name)
        });
        if !used {
            complaints.push(format!(
                "Cargo.toml: no crate depends on `{}`",
                dependency.name
            ));
        }
    }
    complaints
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_the_workspace() {
        let sample = |dependency: &str| {
            let manifest = format!("[dependencies]\n{dependency}\n[dev-dependencies]\n");
            workspace_dependencies(&Tree::of(&[("crates/a/Cargo.toml", &manifest)])).len()
        };
        assert_eq!(sample("serde.workspace = true"), 0);
        assert_eq!(
            sample("serde = { workspace = true, features = [\"x\"] }"),
            0
        );
        assert_eq!(sample("serde = \"1\""), 1);
        assert_eq!(sample("serde = { version = \"1\" }"), 1);
        assert_eq!(sample("[target.'cfg(unix)'.dependencies]\nlibc = \"1\""), 1);
        assert_eq!(sample("[build-dependencies.cc]\nversion = \"1\""), 1);
    }

    #[test]
    fn unused_dependencies_are_found() {
        let sample = |code: &str| {
            let tree = Tree::of(&[
                (
                    "Cargo.toml",
                    "[workspace.dependencies]\nserde-json = \"1\"\n",
                ),
                (
                    "crates/a/Cargo.toml",
                    "[dependencies]\nserde-json.workspace = true\n",
                ),
                ("crates/a/src/lib.rs", code),
                ("crates/ab/src/lib.rs", "use serde_json::Value;"),
            ]);
            used_dependencies(&tree)
        };
        assert!(sample("use serde_json::Value;").is_empty());
        assert_eq!(sample("use my_serde_json::Value;").len(), 1);
        assert_eq!(sample("// serde_json is named in a comment only").len(), 1);
    }

    #[test]
    fn workspace_entries_without_a_user_are_found() {
        let tree = Tree::of(&[("Cargo.toml", "[workspace.dependencies]\nrayon = \"1\"\n")]);
        let complaints = used_dependencies(&tree);
        assert_eq!(complaints.len(), 1);
        assert!(complaints[0].contains("rayon"));
    }
}
