//! Rules of this repository that no other tool checks.

mod book;
mod foreign_package;
mod function;
mod layering;
mod manifest;
mod module_graph;
mod python_code;
mod repository;
mod rust_code;
mod source;
mod test_code;
mod waiting;

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::repository::Repository;
use crate::{limit, test};

type Rule = fn(&Tree) -> Vec<String>;

const RULES: [(&str, Rule); 25] = [
    ("layering", layering::layers),
    ("layering", layering::rooms),
    ("layering", module_graph::circles),
    ("layering", layering::foreign_crates),
    ("layering", layering::pure_core),
    ("manifests", manifest::workspace_dependencies),
    ("manifests", manifest::used_dependencies),
    ("packages", foreign_package::sources_and_versions),
    ("source", source::headers),
    ("source", source::unfinished),
    ("source", source::safety),
    ("source", source::fragments),
    ("source", source::lengths),
    ("source", function::lines),
    ("source", function::arguments),
    ("waiting", waiting::waiting),
    ("repository", repository::machine_paths),
    ("repository", repository::big_files),
    ("repository", repository::links),
    ("repository", repository::readme_command),
    ("tests", test::reasons_of_slow_tests),
    ("book", book::map),
    ("book", book::scenarios),
    ("book", book::results),
    ("book", book::chapters),
];

pub fn run(repository: &Repository) -> Result<(), String> {
    let tree = Tree::read(&repository.root)?;
    let mut complaints: Vec<String> = Vec::new();
    for (kind, rule) in RULES {
        complaints.extend(rule(&tree).iter().map(|text| format!("{kind}: {text}")));
    }
    let licences = foreign_package::licences(repository)?;
    complaints.extend(licences.iter().map(|text| format!("packages: {text}")));
    complaints.extend(limit::check_binary(repository).err());
    for line in source::long_files(&tree) {
        println!("note: {line}");
    }
    let num_lines = source::num_product_lines(&tree);
    println!("note: the crates have {num_lines} lines outside tests");
    if complaints.is_empty() {
        println!("tidy: {} files are in order", tree.files.len());
        return Ok(());
    }
    Err(format!(
        "{} complaints:\n{}",
        complaints.len(),
        complaints.join("\n")
    ))
}

/// The tracked files of the repository, and the new ones that are not ignored.
#[derive(Default)]
pub struct Tree {
    pub files: Vec<File>,
}

pub struct File {
    /// The path from the root of the repository, with `/`.
    pub path: String,
    pub num_bytes: u64,
    /// `None` if the file is not UTF-8.
    pub text: Option<String>,
}

impl Tree {
    fn read(root: &Path) -> Result<Self, String> {
        let output = Command::new("git")
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(root)
            .output()
            .map_err(|error| format!("tidy asks git for the list of files: {error}"))?;
        if !output.status.success() {
            return Err(format!(
                "tidy asks git for the list of files: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            ));
        }
        let names = String::from_utf8(output.stdout).map_err(|_| "a file name is no UTF-8")?;
        let mut tree = Self::default();
        for path in names.split_terminator('\0') {
            // A file that cannot be read was deleted, and the deletion is not committed yet.
            let Ok(bytes) = fs::read(root.join(path)) else {
                continue;
            };
            tree.files.push(File {
                path: path.to_string(),
                num_bytes: bytes.len() as u64,
                text: String::from_utf8(bytes).ok(),
            });
        }
        Ok(tree)
    }

    pub fn text(&self, path: &str) -> Option<&str> {
        self.files
            .iter()
            .find(|file| file.path == path)?
            .text
            .as_deref()
    }

    pub fn texts(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files
            .iter()
            .filter_map(|file| Some((file.path.as_str(), file.text.as_deref()?)))
    }

    pub fn rust_files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.texts().filter(|(path, _)| path.ends_with(".rs"))
    }
}

#[cfg(test)]
impl Tree {
    pub fn of(files: &[(&str, &str)]) -> Self {
        let file = |(path, text): &(&str, &str)| File {
            path: path.to_string(),
            num_bytes: text.len() as u64,
            text: Some(text.to_string()),
        };
        Self {
            files: files.iter().map(file).collect(),
        }
    }
}
