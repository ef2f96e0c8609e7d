//! sentence-transformers' files in a model's folder: the pooling of hidden states, the layers after it, and the prompts
//! before texts.

use std::collections::BTreeMap;

use corella_core::Pooling;
use serde_json::Value;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::class_head::named_activation;
use crate::checkpoint::vector_head::HeadFile;
use crate::json::json_object::{self, JsonObject};
use crate::{CheckpointError, ClassHead, HeadActivation, HeadStep, VectorHead};

/// The conversion of a model's hidden states to vectors and scores.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SentenceConfig {
    /// The pooling; `None` if the folder does not set one.
    pub pooling: Option<Pooling>,
    /// The layers after the pooled hidden state, except for the last norm.
    pub head: VectorHead,
    /// Whether vectors are normalised to the length 1 at the end; `None` if the folder does not set it.
    pub is_normalised: Option<bool>,
    /// The prompts that are put before a text, by name.
    pub prompts: BTreeMap<String, String>,
    /// The name of the default prompt.
    pub default_prompt: Option<String>,
    /// The largest number of tokens in a text for which the model was made, if the folder gives one.
    pub max_len: Option<usize>,
    /// The scores of classes; `None` for models without them.
    pub classes: Option<ClassHead>,
    /// Whether a decoder that scores pairs of texts begins a reply after a pair.
    pub adds_generation_prompt: bool,
}

const MODULES: &str = "modules.json";
const SETTINGS: &str = "config_sentence_transformers.json";
const LENGTH: &str = "sentence_bert_config.json";

impl SentenceConfig {
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        let mut config = Self {
            classes: ClassHead::read(checkpoint)?,
            ..Self::default()
        };
        if let Some(bytes) = checkpoint.file(MODULES)? {
            config.read_modules(checkpoint, &bytes)?;
        }
        with_object(checkpoint, SETTINGS, |settings| {
            if let Some(prompts) = settings.try_object("prompts")? {
                for name in prompts.names() {
                    if let Some(prompt) = prompts.try_text(name)? {
                        config.prompts.insert(name.to_owned(), prompt.to_owned());
                    }
                }
            }
            let default = settings.try_text("default_prompt_name")?;
            if default.is_some_and(|name| !config.prompts.contains_key(name)) {
                let why = "is not the name of a prompt in this file";
                return Err(settings.refuse("default_prompt_name", why));
            }
            config.default_prompt = default.map(str::to_owned);
            if let Some(head) = &mut config.classes {
                let activation = named_activation(settings, "activation_fn")?;
                head.score_activation = activation.or(head.score_activation);
            }
            Ok(())
        })?;
        with_object(checkpoint, LENGTH, |settings| {
            config.max_len = settings.try_size("max_seq_length")?;
            if let Some(more) = settings.try_object("processing_kwargs")?
                && let Some(template) = more.try_object("chat_template")?
            {
                config.adds_generation_prompt = template.flag("add_generation_prompt")?;
            }
            match settings.flag("do_lower_case")? {
                false => Ok(()),
                true => Err(settings.refuse(
                    "do_lower_case",
                    "texts are not changed before they are tokenised; set `lowercase` in tokenizer.json",
                )),
            }
        })?;
        Ok(config)
    }

    fn read_modules(
        &mut self,
        checkpoint: &Checkpoint,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let refuse = |problem: String| CheckpointError::new(checkpoint.label(MODULES), problem);
        let modules: Vec<Value> = serde_json::from_slice(bytes)
            .map_err(|error| refuse(format!("is not a list of modules: {error}")))?;
        let mut len = checkpoint.config().spec.hidden_size;
        for module in &modules {
            let text = |field: &str| module[field].as_str().unwrap_or_default();
            let path = text("path");
            if path.contains("..") || path.starts_with('/') {
                return Err(refuse(format!("{path} is no folder of the model")));
            }
            match text("type").rsplit('.').next().unwrap_or_default() {
                "Transformer" => {}
                "Pooling" => self.pooling = Some(pooling(checkpoint, path)?),
                "Dense" => {
                    self.push_dense(checkpoint, path, len)?;
                    len = self.head.output_len(len);
                }
                "Normalize" => self.head.push(HeadStep::Normalise),
                "LogitScore" => self.classes = Some(logit_score(checkpoint, path)?),
                // Dropout has no effect at inference.
                "Dropout" => {}
                other => {
                    return Err(refuse(format!(
                        "has a module `{other}`; supported are Transformer, Pooling, Dense, \
                         Normalize, LogitScore"
                    )));
                }
            }
        }
        // The last step is kept apart, because requests may ask for vectors that are cut before they are normalised, or
        // for unnormalised vectors.
        let is_normalised = self.head.steps().last() == Some(&HeadStep::Normalise);
        if is_normalised {
            self.head.pop();
        }
        self.is_normalised = Some(is_normalised);
        Ok(())
    }

    fn push_dense(
        &mut self,
        checkpoint: &Checkpoint,
        path: &str,
        len: usize,
    ) -> Result<(), CheckpointError> {
        let mut activation = HeadActivation::Tanh;
        with_object(checkpoint, &format!("{path}/config.json"), |config| {
            activation = named_activation(config, "activation_function")?.unwrap_or(activation);
            Ok(())
        })?;
        let file = format!("{path}/model.safetensors");
        let from = (checkpoint, &HeadFile::Other(&file));
        self.head.push_dense(from, "linear", len, activation)
    }
}

