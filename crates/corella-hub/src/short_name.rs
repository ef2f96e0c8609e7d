//! Names without an owner: Ollama's, such as `qwen3:0.6b`, and a repository's own, such as `Qwen3-0.6B`.

/// A family of Ollama's library: its name, and the repository of each size. The first size is the default.
struct Family {
    name: &'static str,
    sizes: &'static [(&'static str, &'static str)],
}

/// The instructed models of each family, by their makers. Tags are Ollama's.
const FAMILIES: [Family; 23] = [
    Family {
        name: "qwen3",
        sizes: &[
            ("8b", "Qwen/Qwen3-8B"),
            ("0.6b", "Qwen/Qwen3-0.6B"),
            ("1.7b", "Qwen/Qwen3-1.7B"),
            ("4b", "Qwen/Qwen3-4B"),
            ("14b", "Qwen/Qwen3-14B"),
            ("32b", "Qwen/Qwen3-32B"),
            ("30b", "Qwen/Qwen3-30B-A3B"),
            ("235b", "Qwen/Qwen3-235B-A22B"),
        ],
    },
    Family {
        name: "qwen3-coder",
        sizes: &[("30b", "Qwen/Qwen3-Coder-30B-A3B-Instruct")],
    },
    Family {
        name: "qwen2.5",
        sizes: &[
            ("7b", "Qwen/Qwen2.5-7B-Instruct"),
            ("0.5b", "Qwen/Qwen2.5-0.5B-Instruct"),
            ("1.5b", "Qwen/Qwen2.5-1.5B-Instruct"),
            ("3b", "Qwen/Qwen2.5-3B-Instruct"),
            ("14b", "Qwen/Qwen2.5-14B-Instruct"),
            ("32b", "Qwen/Qwen2.5-32B-Instruct"),
            ("72b", "Qwen/Qwen2.5-72B-Instruct"),
        ],
    },
    Family {
        name: "qwen2.5-coder",
        sizes: &[
            ("7b", "Qwen/Qwen2.5-Coder-7B-Instruct"),
            ("0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
            ("1.5b", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
            ("3b", "Qwen/Qwen2.5-Coder-3B-Instruct"),
            ("14b", "Qwen/Qwen2.5-Coder-14B-Instruct"),
            ("32b", "Qwen/Qwen2.5-Coder-32B-Instruct"),
        ],
    },
    Family {
        name: "qwen2",
        sizes: &[
            ("7b", "Qwen/Qwen2-7B-Instruct"),
            ("0.5b", "Qwen/Qwen2-0.5B-Instruct"),
            ("1.5b", "Qwen/Qwen2-1.5B-Instruct"),
            ("72b", "Qwen/Qwen2-72B-Instruct"),
        ],
    },
    Family {
        name: "qwq",
        sizes: &[("32b", "Qwen/QwQ-32B")],
    },
    Family {
        name: "llama3.3",
        sizes: &[("70b", "meta-llama/Llama-3.3-70B-Instruct")],
    },
    Family {
        name: "llama3.2",
        sizes: &[
            ("3b", "meta-llama/Llama-3.2-3B-Instruct"),
            ("1b", "meta-llama/Llama-3.2-1B-Instruct"),
        ],
    },
    Family {
        name: "llama3.1",
        sizes: &[
            ("8b", "meta-llama/Llama-3.1-8B-Instruct"),
            ("70b", "meta-llama/Llama-3.1-70B-Instruct"),
            ("405b", "meta-llama/Llama-3.1-405B-Instruct"),
        ],
    },
    Family {
        name: "llama3",
        sizes: &[
            ("8b", "meta-llama/Meta-Llama-3-8B-Instruct"),
            ("70b", "meta-llama/Meta-Llama-3-70B-Instruct"),
        ],
    },
    Family {
        name: "mistral",
        sizes: &[("7b", "mistralai/Mistral-7B-Instruct-v0.3")],
    },
    Family {
        name: "mixtral",
        sizes: &[("8x7b", "mistralai/Mixtral-8x7B-Instruct-v0.1")],
    },
    Family {
        name: "gemma3",
        sizes: &[
            ("4b", "google/gemma-3-4b-it"),
            ("270m", "google/gemma-3-270m-it"),
            ("1b", "google/gemma-3-1b-it"),
            ("12b", "google/gemma-3-12b-it"),
            ("27b", "google/gemma-3-27b-it"),
        ],
    },
    Family {
        name: "gemma2",
        sizes: &[
            ("9b", "google/gemma-2-9b-it"),
            ("2b", "google/gemma-2-2b-it"),
            ("27b", "google/gemma-2-27b-it"),
        ],
    },
    Family {
        name: "gpt-oss",
        sizes: &[
            ("20b", "openai/gpt-oss-20b"),
            ("120b", "openai/gpt-oss-120b"),
        ],
    },
    Family {
        name: "phi4",
        sizes: &[("14b", "microsoft/phi-4")],
    },
    Family {
        name: "phi4-mini",
        sizes: &[("3.8b", "microsoft/Phi-4-mini-instruct")],
    },
    Family {
        name: "phi3.5",
        sizes: &[("3.8b", "microsoft/Phi-3.5-mini-instruct")],
    },
    Family {
        name: "smollm2",
        sizes: &[
            ("1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
            ("135m", "HuggingFaceTB/SmolLM2-135M-Instruct"),
            ("360m", "HuggingFaceTB/SmolLM2-360M-Instruct"),
        ],
    },
    Family {
        name: "tinyllama",
        sizes: &[("1.1b", "TinyLlama/TinyLlama-1.1B-Chat-v1.0")],
    },
    Family {
        name: "deepseek-r1",
        sizes: &[
            ("8b", "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B"),
            ("1.5b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
            ("7b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
            ("14b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
            ("32b", "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
            ("70b", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"),
        ],
    },
    Family {
        name: "granite3.3",
        sizes: &[
            ("8b", "ibm-granite/granite-3.3-8b-instruct"),
            ("2b", "ibm-granite/granite-3.3-2b-instruct"),
        ],
    },
    Family {
        name: "starcoder2",
        sizes: &[
            ("3b", "bigcode/starcoder2-3b"),
            ("7b", "bigcode/starcoder2-7b"),
            ("15b", "bigcode/starcoder2-15b"),
        ],
    },
];

/// The repository of a name without an owner: `family`, `family:size` or `family:latest` of Ollama's library, or the
/// repository's own name in any case.
pub fn repository_of(text: &str) -> Option<&'static str> {
    let lower = text.to_ascii_lowercase();
    let (name, tag) = lower.split_once(':').unwrap_or((&lower, "latest"));
    let family = FAMILIES.iter().find(|family| family.name == name);
    if let Some(family) = family {
        let mut sizes = family.sizes.iter();
        let found = match tag {
            "latest" => sizes.next(),
            tag => sizes.find(|(size, _)| *size == tag),
        };
        return found.map(|(_, repository)| *repository);
    }
    let repositories = { FAMILIES.iter() }
        .flat_map(|family| family.sizes)
        .map(|(_, repository)| *repository);
    { repositories }.find(|repository| {
        let own = repository.split_once('/').map(|(_, model)| model);
        own.is_some_and(|own| own.eq_ignore_ascii_case(text))
    })
}

/// The sizes of a family, if `text` names one.
pub fn tags_of(text: &str) -> Option<Vec<&'static str>> {
    let lower = text.to_ascii_lowercase();
    let name = lower.split(':').next().unwrap_or_default();
    let family = FAMILIES.iter().find(|family| family.name == name)?;
    Some(family.sizes.iter().map(|(size, _)| *size).collect())
}

/// The names of Ollama's library for a repository.
pub fn short_names(repository: &str) -> Vec<String> {
    let mut names = Vec::new();
    for family in &FAMILIES {
        for (at, (size, known)) in family.sizes.iter().enumerate() {
            if known.eq_ignore_ascii_case(repository) {
                names.push(format!("{}:{size}", family.name));
                if at == 0 {
                    names.push(family.name.to_owned());
                }
            }
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelName;

    #[test]
    fn names_of_ollamas_library_are_repositories() {
        for (text, repository) in [
            ("qwen3:0.6b", "Qwen/Qwen3-0.6B"),
            ("llama3.2", "meta-llama/Llama-3.2-3B-Instruct"),
            ("llama3.2:1b", "meta-llama/Llama-3.2-1B-Instruct"),
            ("llama3.2:latest", "meta-llama/Llama-3.2-3B-Instruct"),
            ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            (
                "smollm2-135m-instruct",
                "HuggingFaceTB/SmolLM2-135M-Instruct",
            ),
        ] {
            assert_eq!(repository_of(text), Some(repository), "{text}");
            let name = ModelName::parse(text).expect("it is a name");
            assert_eq!(name.to_string(), repository, "{text}");
        }
        for text in ["qwen3:9b", "qwen", "llama3.2:3b-instruct-q4_K_M", ""] {
            assert_eq!(repository_of(text), None, "{text}");
        }
        let error = ModelName::parse("qwen3:9b").expect_err("there is no such size");
        assert!(
            error.to_string().contains("qwen3 has the sizes 8b, 0.6b"),
            "{error}"
        );
        assert_eq!(
            short_names("meta-llama/Llama-3.2-3B-Instruct"),
            ["llama3.2:3b", "llama3.2"]
        );
        assert_eq!(short_names("Qwen/Qwen3-0.6B"), ["qwen3:0.6b"]);
    }

    /// A table's entry may be misspelt.
    #[test]
    fn every_repository_has_the_form_of_a_name() {
        for family in &FAMILIES {
            for (size, repository) in family.sizes {
                assert!(ModelName::has_form(repository), "{repository}");
                let short = format!("{}:{size}", family.name);
                assert_eq!(repository_of(&short), Some(*repository));
                assert!(short_names(repository).contains(&short));
            }
        }
    }
}
