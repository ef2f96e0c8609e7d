//! `corella pull`, `corella list` and `corella rm`: the hub's cache.

use corella_hub::{
    DEFAULT_QUANTISATION, Hub, HubConfig, HubError, ModelName, OllamaModel, OllamaStore,
    short_names,
};

use crate::built_in;
use crate::terminal::fetch_display::{FetchDisplay, shown_bytes};
use crate::terminal::output::print_line;

/// Prints the path of each model once it is complete.
pub fn pull(config: HubConfig, models: &[ModelName]) -> Result<(), HubError> {
    let hub = Hub::new(config);
    for model in models {
        let display = FetchDisplay::new();
        let fetched = hub.fetch(model, &|event| display.handle(event));
        drop(display);
        let fetched = fetched?;
        let size = shown_bytes(fetched.num_bytes);
        match fetched.num_fetched {
            0 => eprintln!("{model}: {size}, up to date"),
            _ => eprintln!("{model}: {size}"),
        }
        print_line(fetched.path.display());
    }
    Ok(())
}

pub fn list(config: HubConfig, ollama: &OllamaStore) -> Result<(), HubError> {
    let models = Hub::new(config).list()?;
    let ollama = ollama.models();
    if models.is_empty() && ollama.is_empty() {
        eprintln!("`corella pull OWNER/MODEL` fetches other models than the built-in one");
    }
    let built_in_bytes: usize = built_in::FILES.iter().map(|(_, file)| file.len()).sum();
    let built_in = [
        built_in::NAME.to_owned(),
        shown_bytes(built_in_bytes as u64),
        "built in".to_owned(),
        String::new(),
    ];
    let of_hub = models.iter().map(|model| {
        let note = match (short_name(&model.name), model.is_complete) {
            (_, false) => "incomplete".to_owned(),
            (short, true) => short.unwrap_or_default(),
        };
        let size = shown_bytes(model.num_bytes);
        [
            model.name.to_string(),
            size,
            model.commit[..12].to_owned(),
            note,
        ]
    });
    let of_ollama = ollama.into_iter().map(|model| {
        let size = shown_bytes(model.num_bytes);
        [model.name, size, String::new(), "Ollama's".to_owned()]
    });
    let models = [built_in].into_iter().chain(of_hub);
    let lines: Vec<_> = models.chain(of_ollama).collect();
    let width = lines.iter().map(|line| line[0].len()).max().unwrap_or(0);
    print_line(format_args!("{:width$}  {:>9}  commit", "model", "size"));
    for [name, size, commit, note] in lines {
        let line = format!("{name:width$}  {size:>9}  {commit:12}  {note}");
        print_line(line.trim_end());
    }
    Ok(())
}

/// The shortest name of Ollama's library that leads to a model.
fn short_name(model: &ModelName) -> Option<String> {
    let is_same = |short: &String| {
        ModelName::parse(short).is_ok_and(|name| {
            let file = model.file.as_deref();
            let is_meant = match &name.file {
                Some(meant) => file.is_some_and(|file| file.eq_ignore_ascii_case(meant)),
                None => file.is_none_or(|file| file.eq_ignore_ascii_case(DEFAULT_QUANTISATION)),
            };
            is_meant && (&name.repository, &name.revision) == (&model.repository, &model.revision)
        })
    };
    short_names(&model.to_string())
        .into_iter()
        .filter(is_same)
        .min_by_key(String::len)
}

/// Deletes models by the names that `list` shows.
pub fn remove(config: HubConfig, ollama: &OllamaStore, models: &[String]) -> Result<(), HubError> {
    let folder = config.cache.display().to_string();
    let hub = Hub::new(config);
    for text in models {
        let mut listed = hub.list()?.into_iter().map(|model| model.name);
        let listed = listed.find(|model| short_name(model).as_ref() == Some(text));
        let removed = match listed.or_else(|| ModelName::parse(text).ok()) {
            Some(model) => hub.remove(&model)?,
            None => None,
        };
        let removed = removed.ok_or_else(|| {
            HubError::Name(match ollama.find(text) {
                Some(OllamaModel { name, .. }) => {
                    format!("{name} is Ollama's: `ollama rm {name}` deletes it")
                }
                None => format!("{text} is not in {folder}; `corella list` says what is"),
            })
        })?;
        let size = shown_bytes(removed.num_bytes);
        eprintln!("{text}: deleted, {size} freed");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_name_is_shown_for_the_file_that_it_means() {
        for (model, shown) in [
            ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", Some("qwen3:0.6b")),
            ("unsloth/Qwen3-0.6B-GGUF:Q8_0", Some("qwen3:0.6b-q8_0")),
            ("Qwen/Qwen3-8B-GGUF:Q4_K_M", Some("qwen3")),
            ("Qwen/Qwen2.5-7B-Instruct-GGUF:q4_k_m", Some("qwen2.5")),
            ("nomic-ai/nomic-embed-text-v1.5", Some("nomic-embed-text")),
            ("Qwen/Qwen3-0.6B", None),
            ("Qwen/Qwen3-8B-GGUF:Q4_K_M@v1", None),
        ] {
            let model = ModelName::parse(model).unwrap();
            assert_eq!(short_name(&model).as_deref(), shown, "{model}");
        }
    }
}