/// The scores of a decoder that reranks. The decoder answers with one of two tokens whether a pair of texts fits.
fn logit_score(checkpoint: &Checkpoint, path: &str) -> Result<ClassHead, CheckpointError> {
    const YES: &str = "true_token_id";
    const NO: &str = "false_token_id";
    let mut head = None;
    with_object(checkpoint, &format!("{path}/config.json"), |config| {
        let token = |field: &str| {
            let ids = config.token_ids(field)?;
            let vocab_size = checkpoint.config().spec.vocab_size;
            match ids.first() {
                Some(&id) if id as usize >= vocab_size => {
                    let why = format!("the model has {vocab_size} tokens");
                    Err(config.refuse(field, &why))
                }
                id => Ok(id.copied()),
            }
        };
        let yes = token(YES)?.ok_or_else(|| config.missing(YES))?;
        head = Some(ClassHead::of_tokens(checkpoint, yes, token(NO)?)?);
        Ok(())
    })?;
    head.ok_or_else(|| {
        let file = format!("{path}/config.json");
        CheckpointError::new(checkpoint.label(&file), "is missing")
    })
}

/// Reads a file whose content is an object, if present.
fn with_object(
    checkpoint: &Checkpoint,
    name: &str,
    read: impl FnOnce(&JsonObject<'_>) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let Some(bytes) = checkpoint.file(name)? else {
        return Ok(());
    };
    let label = checkpoint.label(name);
    let fields = json_object::parse(&label, &bytes)?;
    read(&JsonObject::new(&label, &fields))
}

/// The older names of poolings, each a boolean field, in the order of precedence.
const MODES: [(&str, &str); 6] = [
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
];

