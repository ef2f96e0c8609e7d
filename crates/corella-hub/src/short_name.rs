//! Names without an owner: Ollama's, such as `qwen3:0.6b-q8_0`, and a repository's own, such as `Qwen3-0.6B`.
//!
//! `names.json` has the names, each with its source: the pages and files that connect the name, the repositories and
//! their files. The names lead to repositories that ask for no permission, and whose models Corella serves: GGUF files
//! (`Q4_K_M` by default), or a folder of safetensors.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::selection::is_quantisation;

const NAMES: &str = include_str!("../names.json");

/// A family of Ollama's library.
#[derive(Deserialize)]
struct Family {
    name: String,
    /// A part of tags that changes nothing, as `instruct` in `1b-instruct-q4_K_M`.
    variant: Option<String>,
    /// Tags and their repositories. The first tag is the default.
    tags: Vec<(String, String)>,
}

/// The meaning of a name without an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// `OWNER/MODEL`.
    pub repository: &'static str,
    /// The quantisation in the tag; `None` without one, and for a folder of floats.
    pub file: Option<String>,
}

/// The names of the table. A defective table, which tests would find, has no names.
fn families() -> &'static [Family] {
    static FAMILIES: OnceLock<Vec<Family>> = OnceLock::new();
    FAMILIES.get_or_init(|| serde_json::from_str(NAMES).unwrap_or_default())
}

/// The names of Ollama's library that are known.
pub fn library_names() -> impl Iterator<Item = &'static str> {
    families().iter().map(|family| family.name.as_str())
}

/// The meaning of a name in Ollama's library and its tag, or of a repository's own name, in upper or lower case. `None`
/// for an unknown name. The error for an unknown tag lists the known tags.
pub fn meaning(name: &str, tag: Option<&str>) -> Option<Result<Meaning, String>> {
    let lower = name.to_ascii_lowercase();
    if let Some(family) = families().iter().find(|family| family.name == lower) {
        return Some(family.meaning(tag.unwrap_or("latest")));
    }
    let mut repositories = families().iter().flat_map(|family| &family.tags);
    let (_, repository) = repositories.find(|(_, repository)| {
        let (_, whole) = repository.split_once('/').unwrap_or_default();
        lower == whole.to_ascii_lowercase() || lower == own_name(repository)
    })?;
    Some(Ok(Meaning {
        repository,
        file: tag.map(str::to_owned),
    }))
}

/// The names of Ollama's library for a repository, which may have `:FILE` and `@REVISION` behind it. Repositories of
/// one model have the same names, whichever owner the repositories have.
pub fn short_names(repository: &str) -> Vec<String> {
    let repository = repository.split('@').next().unwrap_or_default();
    let (repository, file) = repository.split_once(':').unwrap_or((repository, ""));
    let own = own_name(repository);
    let mut names: Vec<String> = Vec::new();
    for family in families() {
        for (at, (tag, known)) in family.tags.iter().enumerate() {
            if own.is_empty() || own_name(known) != own {
                continue;
            }
            names.push(format!("{}:{tag}", family.name));
            if is_quantisation(file) {
                names.push(format!(
                    "{}:{tag}-{}",
                    family.name,
                    ollama_quantisation(file)
                ));
            }
            if at == 0 {
                names.push(family.name.clone());
            }
        }
    }
    names
}

impl Family {
    fn meaning(&'static self, tag: &str) -> Result<Meaning, String> {
        let (rest, quantisation) = split_quantisation(tag);
        let variant = self.variant.as_deref().unwrap_or_default();
        let plain = match rest.strip_suffix(variant) {
            Some(plain) if !variant.is_empty() => plain.trim_end_matches('-'),
            _ => rest,
        };
        let is_default = matches!(plain, "" | "latest");
        let found = self.tags.iter().find(|(known, _)| {
            is_default || known.eq_ignore_ascii_case(rest) || known.eq_ignore_ascii_case(plain)
        });
        let Some((_, repository)) = found else {
            let tags: Vec<_> = self.tags.iter().map(|(tag, _)| tag.as_str()).collect();
            return Err(format!(
                "{} has the tags {}, each also with a quantisation behind it, such as {}-q8_0",
                self.name,
                tags.join(", "),
                tags[0]
            ));
        };
        let file = quantisation.map(str::to_ascii_uppercase);
        match file {
            // The weights of a folder have one format, so the tag cannot choose another.
            Some(file) if !has_gguf_files(repository) => match is_whole(&file) {
                true => Ok(Meaning {
                    repository,
                    file: None,
                }),
                false => Err(format!(
                    "{repository} is not quantised: leave out {file}, and use --dtype"
                )),
            },
            file => Ok(Meaning { repository, file }),
        }
    }
}

/// Splits `1b-instruct-q4_K_M` before the quantisation.
fn split_quantisation(tag: &str) -> (&str, Option<&str>) {
    let start = tag.rfind('-').map_or(0, |at| at + 1);
    match is_quantisation(&tag[start..]) {
        true => (tag[..start].trim_end_matches('-'), Some(&tag[start..])),
        false => (tag, None),
    }
}

fn has_gguf_files(repository: &str) -> bool {
    repository.to_ascii_lowercase().ends_with("-gguf")
}

/// Whether a format is one of floating-point numbers.
fn is_whole(quantisation: &str) -> bool {
    quantisation.starts_with("BF") || quantisation.starts_with('F')
}

