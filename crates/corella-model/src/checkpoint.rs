//! The formats of a model: a Hugging Face folder, the same files inside the binary, or one GGUF file.
//!
//! Each format gives the same configuration, tokenizer files and tensors: the family's file in `arch` makes a
//! [`DecoderSpec`](crate::DecoderSpec), and the table in `layer_tensor` names the tensors.

pub(crate) mod adapter;
pub(crate) mod checkpoint_writer;
pub(crate) mod class_head;
mod draft_head;
pub(crate) mod folder_config;
pub(crate) mod gguf_config;
mod head;
pub(crate) mod model_config;
pub(crate) mod outline;
pub(crate) mod packed_matrix;
pub(crate) mod sentence_config;
mod source;
pub(crate) mod vector_head;
pub(crate) mod weight_loader;

use std::borrow::Cow;
use std::io;
use std::path::{Path, PathBuf};

use crate::file::file_tensor::{FileTensor, TensorSource};
use crate::file::safetensors_file::SafetensorsFile;
use crate::{CheckpointError, DecoderWeights, FileWatch, ModelConfig};

pub(crate) use self::source::Source;
use self::source::TensorFiles;
pub use self::source::TensorTotals;
use crate::json::file_name::{CONFIG, GENERATION_CONFIG};

/// A model's files, and the configuration read from them.
pub struct Checkpoint {
    source: Source,
    config: ModelConfig,
    watch: Option<FileWatch>,
}

impl Checkpoint {
    /// Reads the configuration of a folder or a GGUF file. Only `weights` reads weights.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        Self::from_source(Source::open(path.as_ref(), None)?)
    }

    /// Opens a checkpoint whose files may become shorter while it is in use. Callers must check `watch` before they use
    /// data that they have read, and again after they have read weights.
    pub fn open_watched(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let watch = FileWatch::default();
        let opened = Source::open(path.as_ref(), Some(watch.clone())).and_then(Self::from_source);
        // Any other error may come from a part of a file that was read as zeros.
        let torn = |problem| CheckpointError::new(path.as_ref().display().to_string(), problem);
        watch.check().map_err(torn)?;
        Ok(Self {
            watch: Some(watch),
            ..opened?
        })
    }

    /// The watch over the files, if the checkpoint is watched.
    pub fn watch(&self) -> Option<&FileWatch> {
        self.watch.as_ref()
    }

    /// Reads files inside the binary, under their names in a folder.
    pub fn from_static(files: &[(&str, &'static [u8])]) -> Result<Self, CheckpointError> {
        Self::from_source(Source::from_static(files))
    }

    pub(crate) fn from_source(source: Source) -> Result<Self, CheckpointError> {
        if let Source::Gguf(file) = &source {
            let config = gguf_config::model_config(file)?;
            return Ok(Self::new(source, config));
        }
        let config = source.config()?;
        let generation = source.read(GENERATION_CONFIG)?;
        let generation_label = source.label(GENERATION_CONFIG);
        let mut config = ModelConfig::parse(
            (&source.label(CONFIG), &config),
            generation
                .as_deref()
                .map(|bytes| (&*generation_label, bytes)),
        )?;
        // Missing or damaged files are reported when the weights are read.
        if let Ok(TensorFiles::Safetensors { files, .. }) = source.tensors() {
            head::settle(&mut config, &files)?;
        }
        Ok(Self::new(source, config))
    }

    fn new(source: Source, config: ModelConfig) -> Self {
        Self {
            source,
            config,
            watch: None,
        }
    }

    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Uses only the first `num_tokens` tokens of the vocabulary. The embedding's and the head's rows of all later
    /// tokens are not read, so a later token is never drawn.
    pub fn keep_tokens(&mut self, num_tokens: usize) {
        let vocab_size = &mut self.config.spec.vocab_size;
        *vocab_size = num_tokens.min(*vocab_size);
    }

    /// Adds the draft head, which `weights` reads from then on.
    pub fn add_draft_head(&mut self) -> Result<(), CheckpointError> {
        let layer = draft_head::layer(&self.config, &self.source)?;
        self.config.spec.draft_head = Some(layer);
        Ok(())
    }

    /// Reads another file of the checkpoint, such as `tokenizer.json`; `None` if missing. For a GGUF file,
    /// `tokenizer.json` and `tokenizer_config.json` are made from its metadata.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        self.source.read(name)
    }

    /// Reads a file that every model has, as `file` does.
    pub fn required_file(&self, name: &str) -> Result<Cow<'static, [u8]>, CheckpointError> {
        self.source.required(name)
    }

    /// The files of weights and configuration. Empty for files inside the binary.
    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        self.source.files()
    }

    /// The size of the files of weights and configuration, in bytes, also for files inside the binary.
    pub fn file_bytes(&self) -> io::Result<u64> {
        self.source.file_bytes()
    }

    /// Maps the weights into memory, and checks every name, shape and type. The files must not change while the weights
    /// are in use. Only the files of a watched checkpoint may become shorter.
    pub fn weights(&self) -> Result<DecoderWeights, CheckpointError> {
        let family = self.config.architecture.family();
        let weights = match self.source.tensors()? {
            TensorFiles::Safetensors { files, label } => {
                weight_loader::load(&self.config, &files, &family.folder, &label)
            }
            TensorFiles::Gguf(file) => {
                weight_loader::load(&self.config, &[file], &family.file, file.label())
            }
        };
        Ok(DecoderWeights {
            files: self.watch.clone(),
            ..weights?
        })
    }

    /// A tensor by its name; `None` if no file has it.
    pub(crate) fn tensor(&self, name: &str) -> Result<Option<FileTensor>, CheckpointError> {
        match self.source.tensors()? {
            TensorFiles::Safetensors { files, .. } => {
                let mut found = files.iter().map(|file| file.tensor(name));
                found.find_map(Result::transpose).transpose()
            }
            TensorFiles::Gguf(file) => file.tensor(name),
        }
    }

    /// A tensor of another safetensors file in the checkpoint's folder.
    pub(crate) fn tensor_in(
        &self,
        file: &str,
        name: &str,
    ) -> Result<Option<FileTensor>, CheckpointError> {
        match self.source.map(file)? {
            Some(storage) => SafetensorsFile::open(self.source.label(file), storage)?.tensor(name),
            None => Ok(None),
        }
    }

    /// The name of a file in error messages.
    pub(crate) fn label(&self, name: &str) -> String {
        self.source.label(name)
    }

    /// Counts the tensors of all files, also tensors that the decoder does not use.
    pub fn totals(&self) -> Result<TensorTotals, CheckpointError> {
        Ok(self.source.tensors()?.totals())
    }
}

#[cfg(test)]
mod tests;
