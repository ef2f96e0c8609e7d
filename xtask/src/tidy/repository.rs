//! Rules for the repository as a whole.

use super::Tree;
use crate::repository::resolve_link;

/// Folders of weights, whose files may be big.
const MAY_BE_BIG: [&str; 2] = ["models/nano/", "tests/golden/"];
const MAX_BYTES: u64 = 1 << 20;

/// Absolute paths of one machine do not exist on others.
pub fn machine_paths(tree: &Tree) -> Vec<String> {
    // The folders are put together here, because this file is checked too.
    let folders = ["work", "home", "root"].map(|name| format!("/{name}/"));
    let mut complaints = Vec::new();
    for (path, text) in tree.texts() {
        for (index, line) in text.lines().enumerate() {
            let found = folders.iter().any(|folder| {
                line.match_indices(folder.as_str())
                    .any(|(at, _)| !line[..at].ends_with(part_of_path))
            });
            if found {
                complaints.push(format!(
                    "{path}:{}: a path of one machine; make it relative",
                    index + 1
                ));
            }
        }
    }
    complaints
}

fn part_of_path(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '~' | '}' | ')' | '*')
}

pub fn big_files(tree: &Tree) -> Vec<String> {
    tree.files
        .iter()
        .filter(|file| file.num_bytes > MAX_BYTES)
        .filter(|file| {
            !MAY_BE_BIG
                .iter()
                .any(|folder| file.path.starts_with(folder))
        })
        .map(|file| {
            format!(
                "{}: {} bytes; do not commit a file that can be made from a seed",
                file.path, file.num_bytes
            )
        })
        .collect()
}

/// Links in Markdown lead to existing files.
pub fn links(tree: &Tree) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in tree.texts().filter(|(path, _)| path.ends_with(".md")) {
        for (_, rest) in text
            .match_indices("](")
            .map(|(at, _)| text.split_at(at + 2))
        {
            let Some((link, _)) = rest.split_once(')') else {
                continue;
            };
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") || file.contains(char::is_whitespace) {
                continue;
            }
            let target = resolve_link(path, file);
            let folder = format!("{target}/");
            let exists = |file: &super::File| file.path == target || file.path.starts_with(&folder);
            if !tree.files.iter().any(exists) {
                complaints.push(format!("{path}: {link} leads nowhere"));
            }
        }
    }
    complaints
}

/// The README's test command is the one that CI runs.
pub fn readme_command(tree: &Tree) -> Vec<String> {
    let Some(script) = tree.text(".ci/run") else {
        return vec![".ci/run is missing".into()];
    };
    let Some(command) = script
        .lines()
        .map(|line| line.trim().trim_start_matches("exec "))
        .rfind(|line| !line.is_empty() && !line.starts_with('#'))
    else {
        return vec![".ci/run runs nothing".into()];
    };
    let readme = tree.text("README.md").unwrap_or_default();
    let mut in_block = false;
    for line in readme.lines() {
        if line.starts_with("```") {
            in_block = !in_block;
        } else if in_block && line.trim() == command {
            return Vec::new();
        }
    }
    vec![format!(
        "README.md: no block of commands has the line `{command}`, which .ci/run ends with"
    )]
}

#[cfg(test)]
mod tests {
    use super::super::File;
    use super::*;

    #[test]
    fn machine_paths_are_found() {
        let check = |text: &str| machine_paths(&Tree::of(&[("notes.md", text)])).len();
        let path = |name: &str| format!("see /{name}/x/y");
        assert_eq!(check(&path("work")), 1);
        assert_eq!(check(&path("home")), 1);
        assert_eq!(check(&path("root")), 1);
        assert_eq!(check(&format!("(\"{}\")", path("root"))), 1);
        assert_eq!(check("see net/work/x and https://a.org/home/x"), 0);
        assert_eq!(check("/workspace/x /homes/x"), 0);
    }

    #[test]
    fn big_files_are_found() {
        let check = |path: &str, num_bytes| {
            let file = File {
                path: path.into(),
                num_bytes,
                text: None,
            };
            big_files(&Tree { files: vec![file] }).len()
        };
        assert_eq!(check("bench/results/x.json", MAX_BYTES), 0);
        assert_eq!(check("bench/results/x.json", MAX_BYTES + 1), 1);
        assert_eq!(check("models/nano/model.safetensors", 8 << 20), 0);
        assert_eq!(check("crates/models/nano/x", 8 << 20), 1);
    }

    #[test]
    fn dead_links_are_found() {
        let check = |text: &str| {
            let other = ("bench/results/a.md", "");
            links(&Tree::of(&[("docs/notes.md", text), other])).len()
        };
        assert_eq!(check("[a](../bench/results/a.md#part)"), 0);
        assert_eq!(check("[a](../bench/results)"), 0);
        assert_eq!(check("[a](../bench/res)"), 1);
        assert_eq!(check("[a](a.md) and [b](b.md)"), 2);
        assert_eq!(check("[a](https://a.org/a.md) [b](#part)"), 0);
    }

    #[test]
    fn readme_and_ci_agree() {
        let check = |script: &str, readme: &str| {
            readme_command(&Tree::of(&[(".ci/run", script), ("README.md", readme)])).len()
        };
        let script = "#!/bin/bash\nset -e\nexec cargo xtask ci\n";
        assert_eq!(check(script, "```sh\ncargo xtask ci\n```\n"), 0);
        assert_eq!(check(script, "Run cargo xtask ci\n"), 1);
        assert_eq!(check(script, "cargo xtask ci\n"), 1);
        assert_eq!(
            check("#!/bin/bash\ncargo test\n", "```sh\ncargo xtask ci\n```\n"),
            1
        );
        assert_eq!(check("#!/bin/bash\n", "```sh\ncargo xtask ci\n```\n"), 1);
        assert_eq!(readme_command(&Tree::of(&[])).len(), 1);
    }
}
