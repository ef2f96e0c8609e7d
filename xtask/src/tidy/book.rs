//! Checks the length of the map, and the lists in `docs` that must name every file of a folder.

use super::Tree;

const MAP: &str = "ARCHITECTURE.md";
const MAX_MAP_WORDS: usize = 2000;
const SCENARIOS: &str = "crates/corella-core/tests/scenarios/";
const BEHAVIOURS: &str = "docs/behaviours.md";
const RESULTS: &str = "bench/results/";
const RESULTS_INDEX: &str = "docs/src/results.md";
const CHAPTERS: &str = "docs/src/";
const SUMMARY: &str = "docs/src/SUMMARY.md";

/// The map is short enough to be read before the code. Rules of one room are at the head of its file.
pub fn map(tree: &Tree) -> Vec<String> {
    let map = tree.text(MAP).unwrap_or_default();
    let num_words = map.split_whitespace().count();
    if num_words <= MAX_MAP_WORDS {
        return Vec::new();
    }
    vec![format!(
        "{MAP}: has {num_words} words, and may have {MAX_MAP_WORDS}; move what concerns one room to the head of its file"
    )]
}

/// The rules of behaviour name every scenario, and each name there exists.
pub fn scenarios(tree: &Tree) -> Vec<String> {
    let behaviours = tree.text(BEHAVIOURS).unwrap_or_default();
    let existing: Vec<_> = names(tree, SCENARIOS, ".txt").collect();
    let named = || behaviours.lines().flat_map(scenarios_of);
    let mut complaints = Vec::new();
    for name in &existing {
        if !named().any(|other| other == *name) {
            complaints.push(format!(
                "{BEHAVIOURS}: names no `{name}`; add {SCENARIOS}{name}.txt to the rule that it shows"
            ));
        }
    }
    for name in named().filter(|name| !existing.contains(name)) {
        complaints.push(format!("{BEHAVIOURS}: there is no scenario `{name}`"));
    }
    complaints
}

/// The names in backquotes after the word "scenario", separated by commas.
fn scenarios_of(line: &str) -> Vec<&str> {
    let mut names = Vec::new();
    for (at, word) in line.match_indices("scenario `") {
        let mut rest = &line[at + word.len()..];
        while let Some((name, behind)) = rest.split_once('`') {
            names.push(name);
            match behind.strip_prefix(", `") {
                Some(next) => rest = next,
                None => break,
            }
        }
    }
    names
}

/// The index names every result. Other results would not be found.
pub fn results(tree: &Tree) -> Vec<String> {
    let index = tree.text(RESULTS_INDEX).unwrap_or_default();
    names(tree, RESULTS, ".md")
        .filter(|name| !index.contains(&format!("`{name}`")))
        .map(|name| format!("{RESULTS_INDEX}: names no `{name}`, which is in {RESULTS}"))
        .collect()
}

/// The summary names every chapter. mdBook leaves out other chapters.
pub fn chapters(tree: &Tree) -> Vec<String> {
    let summary = tree.text(SUMMARY).unwrap_or_default();
    names(tree, CHAPTERS, ".md")
        .filter(|name| *name != "SUMMARY" && !summary.contains(&format!("({name}.md)")))
        .map(|name| format!("{SUMMARY}: names no {name}.md, so it is not part of the book"))
        .collect()
}

/// Returns the names of the files of a folder, without the folder and the ending.
fn names<'a>(tree: &'a Tree, folder: &str, ending: &str) -> impl Iterator<Item = &'a str> {
    let paths = tree.files.iter().map(|file| file.path.as_str());
    paths.filter_map(move |path| path.strip_prefix(folder)?.strip_suffix(ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_short() {
        let complaints = |num_words| map(&Tree::of(&[(MAP, &"word\n".repeat(num_words))]));
        assert!(complaints(MAX_MAP_WORDS).is_empty());
        assert_eq!(complaints(MAX_MAP_WORDS + 1).len(), 1);
    }

    #[test]
    fn scenarios_and_their_list_name_each_other() {
        let tree = Tree::of(&[
            ("crates/corella-core/tests/scenarios/hit_full.txt", ""),
            ("crates/corella-core/tests/scenarios/overlap.txt", ""),
            (
                "docs/behaviours.md",
                "| 1 | rule | scenario `hit_full`, `gone`; sim `overlap` |",
            ),
        ]);
        let complaints = scenarios(&tree);
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[0].contains("names no `overlap`"));
        assert!(complaints[1].contains("no scenario `gone`"));
    }

    #[test]
    fn a_result_is_in_the_index() {
        let tree = Tree::of(&[
            ("bench/results/2026-01-01-one.md", ""),
            ("bench/results/2026-01-02-two.md", ""),
            ("docs/src/results.md", "| `2026-01-01-one` | a result |"),
        ]);
        let complaints = results(&tree);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].contains("2026-01-02-two"));
    }

    #[test]
    fn a_chapter_is_in_the_summary() {
        let tree = Tree::of(&[
            ("docs/src/SUMMARY.md", "[One](one.md)\n- [Two](part/two.md)"),
            ("docs/src/one.md", ""),
            ("docs/src/part/two.md", ""),
            ("docs/src/part/three.md", ""),
        ]);
        let complaints = chapters(&tree);
        assert_eq!(complaints.len(), 1, "{complaints:?}");
        assert!(complaints[0].contains("part/three.md"));
    }
}
