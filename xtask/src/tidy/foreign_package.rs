//! Checks the third-party packages in Cargo.lock: their source, that each occurs once, and their
//! licences.
//!
//! Known vulnerabilities are not checked, because their list is a git repository that an offline
//! build lacks.

use std::collections::BTreeMap;

use super::Tree;
use crate::repository::{Repository, output};

const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Licences that allow Corella to be Apache-2.0 and require at most attribution, in SPDX's short forms.
const LICENCES: [&str; 9] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Zlib",
];

/// Packages with several versions, and the package that uses the oldest version.
const SEVERAL_VERSIONS: [(&str, &str); 8] = [
    ("base64", "spm_precompiled, of tokenizers"),
    ("getrandom", "ring"),
    ("hashbrown", "safetensors"),
    ("r-efi", "getrandom 0.3"),
    ("rand", "tokenizers"),
    ("rand_core", "rand"),
    ("syn", "derive_builder, of tokenizers, and others"),
    ("windows-sys", "ring"),
];

/// Every package comes from crates.io, with a checksum, and occurs once.
pub fn sources_and_versions(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in locked(tree.text("Cargo.lock").unwrap_or_default()) {
        versions
            .entry(package.name)
            .or_default()
            .push(package.version);
        match package.source {
            None => {}
            Some(REGISTRY) if package.has_checksum => {}
            Some(REGISTRY) => complaints.push(format!(
                "Cargo.lock: {} {} has no checksum",
                package.name, package.version
            )),
            Some(source) => complaints.push(format!(
                "Cargo.lock: {} {} comes from {source}; take it from crates.io",
                package.name, package.version
            )),
        }
    }
    for (name, versions) in &versions {
        let is_known = SEVERAL_VERSIONS.iter().any(|(known, _)| known == name);
        if versions.len() > 1 && !is_known {
            complaints.push(format!(
                "Cargo.lock: {name} is there as {}; `cargo tree --workspace --target all --duplicates` \
                 shows which packages need which version. Use one version, or list {name} in SEVERAL_VERSIONS of \
                 xtask/src/tidy/foreign_package.rs, with the package that needs the old version",
                versions.join(" and ")
            ));
        }
    }
    for (name, _) in SEVERAL_VERSIONS {
        if versions
            .get(name)
            .is_some_and(|versions| versions.len() == 1)
        {
            complaints.push(format!(
                "{name} is there in one version now; take it out of SEVERAL_VERSIONS of \
                 xtask/src/tidy/foreign_package.rs"
            ));
        }
    }
    complaints
}

struct Locked<'a> {
    name: &'a str,
    version: &'a str,
    /// `None` for the packages of this repository.
    source: Option<&'a str>,
    has_checksum: bool,
}

fn locked(lock: &str) -> impl Iterator<Item = Locked<'_>> {
    lock.split("[[package]]").skip(1).map(|table| {
        let value = |key: &str| {
            let line = table.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.strip_prefix(" = ")?.trim_matches('"'))
        };
        Locked {
            name: value("name").unwrap_or_default(),
            version: value("version").unwrap_or_default(),
            source: value("source"),
            has_checksum: value("checksum").is_some(),
        }
    })
}

/// Every package, on every system and for every use, offers a licence of [`LICENCES`].
pub fn licences(repository: &Repository) -> Result<Vec<String>, String> {
    let listed = output(&mut repository.cargo(&[
        "tree",
        "--workspace",
        "--locked",
        "--quiet",
        "--target=all",
        "--all-features",
        "--edges=normal,build,dev",
        "--prefix=none",
        "--no-dedupe",
        "--format={p}\t{l}",
    ]))?;
    Ok(refused_licences(&listed))
}

/// `listed` has a package and its SPDX expression in each line, separated by a tab.
fn refused_licences(listed: &str) -> Vec<String> {
    let packages: BTreeMap<&str, &str> = listed
        .lines()
        .filter_map(|line| line.split_once('\t'))
        .collect();
    packages
        .iter()
        .filter(|(_, expression)| !may_be_used(expression))
        .map(|(package, expression)| {
            let package = package.split(" (").next().unwrap_or(package);
            match expression.trim() {
                "" => format!("{package} names no licence"),
                expression => format!(
                    "{package} is under {expression}, of which xtask/src/tidy/foreign_package.rs \
                     allows none"
                ),
            }
        })
        .collect()
}

