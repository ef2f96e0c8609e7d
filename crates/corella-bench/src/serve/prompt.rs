//! Prompts: from a file, or made of words.

use std::path::Path;

use serde_json::Value;

use super::PromptSource;
use crate::BenchError;

const WORDS: [&str; 64] = [
    "the", "a", "of", "and", "to", "in", "over", "under", "parrot", "flock", "tree", "river",
    "cloud", "stone", "house", "garden", "window", "letter", "morning", "evening", "winter",
    "summer", "road", "bridge", "train", "market", "child", "friend", "teacher", "doctor", "song",
    "story", "question", "answer", "number", "colour", "red", "green", "blue", "white", "small",
    "large", "quick", "slow", "old", "new", "bright", "quiet", "flies", "sings", "walks", "reads",
    "writes", "finds", "gives", "takes", "opens", "closes", "begins", "ends", "never", "always",
    "often", "together",
];

/// A prompt of more words is a mistake in the options.
const MAX_WORDS: usize = 10_000_000;

impl PromptSource {
    /// `num_prompts` prompts, the same for the same seed.
    pub(super) fn prompts(&self, num_prompts: usize, seed: u64) -> Result<Vec<String>, BenchError> {
        let distinct = match self {
            Self::File(path) => read(path)?,
            Self::Trace { .. } => unreachable!("a trace says more than prompts"),
            Self::Words { num_words } => {
                check_len("random-input-words", *num_words)?;
                (0..num_prompts as u64)
                    .map(|index| words(*num_words, seed, index))
                    .collect()
            }
            Self::Repeats { phrase, repeats } => {
                for &repeat in repeats {
                    check_len("prompt-repeats", repeat)?;
                }
                if repeats.is_empty() || phrase.trim().is_empty() {
                    return Err(BenchError::Option(
                        "--prompt-repeats needs a phrase and at least one number".into(),
                    ));
                }
                repeats
                    .iter()
                    .map(|&repeat| vec![phrase.trim(); repeat].join(" "))
                    .collect()
            }
        };
        Ok(distinct.into_iter().cycle().take(num_prompts).collect())
    }
}

fn check_len(option: &str, num_words: usize) -> Result<(), BenchError> {
    if (1..=MAX_WORDS).contains(&num_words) {
        return Ok(());
    }
    Err(BenchError::Option(format!(
        "--{option} must be between 1 and {MAX_WORDS}, not {num_words}"
    )))
}

fn words(num_words: usize, seed: u64, index: u64) -> String {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(index);
    let words: Vec<&str> = (0..num_words)
        .map(|_| WORDS[(split_mix(&mut state) % WORDS.len() as u64) as usize])
        .collect();
    words.join(" ")
}

/// SplitMix64: small, and the same everywhere.
pub(super) fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn read(path: &Path) -> Result<Vec<String>, BenchError> {
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
            prompts.push(line.to_owned());
            continue;
        }
        let object: Value = serde_json::from_str(line)
            .map_err(|cause| error(format!("line {}: {cause}", index + 1)))?;
        let Some(prompt) = object["prompt"].as_str() else {
            return Err(error(format!("line {}: no string \"prompt\"", index + 1)));
        };
        prompts.push(prompt.to_owned());
    }
    if prompts.is_empty() {
        return Err(error("no prompts in it".into()));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_cycle() {
        let source = PromptSource::Repeats {
            phrase: "to fly ".into(),
            repeats: vec![3, 1],
        };
        assert_eq!(
            source.prompts(3, 0).unwrap(),
            ["to fly to fly to fly", "to fly", "to fly to fly to fly"]
        );
        for (phrase, repeats) in [("", vec![1]), ("x", vec![]), ("x", vec![1, 0])] {
            let source = PromptSource::Repeats {
                phrase: phrase.into(),
                repeats,
            };
            assert!(matches!(source.prompts(3, 0), Err(BenchError::Option(_))));
        }
    }

    #[test]
    fn words_depend_on_seed_and_place_only() {
        let source = PromptSource::Words { num_words: 40 };
        let prompts = source.prompts(3, 7).unwrap();
        assert!(prompts.iter().all(|prompt| prompt.split(' ').count() == 40));
        assert_eq!(source.prompts(2, 7).unwrap(), prompts[..2]);
        assert_ne!(prompts[0], prompts[1]);
        assert_ne!(source.prompts(1, 8).unwrap()[0], prompts[0]);
    }

    #[test]
    fn files_are_read_by_line() {
        let folder = std::env::temp_dir().join(format!("corella-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let prompts = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            PromptSource::File(path).prompts(3, 0)
        };
        assert_eq!(
            prompts("a.txt", "one\n\n{two}\n").unwrap(),
            ["one", "{two}", "one"]
        );
        assert_eq!(
            prompts("a.jsonl", "{\"prompt\": \"x\\ny\"}\n").unwrap()[0],
            "x\ny"
        );
        let error = prompts("b.jsonl", "{\"prompt\": \"x\"}\n{}")
            .unwrap_err()
            .to_string();
        assert!(error.contains("b.jsonl: line 2"), "{error}");
        assert!(prompts("empty.txt", "\n").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(
            PromptSource::File(folder.join("a.txt"))
                .prompts(1, 0)
                .is_err()
        );
    }
}