/// Ollama writes `q4_K_M` and `fp16`.
fn ollama_quantisation(file: &str) -> String {
    match file.to_ascii_uppercase().as_str() {
        "F16" => "fp16".to_owned(),
        upper => match upper.strip_prefix('Q') {
            Some(rest) => format!("q{rest}"),
            None => upper.to_ascii_lowercase(),
        },
    }
}

/// A model's name in lower case, without the owner of the repository, the owner of the model that some publishers write
/// before an underscore, and the mark of GGUF files.
fn own_name(repository: &str) -> String {
    let lower = repository.to_ascii_lowercase();
    let (_, name) = lower.split_once('/').unwrap_or_default();
    let name = name.strip_suffix("-gguf").unwrap_or(name);
    let (_, name) = name.split_once('_').unwrap_or(("", name));
    name.to_owned()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::ModelName;

    #[test]
    fn names_of_ollamas_library_are_repositories() {
        for (text, meant) in [
            ("qwen3", "Qwen/Qwen3-8B-GGUF"),
            ("qwen3:0.6b", "unsloth/Qwen3-0.6B-GGUF"),
            ("qwen3:0.6b-q4_K_M", "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"),
            ("QWEN3:0.6B-Q8_0", "unsloth/Qwen3-0.6B-GGUF:Q8_0"),
            ("qwen3:0.6b@refs/pr/1", "unsloth/Qwen3-0.6B-GGUF@refs/pr/1"),
            ("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
            ("llama3.2:latest", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
            ("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF"),
            (
                "llama3.2:1b-instruct-fp16",
                "bartowski/Llama-3.2-1B-Instruct-GGUF:FP16",
            ),
            ("llama3.2:instruct", "bartowski/Llama-3.2-3B-Instruct-GGUF"),
            ("nomic-embed-text", "nomic-ai/nomic-embed-text-v1.5"),
            ("nomic-embed-text:v1.5", "nomic-ai/nomic-embed-text-v1.5"),
            (
                "nomic-embed-text:137m-v1.5-fp16",
                "nomic-ai/nomic-embed-text-v1.5",
            ),
            ("all-minilm:33m", "sentence-transformers/all-MiniLM-L12-v2"),
            ("Qwen3-0.6B", "unsloth/Qwen3-0.6B-GGUF"),
            ("qwen3-8b-gguf:Q5_K_M", "Qwen/Qwen3-8B-GGUF:Q5_K_M"),
        ] {
            let name = ModelName::parse(text).expect(text);
            assert_eq!(name.to_string(), meant, "{text}");
        }
        for (text, reason) in [
            ("qwen3:9b", "qwen3 has the tags 8b, 0.6b"),
            ("llama3.2:3b-text-q4_K_M", "llama3.2 has the tags 3b, 1b"),
            ("mxbai-embed-large:335m-v1-q4_0", "is not quantised"),
            ("qwen", "knows no such model of Ollama's library; names"),
        ] {
            let error = ModelName::parse(text).expect_err(text).to_string();
            assert!(error.contains(reason), "{error}");
        }
    }

    /// A client may ask for a model by the name under which Ollama has it, whichever repository is served.
    #[test]
    fn repositories_of_one_model_have_its_short_names() {
        let names = ["llama3.2:3b", "llama3.2"];
        assert_eq!(short_names("meta-llama/Llama-3.2-3B-Instruct"), names);
        assert_eq!(short_names("bartowski/Llama-3.2-3B-Instruct-GGUF"), names);
        assert_eq!(short_names("Qwen/Qwen3-0.6B"), ["qwen3:0.6b"]);
        assert_eq!(
            short_names("bartowski/Qwen_Qwen3-0.6B-GGUF:Q4_K_M"),
            ["qwen3:0.6b", "qwen3:0.6b-q4_K_M"]
        );
        assert_eq!(short_names("corella-nano"), [""; 0]);
    }

    /// Finds misspelt entries of the table.
    #[test]
    fn every_entry_of_the_table_has_the_form_of_a_name() {
        let families: Vec<Family> = serde_json::from_str(NAMES).expect("the table is read");
        let names: BTreeSet<_> = families.iter().map(|family| &family.name).collect();
        assert_eq!(names.len(), families.len(), "a name occurs once");
        let sources: serde_json::Value = serde_json::from_str(NAMES).expect("JSON");
        for (at, family) in families.iter().enumerate() {
            let library = format!("ollama.com/library/{};", family.name);
            let source = sources[at]["source"].as_str();
            assert!(
                source.is_some_and(|source| source.starts_with(&library)),
                "{library}"
            );
            let tags: BTreeSet<_> = family.tags.iter().map(|(tag, _)| tag).collect();
            assert_eq!(tags.len(), family.tags.len(), "{}", family.name);
            for (tag, repository) in &family.tags {
                let short = format!("{}:{tag}", family.name);
                let name = ModelName::parse(&short).expect(&short);
                assert_eq!(name.to_string(), *repository, "{short}");
                assert!(ModelName::has_form(repository), "{repository}");
                assert!(short_names(repository).contains(&short), "{short}");
                // Makers that ask for permission first.
                let owner = repository.split('/').next().unwrap_or_default();
                let gated = ["meta-llama", "google", "mistralai", "CohereLabs"];
                assert!(!gated.contains(&owner), "{repository}");
            }
            assert!(!family.tags.is_empty(), "{}", family.name);
        }
    }
}
