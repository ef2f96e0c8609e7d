//! Prompts, and how to read them from a file or make them from a repeated phrase.

use std::path::Path;

use serde::Deserialize;

use crate::BenchError;

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "`prompt` must be text or a list of token ids")]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The limit of repeats. A larger number is a mistake in the options.
const MAX_REPEATS: usize = 10_000_000;

/// Makes prompts from a phrase: prompt i repeats it `repeats[i % len]` times.
pub(super) fn repeated(phrase: &str, repeats: &[usize]) -> Result<Vec<Prompt>, BenchError> {
    let phrase = phrase.trim();
    if repeats.is_empty() || phrase.is_empty() {
        return Err(BenchError::Option(
            "--prompt-repeats needs a phrase and at least one number".into(),
        ));
    }
    if let Some(repeat) = repeats.iter().find(|n| !(1..=MAX_REPEATS).contains(*n)) {
        return Err(BenchError::Option(format!(
            "--prompt-repeats must be between 1 and {MAX_REPEATS}, not {repeat}"
        )));
    }
    let prompts = repeats
        .iter()
        .map(|&repeat| Prompt::Text(vec![phrase; repeat].join(" ")));
    Ok(prompts.collect())
}

#[derive(Deserialize)]
struct Line {
    prompt: Prompt,
}

/// Reads a file with one prompt per line; lines of a `.jsonl` file are objects.
pub(super) fn read(path: &Path) -> Result<Vec<Prompt>, BenchError> {
    let error = |reason: String| BenchError::File(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    let is_jsonl = path
        .extension()
        .is_some_and(|extension| extension == "jsonl");
    let mut prompts = Vec::new();
    for (index, line) in text
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        if !is_jsonl {
            prompts.push(Prompt::Text(line.to_owned()));
            continue;
        }
        let line: Line = serde_json::from_str(line)
            .map_err(|cause| error(format!("line {}: {cause}", index + 1)))?;
        prompts.push(line.prompt);
    }
    if prompts.is_empty() {
        return Err(error("the file has no prompts".into()));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(prompts: &[&str]) -> Vec<Prompt> {
        let prompts = prompts.iter().map(|&text| Prompt::Text(text.into()));
        prompts.collect()
    }

    #[test]
    fn a_phrase_is_repeated() {
        assert_eq!(
            repeated("to fly ", &[3, 1]).unwrap(),
            texts(&["to fly to fly to fly", "to fly"])
        );
        for (phrase, repeats) in [("", &[1][..]), ("x", &[]), ("x", &[1, 0])] {
            let refused = repeated(phrase, repeats);
            assert!(matches!(refused, Err(BenchError::Option(_))));
        }
    }

    #[test]
    fn files_are_read_by_line() {
        let folder = std::env::temp_dir().join(format!("corella-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let prompts = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            read(&path)
        };
        assert_eq!(
            prompts("a.txt", "one\n\n{two}\n").unwrap(),
            texts(&["one", "{two}"])
        );
        let lines = "{\"prompt\": \"x\\ny\"}\n\n{\"prompt\": [7, 8], \"id\": 1}\n";
        assert_eq!(
            prompts("a.jsonl", lines).unwrap(),
            [Prompt::Text("x\ny".into()), Prompt::Tokens(vec![7, 8])]
        );
        for wrong in [
            "{}",
            "{\"prompt\": 7}",
            "{\"prompt\": [-1]}",
            "{\"prompt\": null}",
        ] {
            let error = prompts("b.jsonl", &format!("{{\"prompt\": \"x\"}}\n{wrong}"))
                .unwrap_err()
                .to_string();
            assert!(error.contains("b.jsonl: line 2"), "{error}");
        }
        assert!(prompts("empty.txt", "\n").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(read(&folder.join("a.txt")).is_err());
    }
}
