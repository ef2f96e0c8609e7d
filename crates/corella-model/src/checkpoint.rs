//! A model as it is distributed: a Hugging Face folder, or the same files inside the binary.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::safetensors_file::SafetensorsFile;
use crate::{CheckpointError, DecoderWeights, ModelConfig, Storage, decoder_weights, json_object};

pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
}

enum Source {
    Folder(PathBuf),
    Static(Vec<(String, &'static [u8])>),
}

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

impl Checkpoint {
    /// Reads the configuration. Weights are touched by `weights` only.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let folder = folder.as_ref();
        let problem = match fs::metadata(folder) {
            Ok(metadata) if metadata.is_dir() => {
                return Self::from_source(Source::Folder(folder.to_path_buf()));
            }
            Ok(_) => "is a file; a model is a folder with config.json and safetensors".into(),
            Err(error) if error.kind() == ErrorKind::NotFound => "no such folder".into(),
            Err(error) => error.to_string(),
        };
        Err(CheckpointError::new(folder.display().to_string(), problem))
    }

    /// Names as in a folder.
    pub fn from_static(files: &[(&str, &'static [u8])]) -> Result<Self, CheckpointError> {
        let files = files
            .iter()
            .map(|&(name, bytes)| (name.to_string(), bytes))
            .collect();
        Self::from_source(Source::Static(files))
    }

    fn from_source(source: Source) -> Result<Self, CheckpointError> {
        let Some(config) = source.read(CONFIG)? else {
            return Err(CheckpointError::new(source.label(CONFIG), "is missing"));
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

    /// Any other file of the checkpoint, such as `tokenizer.json`; `None` when there is none.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        self.source.read(name)
    }

    /// Maps the weights and checks every name, shape and type. The files must not change
    /// while the weights are in use.
    pub fn weights(&self) -> Result<DecoderWeights, CheckpointError> {
        let single = self.source.map(SINGLE)?;
        if let Some(storage) = single {
            let label = self.source.label(SINGLE);
            let file = SafetensorsFile::open(label.clone(), storage)?;
            return decoder_weights::load(&self.config, &[file], &label);
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
        decoder_weights::load(&self.config, &files, &label)
    }
}

/// The files that an index spreads the tensors over.
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
            // Nothing outside the checkpoint's own folder.
            Some(name) if !name.contains(['/', '\\']) => Ok(name.to_string()),
            _ => Err(CheckpointError::new(
                label,
                format!("weight_map.{tensor} is {shard}; must be the name of a file beside it"),
            )),
        })
        .collect()
}

impl Source {
    /// For error messages.
    fn label(&self, name: &str) -> String {
        match self {
            Self::Folder(folder) => folder.join(name).display().to_string(),
            Self::Static(_) => format!("built-in {name}"),
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
        }
    }

    fn map(&self, name: &str) -> Result<Option<Storage>, CheckpointError> {
        let Self::Folder(folder) = self else {
            return Ok(self.find_static(name).map(Storage::Static));
        };
        let failed =
            |error: std::io::Error| Err(CheckpointError::new(self.label(name), error.to_string()));
        let file = match File::open(folder.join(name)) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return failed(error),
        };
        // SAFETY: the map is read only. Nothing keeps another process from changing or
        // truncating the file under it; that model files stay as they are while they are
        // served is a condition that every engine which maps weights makes, and `weights`
        // states it.
        match unsafe { memmap2::Mmap::map(&file) } {
            Ok(map) => Ok(Some(Storage::Mapped(map))),
            // A file of no bytes cannot be mapped; its emptiness is for the reader to name.
            Err(_) if file.metadata().is_ok_and(|metadata| metadata.len() == 0) => {
                Ok(Some(Storage::Owned(Vec::new())))
            }
            Err(error) => failed(error),
        }
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

#[cfg(test)]
mod tests;
