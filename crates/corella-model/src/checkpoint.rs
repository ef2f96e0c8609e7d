//! A model as it is distributed: a Hugging Face folder, the same files inside the binary, or one
//! GGUF file.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::decoder_weights;
use crate::gguf::{self, GgufFile};
use crate::safetensors_file::SafetensorsFile;
use crate::{CheckpointError, DecoderWeights, ModelConfig, Storage, json_object};

/// A model's files, and the configuration read from them.
pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
}

enum Source {
    Folder(PathBuf),
    Static(Vec<(String, &'static [u8])>),
    Gguf(GgufFile),
}

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const GENERATION_CONFIG: &str = "generation_config.json";
pub(crate) const SINGLE: &str = "model.safetensors";
pub(crate) const INDEX: &str = "model.safetensors.index.json";

impl Checkpoint {
    /// Reads the configuration of a folder or a GGUF file. Only `weights` reads weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let problem = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                return Self::from_source(Source::Folder(path.to_path_buf()));
            }
            Ok(metadata) if metadata.is_file() => return Self::open_gguf(path),
            Ok(_) => "is neither a folder nor a file".into(),
            Err(error) if error.kind() == ErrorKind::NotFound => match hub_name(path) {
                None => "no such folder or file".into(),
                Some(name) => format!(
                    "no such folder or file, and models are not downloaded; if this is one on \
                     Hugging Face, `hf download {name} --local-dir {name}` fetches it"
                ),
            },
            Err(error) => error.to_string(),
        };
        Err(CheckpointError::new(path.display().to_string(), problem))
    }

    fn open_gguf(path: &Path) -> Result<Self, CheckpointError> {
        let label = path.display().to_string();
        let storage = match map(path) {
            Ok(storage) => storage,
            Err(error) => return Err(CheckpointError::new(label, error.to_string())),
        };
        if !storage.bytes().starts_with(&gguf::MAGIC) {
            let problem = "is not a GGUF file; a model is one, or a folder with config.json and \
                           safetensors";
            return Err(CheckpointError::new(label, problem));
        }
        let file = GgufFile::open(label, storage)?;
        let config = gguf::model_config(&file)?;
        Ok(Self {
            source: Source::Gguf(file),
            config,
        })
    }

    /// Reads files that are part of the binary. They have the names that they would have in a
    /// folder.
    pub fn from_static(files: &[(&str, &'static [u8])]) -> Result<Self, CheckpointError> {
        let files = files
            .iter()
            .map(|&(name, bytes)| (name.to_string(), bytes))
            .collect();
        Self::from_source(Source::Static(files))
    }

    fn from_source(source: Source) -> Result<Self, CheckpointError> {
        let Some(config) = source.read(CONFIG)? else {
            let problem = match source.gguf_name() {
                Some(name) => format!("is missing; {name} is a model by itself"),
                None => "is missing".into(),
            };
            return Err(CheckpointError::new(source.label(CONFIG), problem));
        };
        let generation = source.read(GENERATION_CONFIG)?;
        let generation_label = source.label(GENERATION_CONFIG);
        let config = ModelConfig::parse(
            (&source.label(CONFIG), &config),
            generation
                .as_deref()
                .map(|bytes| (&*generation_label, bytes)),
        )?;
        Ok(Self { source, config })
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Reads another file of the checkpoint, such as `tokenizer.json`; `None` if there is none. For
    /// a GGUF file, `tokenizer.json` and `tokenizer_config.json` are made from its metadata.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        self.source.read(name)
    }

    /// The files that weights and configuration are read from. There are none if they are part of
    /// the binary.
    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        match &self.source {
            Source::Folder(folder) => {
                let mut files = vec![folder.join(CONFIG)];
                for entry in fs::read_dir(folder)? {
                    let path = entry?.path();
                    if path.extension().is_some_and(|end| end == "safetensors") {
                        files.push(path);
                    }
                }
                files.sort();
                Ok(files)
            }
            Source::Static(_) => Ok(Vec::new()),
            Source::Gguf(file) => Ok(vec![PathBuf::from(file.label())]),
        }
    }

    /// Maps the weights into memory, and checks every name, shape and type. The files must not
    /// change while the weights are in use.
    pub fn weights(&self) -> Result<DecoderWeights, CheckpointError> {
        let family = self.config.architecture.family();
        if let Source::Gguf(file) = &self.source {
            let layout = &family.file;
            return decoder_weights::load(&self.config, &[file], layout, file.label());
        }
        let single = self.source.map(SINGLE)?;
        if let Some(storage) = single {
            let label = self.source.label(SINGLE);
            let file = SafetensorsFile::open(label.clone(), storage)?;
            return decoder_weights::load(&self.config, &[file], &family.folder, &label);
        }
        let Some(index) = self.source.read(INDEX)? else {
            return Err(CheckpointError::new(
                self.source.label(SINGLE),
                format!("is missing, and so is {INDEX}; other weight files are not supported"),
            ));
        };
        let label = self.source.label(INDEX);
        let files = shards(&label, &index)?
            .into_iter()
            .map(|shard| match self.source.map(&shard)? {
                Some(storage) => SafetensorsFile::open(self.source.label(&shard), storage),
                None => Err(CheckpointError::new(
                    self.source.label(&shard),
                    format!("is missing; {INDEX} names it"),
                )),
            })
            .collect::<Result<Vec<_>, _>>()?;
        decoder_weights::load(&self.config, &files, &family.folder, &label)
    }
}