/// Returns whether [`LICENCES`] alone can satisfy an SPDX expression. A slash is an old form of `OR`.
fn may_be_used(expression: &str) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut rest = &words[..];
    any(&mut rest) == Some(true) && rest.is_empty()
}

/// Reads terms separated by `OR`; `None` means that the expression is unreadable.
fn any(rest: &mut &[&str]) -> Option<bool> {
    let mut allowed = all(rest)?;
    while let ["OR", after @ ..] = *rest {
        *rest = after;
        allowed |= all(rest)?;
    }
    Some(allowed)
}

/// Reads terms separated by `AND`, which binds more closely than `OR`.
fn all(rest: &mut &[&str]) -> Option<bool> {
    let mut allowed = term(rest)?;
    while let ["AND", after @ ..] = *rest {
        *rest = after;
        allowed &= term(rest)?;
    }
    Some(allowed)
}

fn term(rest: &mut &[&str]) -> Option<bool> {
    match *rest {
        ["(", after @ ..] => {
            *rest = after;
            let allowed = any(rest)?;
            let [")", after @ ..] = *rest else {
                return None;
            };
            *rest = after;
            Some(allowed)
        }
        [licence, "WITH", exception, after @ ..] => {
            *rest = after;
            let licence = format!("{licence} WITH {exception}");
            Some(LICENCES.contains(&licence.as_str()))
        }
        [licence, after @ ..] => {
            *rest = after;
            Some(LICENCES.contains(licence))
        }
        [] => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_must_be_one_of_those_allowed() {
        for allowed in [
            "MIT",
            "MIT/Apache-2.0",
            "Unlicense OR MIT",
            "(MIT OR GPL-3.0-only) AND Unicode-3.0",
            "GPL-3.0-only OR MIT AND ISC",
            "Apache-2.0 WITH LLVM-exception",
        ] {
            assert!(may_be_used(allowed), "{allowed}");
        }
        for refused in [
            "",
            "GPL-3.0-only",
            "MIT AND GPL-3.0-only",
            "(MIT OR ISC) AND GPL-3.0-only",
            "MIT WITH LLVM-exception",
            "MIT OR",
            "(MIT",
            "MIT ISC",
        ] {
            assert!(!may_be_used(refused), "{refused}");
        }
    }

    #[test]
    fn a_refused_licence_is_told_once_with_its_package() {
        let listed =
            "a v1.0.0 (/a)\tMIT\nb v2.0.0\tGPL-3.0-only\n\nb v2.0.0\tGPL-3.0-only\nc v3.0.0\t\n";
        let complaints = refused_licences(listed);
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[0].starts_with("b v2.0.0 is under GPL-3.0-only"));
        assert_eq!(complaints[1], "c v3.0.0 names no licence");
    }

    fn complaints(packages: &[(&str, &str, &str)]) -> Vec<String> {
        let tables = packages.iter().map(|(name, version, more)| {
            format!("[[package]]\nname = \"{name}\"\nversion = \"{version}\"\n{more}\n")
        });
        let lock = format!("version = 4\n\n{}", tables.collect::<String>());
        sources_and_versions(&Tree::of(&[("Cargo.lock", &lock)]))
    }

    #[test]
    fn a_package_comes_from_the_registry_with_a_checksum() {
        let registry = format!("source = \"{REGISTRY}\"\n");
        let whole = format!("{registry}checksum = \"00\"\n");
        assert_eq!(
            complaints(&[("a", "1.0.0", &whole), ("own", "0.1.0", "")]).len(),
            0
        );
        assert_eq!(complaints(&[("a", "1.0.0", &registry)]).len(), 1);
        let git = complaints(&[("a", "1.0.0", "source = \"git+https://example.com/a#0\"")]);
        assert!(
            git[0].contains("comes from git+https://example.com/a#0"),
            "{git:?}"
        );
    }

    #[test]
    fn a_package_is_there_once_unless_it_is_known() {
        let twice = |name| complaints(&[(name, "1.0.0", ""), (name, "2.0.0", "")]);
        assert!(twice("a")[0].contains("a is there as 1.0.0 and 2.0.0"));
        assert_eq!(twice("syn").len(), 0);
        assert_eq!(complaints(&[("syn", "2.0.0", "")]).len(), 1);
    }
}