fn pooling(checkpoint: &Checkpoint, path: &str) -> Result<Pooling, CheckpointError> {
    const MODE: &str = "pooling_mode";
    const PROMPT: &str = "include_prompt";
    let mut pooling = Pooling::Mean;
    with_object(checkpoint, &format!("{path}/config.json"), |config| {
        if config.get(PROMPT).is_some() && !config.flag(PROMPT)? {
            let why = "prompts that are left out of the pooling are not supported";
            return Err(config.refuse(PROMPT, why));
        }
        let (field, mode) = match config.try_text(MODE)? {
            Some(mode) => (MODE, mode),
            None => {
                let mut chosen = None;
                for mode in MODES {
                    if config.flag(mode.0)? && chosen.replace(mode).is_some() {
                        return Err(config.refuse(mode.0, "only one way of pooling is supported"));
                    }
                }
                chosen.unwrap_or(MODES[2])
            }
        };
        pooling = match mode {
            "cls" => Pooling::FirstToken,
            "max" => Pooling::Max,
            "mean" => Pooling::Mean,
            "lasttoken" => Pooling::LastToken,
            _ => return Err(config.refuse(field, "supported are cls, max, mean, lasttoken")),
        };
        Ok(())
    })?;
    Ok(pooling)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use serde_json::json;

    use super::*;

    /// A folder with the configuration of a golden encoder and other files beside it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(test: &str, files: &[(&str, Value)]) -> Self {
            let name = format!("corella-sentence-{}-{test}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/encoder");
            fs::create_dir_all(&folder).unwrap();
            for file in ["config.json", "model.safetensors"] {
                fs::copy(golden.join("bert-max").join(file), folder.join(file)).unwrap();
            }
            for (file, content) in files {
                let path = folder.join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content.to_string()).unwrap();
            }
            Self(folder)
        }

        fn read(&self) -> Result<SentenceConfig, String> {
            let read = SentenceConfig::read(&Checkpoint::open(&self.0).unwrap());
            read.map_err(|error| error.problem)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn modules(types: &[&str]) -> Value {
        let modules = types.iter().enumerate().map(|(index, kind)| {
            let path = if index > 0 { format!("{index}_{kind}") } else { String::new() };
            json!({"idx": index, "path": path, "type": format!("sentence_transformers.models.{kind}")})
        });
        modules.collect()
    }

    fn pooling_of(test: &str, config: Value) -> Result<Option<Pooling>, String> {
        let modules = modules(&["Transformer", "Pooling"]);
        let files = [(MODULES, modules), ("1_Pooling/config.json", config)];
        Folder::new(test, &files)
            .read()
            .map(|config| config.pooling)
    }

    #[test]
    fn a_folder_without_the_files_says_nothing() {
        let config = Folder::new("nothing", &[]).read();
        assert_eq!(config, Ok(SentenceConfig::default()));
    }

    #[test]
    fn poolings_have_older_and_newer_names() {
        for (mode, older, pooling) in [
            ("cls", "pooling_mode_cls_token", Pooling::FirstToken),
            ("max", "pooling_mode_max_tokens", Pooling::Max),
            ("mean", "pooling_mode_mean_tokens", Pooling::Mean),
            ("lasttoken", "pooling_mode_lasttoken", Pooling::LastToken),
        ] {
            let newer = json!({"pooling_mode": mode});
            assert_eq!(pooling_of("newer", newer), Ok(Some(pooling)));
            let older = json!({older: true, "pooling_mode_mean_sqrt_len_tokens": false});
            assert_eq!(pooling_of("older", older), Ok(Some(pooling)));
        }
    }

    #[test]
    fn what_is_not_computed_is_refused() {
        let refused = |config, word: &str| {
            let error = pooling_of("refused", config).unwrap_err();
            assert!(error.contains(word), "{error}");
        };
        refused(
            json!({"pooling_mode": "weightedmean"}),
            "pooling_mode is \"weightedmean\"",
        );
        let two = json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": true});
        refused(two, "only one way");
        refused(json!({"include_prompt": false}), "include_prompt is false");
        let files = [(MODULES, modules(&["Transformer", "LSTM"]))];
        let error = Folder::new("module", &files).read().unwrap_err();
        assert!(error.contains("`LSTM`"), "{error}");
        let files = [(LENGTH, json!({"do_lower_case": true}))];
        let error = Folder::new("lower", &files).read().unwrap_err();
        assert!(error.contains("do_lower_case"), "{error}");
        let files = [(SETTINGS, json!({"default_prompt_name": "query"}))];
        let error = Folder::new("prompt", &files).read().unwrap_err();
        assert!(error.contains("default_prompt_name"), "{error}");
    }

    #[test]
    fn prompts_and_the_length_of_texts_are_read() {
        let settings = json!({"prompts": {"query": "find: ", "document": ""},
            "default_prompt_name": "query", "similarity_fn_name": "cosine"});
        let length = json!({"max_seq_length": 128, "do_lower_case": false});
        let folder = Folder::new("settings", &[(SETTINGS, settings), (LENGTH, length)]);
        let config = folder.read().unwrap();
        assert_eq!(config.prompts["query"], "find: ");
        assert_eq!(config.prompts["document"], "");
        assert_eq!(config.default_prompt.as_deref(), Some("query"));
        assert_eq!(config.max_len, Some(128));
    }
}