/// The files over which an index distributes the tensors.
fn shards(label: &str, index: &[u8]) -> Result<BTreeSet<String>, CheckpointError> {
    let index = json_object::parse(label, index)?;
    let map = index.get("weight_map").and_then(|map| map.as_object());
    let Some(map) = map else {
        return Err(CheckpointError::new(
            label,
            "weight_map is missing or not an object",
        ));
    };
    map.iter()
        .map(|(tensor, shard)| match shard.as_str() {
            // An index may not name files outside the checkpoint's folder.
            Some(name) if !name.contains(['/', '\\']) => Ok(name.to_string()),
            _ => Err(CheckpointError::new(
                label,
                format!("weight_map.{tensor} is {shard}; must be the name of a file beside it"),
            )),
        })
        .collect()
}

impl Source {
    /// The name of a file in error messages.
    fn label(&self, name: &str) -> String {
        match self {
            Self::Folder(folder) => folder.join(name).display().to_string(),
            Self::Static(_) => format!("built-in {name}"),
            Self::Gguf(file) => file.label().to_owned(),
        }
    }

    fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        match self {
            Self::Folder(folder) => match fs::read(folder.join(name)) {
                Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(CheckpointError::new(self.label(name), error.to_string())),
            },
            Self::Static(_) => Ok(self.find_static(name).map(Cow::Borrowed)),
            Self::Gguf(file) => Ok(match name {
                "tokenizer.json" => Some(Cow::Owned(gguf::tokenizer_json(file)?)),
                "tokenizer_config.json" => Some(Cow::Owned(gguf::tokenizer_config_json(file)?)),
                _ => None,
            }),
        }
    }

    fn map(&self, name: &str) -> Result<Option<Storage>, CheckpointError> {
        let Self::Folder(folder) = self else {
            return Ok(self.find_static(name).map(Storage::Static));
        };
        match map(&folder.join(name)) {
            Ok(storage) => Ok(Some(storage)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::new(self.label(name), error.to_string())),
        }
    }

    /// The first GGUF file in the checkpoint's folder, if it has any.
    fn gguf_name(&self) -> Option<String> {
        let Self::Folder(folder) = self else {
            return None;
        };
        let names = fs::read_dir(folder).ok()?.filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.ends_with(".gguf").then_some(name)
        });
        names.min()
    }

    fn find_static(&self, name: &str) -> Option<&'static [u8]> {
        let Self::Static(files) = self else {
            return None;
        };
        files
            .iter()
            .find(|(known, _)| known == name)
            .map(|&(_, bytes)| bytes)
    }
}

/// Returns a path that looks like OWNER/MODEL, a name of the hub from which other servers download
/// models.
fn hub_name(path: &Path) -> Option<&str> {
    let name = path.to_str()?;
    let (owner, model) = name.split_once('/')?;
    let is_plain = |part: &str| {
        let mut bytes = part.bytes();
        let starts_well = bytes
            .next()
            .is_some_and(|byte| byte.is_ascii_alphanumeric());
        starts_well && bytes.all(|byte| byte.is_ascii_alphanumeric() || b"-._".contains(&byte))
    };
    let is_file = model.ends_with(".gguf") || model.ends_with(".safetensors");
    (is_plain(owner) && is_plain(model) && !is_file).then_some(name)
}

fn map(path: &Path) -> io::Result<Storage> {
    let file = File::open(path)?;
    // SAFETY: the map is read only. Nothing keeps another process from changing or truncating the
    // file while it is mapped; `weights` states the condition that this does not happen, as every
    // engine that maps weights must.
    match unsafe { memmap2::Mmap::map(&file) } {
        Ok(map) => Ok(Storage::Mapped(map)),
        // An empty file cannot be mapped; whoever reads it reports that.
        Err(_) if file.metadata().is_ok_and(|metadata| metadata.len() == 0) => {
            Ok(Storage::Owned(Vec::new()))
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
