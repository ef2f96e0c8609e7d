//! The name of a model on the hub, as a user types it.

use std::fmt;

use crate::HubError;
use crate::short_name::{Meaning, meaning};

/// `OWNER/MODEL`, then `:FILE` for one of its GGUF files, by quantisation or by name, and `@REVISION` for a branch, a
/// tag or a commit. The last two may come in either order. A name of Ollama's library, such as `qwen3:0.6b`, means a
/// repository with its files.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelName {
    /// `OWNER/MODEL`.
    pub repository: String,
    /// A quantisation such as `Q4_K_M`, or the name of a GGUF file.
    pub file: Option<String>,
    pub revision: Option<String>,
}

/// Prefixes of other programs, and of addresses copied from a browser.
const PREFIXES: [&str; 5] = [
    "https://huggingface.co/",
    "https://hf.co/",
    "huggingface.co/",
    "hf.co/",
    "hf://",
];

/// The hub's own limit for OWNER/MODEL.
const MAX_LEN: usize = 96;

impl ModelName {
    /// The branch of a name without a revision.
    pub const MAIN: &'static str = "main";

    /// Whether `text` has the form of a name: exactly one slash in OWNER/MODEL, and no character that only paths have.
    /// Such a text may still be the path of a folder.
    pub fn has_form(text: &str) -> bool {
        Self::parse(text).is_ok()
    }

    pub fn parse(text: &str) -> Result<Self, HubError> {
        let wrong = |why: &str| {
            HubError::Name(format!(
                "`{text}` is no name of a model: {why}; names have the form OWNER/MODEL, \
                 OWNER/MODEL:Q4_K_M or OWNER/MODEL@REVISION"
            ))
        };
        let plain = PREFIXES.iter().find_map(|prefix| text.strip_prefix(prefix));
        let plain = plain.unwrap_or(text);
        let end = plain.find([':', '@']).unwrap_or(plain.len());
        let (repository, mut rest) = plain.split_at(end);
        let (mut file, mut revision) = (None, None);
        while let Some(mark) = rest.chars().next() {
            let (place, other) = match mark {
                ':' => (&mut file, '@'),
                _ => (&mut revision, ':'),
            };
            let end = rest[1..].find(other).map_or(rest.len(), |at| at + 1);
            if place.replace(rest[1..end].to_owned()).is_some() {
                return Err(wrong("`:` and `@` may come once each"));
            }
            rest = &rest[end..];
        }
        let Some((owner, model)) = repository.split_once('/') else {
            let meant = meaning(repository, file.as_deref());
            let Meaning { repository, file } = meant
                .ok_or_else(|| {
                    wrong("it has no owner, and Corella knows no such model of Ollama's library")
                })?
                .map_err(|reason| HubError::Tag(format!("`{text}` is no model: {reason}")))?;
            let whole = Self {
                repository: repository.to_owned(),
                file,
                revision,
            };
            return Self::parse(&whole.to_string());
        };
        if !(is_part(owner) && is_part(model)) || repository.len() > MAX_LEN {
            return Err(wrong(
                "OWNER and MODEL are letters, digits, `-`, `_` and `.`",
            ));
        }
        if model.ends_with(".gguf") || model.ends_with(".safetensors") {
            return Err(wrong("it names a file"));
        }
        if file.as_deref().is_some_and(|file| !is_safe_path(file)) {
            return Err(wrong(
                "after `:` comes a quantisation or the name of a GGUF file",
            ));
        }
        if revision
            .as_deref()
            .is_some_and(|revision| !is_safe_path(revision))
        {
            return Err(wrong("after `@` comes a branch, a tag or a commit"));
        }
        Ok(Self {
            repository: repository.to_owned(),
            file,
            revision,
        })
    }

    pub fn revision_or_main(&self) -> &str {
        self.revision.as_deref().unwrap_or(Self::MAIN)
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        if let Some(file) = &self.file {
            write!(f, ":{file}")?;
        }
        match &self.revision {
            Some(revision) => write!(f, "@{revision}"),
            None => Ok(()),
        }
    }
}

pub(crate) fn is_part(part: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let is_end = |byte: Option<&u8>| byte.is_some_and(|byte| !b"-.".contains(byte));
    let bytes = part.as_bytes();
    // Two hyphens separate OWNER and MODEL in the cache, and the hub allows neither two hyphens nor two dots in a row.
    part.bytes().all(is_plain)
        && is_end(bytes.first())
        && is_end(bytes.last())
        && !part.contains("--")
        && !part.contains("..")
}

/// Whether a path of the hub, joined to a folder, stays within it on every system.
pub(crate) fn is_safe_path(path: &str) -> bool {
    const MAX_LEN: usize = 512;
    let is_plain = |c: char| !c.is_control() && !"\\:*?\"<>|".contains(c);
    path.len() <= MAX_LEN
        && path.chars().all(is_plain)
        && path.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

/// Whether a revision is a full commit hash, whose meaning never changes.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && is_lower_hex(revision)
}

pub(crate) fn is_lower_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, repository: &str, file: Option<&str>, revision: Option<&str>) {
        let name = ModelName::parse(text).unwrap();
        let parts = (
            name.repository.as_str(),
            name.file.as_deref(),
            name.revision.as_deref(),
        );
        assert_eq!(parts, (repository, file, revision));
        assert_eq!(ModelName::parse(&name.to_string()).unwrap(), name);
    }

    #[test]
    fn a_name_has_a_repository_a_file_and_a_revision() {
        check("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", None, None);
        check("a/b:Q4_K_M", "a/b", Some("Q4_K_M"), None);
        check("a/b@v1.0", "a/b", None, Some("v1.0"));
        check("a/b:Q8_0@refs/pr/3", "a/b", Some("Q8_0"), Some("refs/pr/3"));
        check("a/b@refs/pr/3:Q8_0", "a/b", Some("Q8_0"), Some("refs/pr/3"));
        check(
            "a/b:UD/b-00001-of-00002.gguf",
            "a/b",
            Some("UD/b-00001-of-00002.gguf"),
            None,
        );
        check("hf.co/a/b:Q4_0", "a/b", Some("Q4_0"), None);
        check("https://huggingface.co/a/b", "a/b", None, None);
    }

    #[test]
    fn paths_are_not_names() {
        for text in [
            "",
            "model",
            "model.gguf",
            "./a/b",
            "../b",
            "/a/b",
            "a/b/c",
            "a/",
            "/b",
            "a/b.gguf",
            "models/nano/",
            "~/a",
            "a b/c",
            "a/..",
            "a--b/c",
            "-a/b",
            "a/b.",
            "a/b:",
            "a/b@",
            "a/b:x:y",
            "a/b@../../etc",
            "a/b:../x",
            "a/b@/etc/passwd",
            "a\\b",
            "C:/a",
            "a/b@x\ny",
            "a/b@a//b",
        ] {
            assert!(!ModelName::has_form(text), "{text:?}");
        }
        let long = format!("a/{}", "b".repeat(95));
        assert!(!ModelName::has_form(&long));
    }
}
