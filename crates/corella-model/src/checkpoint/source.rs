//! The files of a checkpoint, and their readers.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::file::file_tensor::TensorSource;
use crate::file::gguf::{self, GgufFile};
use crate::file::safetensors_file::SafetensorsFile;
use crate::json::file_name::{CONFIG, INDEX, SINGLE};
use crate::json::json_object;
use crate::json::sentence_piece::{self, folder_tokenizer};
use crate::{CheckpointError, FileWatch, MappedFile, Storage};

const TOKENIZER: &str = "tokenizer.json";

/// The largest size, in bytes, of a file that is read as a whole. The largest tokenizers have 35 MB.
const MAX_READ_BYTES: u64 = 256 << 20;

/// The place of a checkpoint's files.
pub enum Source {
    Folder(PathBuf, Option<FileWatch>),
    Static(Vec<(String, &'static [u8])>),
    Gguf(GgufFile),
}

/// The files of a checkpoint's tensors.
pub enum TensorFiles<'a> {
    Safetensors {
        files: Vec<SafetensorsFile>,
        /// The file named in errors about missing tensors.
        label: String,
    },
    Gguf(&'a GgufFile),
}

/// The totals of a checkpoint's tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TensorTotals {
    pub num_tensors: usize,
    /// The number of elements. An integer that packs several weights counts as one.
    pub num_elements: u64,
    pub num_bytes: u64,
}

impl Source {
    pub fn open(path: &Path, watch: Option<FileWatch>) -> Result<Self, CheckpointError> {
        let problem = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => {
                let folder = Self::Folder(path.to_path_buf(), watch.clone());
                return match folder.first_part() {
                    Some(first) => Self::open_gguf(&path.join(first), watch.as_ref()),
                    None => Ok(folder),
                };
            }
            Ok(metadata) if metadata.is_file() => match folder_of_part(path) {
                None => return Self::open_gguf(path, watch.as_ref()),
                Some(folder) => format!(
                    "is one file of a model; name its folder instead: {}",
                    folder.display()
                ),
            },
            Ok(_) => "is neither a folder nor a file".into(),
            Err(error) if error.kind() == ErrorKind::NotFound => match hub_name(path) {
                None => "no such folder or file".into(),
                Some(name) => format!(
                    "no such folder or file; if this is a model on Hugging Face, \
                     `corella pull {name}` fetches it and prints its path"
                ),
            },
            Err(error) => error.to_string(),
        };
        Err(CheckpointError::new(path.display().to_string(), problem))
    }

    fn open_gguf(path: &Path, watch: Option<&FileWatch>) -> Result<Self, CheckpointError> {
        let open = |path: &Path| open_gguf_file(path, watch);
        let file = open(path)?.join(path, open)?;
        Ok(Self::Gguf(file))
    }

    pub fn from_static(files: &[(&str, &'static [u8])]) -> Self {
        let files = files.iter();
        Self::Static(
            files
                .map(|&(name, bytes)| (name.to_string(), bytes))
                .collect(),
        )
    }

    /// The content of config.json, which every folder has.
    pub fn config(&self) -> Result<Cow<'static, [u8]>, CheckpointError> {
        if let Some(config) = self.read(CONFIG)? {
            return Ok(config);
        }
        let problem = match self.gguf_names().first() {
            Some(name) => format!("is missing; {name} is a model by itself"),
            None => "is missing".into(),
        };
        Err(CheckpointError::new(self.label(CONFIG), problem))
    }

    pub fn files(&self) -> io::Result<Vec<PathBuf>> {
        match self {
            Self::Folder(folder, _) => {
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
            Self::Static(_) => Ok(Vec::new()),
            Self::Gguf(file) => Ok(file.paths()),
        }
    }

    /// Size of the files, in bytes.
    pub fn file_bytes(&self) -> io::Result<u64> {
        if let Self::Static(files) = self {
            return Ok(files.iter().map(|(_, bytes)| bytes.len() as u64).sum());
        }
        let sizes = self.files()?.into_iter();
        // A file of the hub's cache is a link to its content.
        sizes.map(|path| Ok(fs::metadata(path)?.len())).sum()
    }

    /// Opens the files of tensors, and reads their headers.
    pub fn tensors(&self) -> Result<TensorFiles<'_>, CheckpointError> {
        if let Self::Gguf(file) = self {
            return Ok(TensorFiles::Gguf(file));
        }
        if let Some(storage) = self.map(SINGLE)? {
            let label = self.label(SINGLE);
            let files = vec![SafetensorsFile::open(label.clone(), storage)?];
            return Ok(TensorFiles::Safetensors { files, label });
        }
        let Some(index) = self.read(INDEX)? else {
            return Err(CheckpointError::new(
                self.label(SINGLE),
                format!("is missing, and so is {INDEX}; other weight files are not supported"),
            ));
        };
        let label = self.label(INDEX);
        let files = shards(&label, &index)?
            .into_iter()
            .map(|shard| match self.map(&shard)? {
                Some(storage) => SafetensorsFile::open(self.label(&shard), storage),
                None => Err(CheckpointError::new(
                    self.label(&shard),
                    format!("is missing; {INDEX} names it"),
                )),
            })
            .collect::<Result<Vec<_>, _>>()?;
        Ok(TensorFiles::Safetensors { files, label })
    }

    /// The name of a file in error messages.
    pub fn label(&self, name: &str) -> String {
        match self {
            Self::Folder(folder, _) => folder.join(name).display().to_string(),
            Self::Static(_) => format!("built-in {name}"),
            Self::Gguf(file) => file.label().to_owned(),
        }
    }

    pub fn read(&self, name: &str) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        match self {
            Self::Folder(folder, _) => match read(&folder.join(name)) {
                Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
                Err(error) if error.kind() == ErrorKind::NotFound => match name {
                    TOKENIZER => self.sentence_piece_tokenizer(),
                    _ => Ok(None),
                },
                Err(error) => Err(CheckpointError::new(self.label(name), error.to_string())),
            },
            Self::Static(_) => Ok(self.find_static(name).map(Cow::Borrowed)),
            Self::Gguf(file) => Ok(match name {
                TOKENIZER => Some(Cow::Owned(gguf::tokenizer_json(file)?)),
                "tokenizer_config.json" => Some(Cow::Owned(gguf::tokenizer_config_json(file)?)),
                _ => None,
            }),
        }
    }

    /// Reads a file that every model has.
    pub fn required(&self, name: &str) -> Result<Cow<'static, [u8]>, CheckpointError> {
        self.read(name)?.ok_or_else(|| {
            let problem = match name {
                TOKENIZER => "is missing, and so is tokenizer.model; a folder needs one of them",
                _ => "is missing",
            };
            CheckpointError::new(self.label(name), problem)
        })
    }

    /// Makes the tokenizer.json that a folder lacks, if it has SentencePiece's file.
    fn sentence_piece_tokenizer(&self) -> Result<Option<Cow<'static, [u8]>>, CheckpointError> {
        let Some(model) = self.read(sentence_piece::MODEL_FILE)? else {
            return Ok(None);
        };
        let label = self.label(sentence_piece::MODEL_FILE);
        let config = self.read("tokenizer_config.json")?;
        let added = self.read("added_tokens.json")?;
        let tokenizer = folder_tokenizer((label, &model), config.as_deref(), added.as_deref())?;
        Ok(Some(Cow::Owned(tokenizer.to_string().into_bytes())))
    }

    pub fn map(&self, name: &str) -> Result<Option<Storage>, CheckpointError> {
        let Self::Folder(folder, watch) = self else {
            return Ok(self.find_static(name).map(Storage::Static));
        };
        match map(&folder.join(name), watch.as_ref()) {
            Ok(storage) => Ok(Some(storage)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CheckpointError::new(self.label(name), error.to_string())),
        }
    }

    /// The names of the GGUF files in the checkpoint's folder, in order.
    fn gguf_names(&self) -> Vec<String> {
        let Self::Folder(folder, _) = self else {
            return Vec::new();
        };
        let Ok(entries) = fs::read_dir(folder) else {
            return Vec::new();
        };
        let names = entries.filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            name.ends_with(".gguf").then_some(name)
        });
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// The first part of a model in several GGUF files. `None` if the checkpoint's folder has a config.json, or GGUF
    /// files of another model.
    fn first_part(&self) -> Option<String> {
        let names = self.gguf_names();
        let has_config = matches!(self.read(CONFIG), Ok(Some(_)));
        let first = names.first().filter(|_| !has_config)?;
        let model = gguf::name_of_first_part(first)?;
        let is_part = |name: &String| {
            let rest = name.strip_prefix(model);
            rest.is_some_and(|rest| rest.len() == "-00001-of-00001.gguf".len())
        };
        names.iter().all(is_part).then(|| first.clone())
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

/// Returns the folder of a model, given a file that is only a part of the model.
fn folder_of_part(path: &Path) -> Option<PathBuf> {
    let extension = path.extension().and_then(OsStr::to_str).unwrap_or_default();
    let is_part = ["safetensors", "json", "jinja", "bin", "model"].contains(&extension);
    let folder = path.parent().filter(|_| is_part)?;
    let folder = match folder.as_os_str().is_empty() {
        true => Path::new("."),
        false => folder,
    };
    folder.join(CONFIG).is_file().then(|| folder.to_path_buf())
}

impl TensorFiles<'_> {
    pub fn totals(&self) -> TensorTotals {
        let mut totals = TensorTotals::default();
        match self {
            Self::Safetensors { files, .. } => files.iter().for_each(|file| totals.add(file)),
            Self::Gguf(file) => totals.add(*file),
        }
        totals
    }
}

impl TensorTotals {
    fn add(&mut self, file: &impl TensorSource) {
        for (num_elements, num_bytes) in file.sizes() {
            self.num_tensors += 1;
            self.num_elements += num_elements as u64;
            self.num_bytes += num_bytes as u64;
        }
    }
}

/// The files over which an index distributes the tensors.
pub(super) fn shards(label: &str, index: &[u8]) -> Result<BTreeSet<String>, CheckpointError> {
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

/// Returns a path of the form OWNER/MODEL, a name of the hub from which other servers download models.
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

fn open_gguf_file(path: &Path, watch: Option<&FileWatch>) -> Result<GgufFile, CheckpointError> {
    let label = path.display().to_string();
    let storage = match map(path, watch) {
        Ok(storage) => storage,
        Err(error) => return Err(CheckpointError::new(label, error.to_string())),
    };
    if !storage.bytes().starts_with(&gguf::MAGIC) {
        let problem = match storage.bytes().first() {
            Some(b'{') => "is JSON, not a model: in a conversation, /load reads what /save wrote",
            _ => "is not a GGUF file; a model is one, or a folder with config.json and safetensors",
        };
        return Err(CheckpointError::new(label, problem));
    }
    GgufFile::open(label, storage)
}

/// Reads a file that describes a checkpoint.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file = open_regular(path)?;
    if file.metadata()?.len() > MAX_READ_BYTES {
        return Err(io::Error::other(format!(
            "has more than {} MiB, which no such file needs",
            MAX_READ_BYTES >> 20
        )));
    }
    let mut bytes = Vec::new();
    // The file may grow meanwhile.
    file.take(MAX_READ_BYTES).read_to_end(&mut bytes)?;
    check_is_fetched(&bytes)?;
    Ok(bytes)
}

/// A clone of a repository without Git LFS has a few lines in place of each large file.
fn check_is_fetched(bytes: &[u8]) -> io::Result<()> {
    match bytes.starts_with(b"version https://git-lfs.github.com/spec/") {
        true => Err(io::Error::other(
            "is a Git LFS pointer and not the file itself; run `git lfs pull` in its folder",
        )),
        false => Ok(()),
    }
}

/// Other files are refused: reading a device may never end, and opening a pipe waits for a writer.
fn open_regular(path: &Path) -> io::Result<File> {
    match fs::metadata(path)?.is_file() {
        true => File::open(path),
        false => Err(io::Error::other("is not a regular file")),
    }
}

fn map(path: &Path, watch: Option<&FileWatch>) -> io::Result<Storage> {
    let file = open_regular(path)?;
    let name = path.display().to_string();
    // SAFETY: the map is read only. Another process could still change the file while it is mapped; `weights` states
    // the condition that this does not happen, as every engine that maps weights must.
    match unsafe { MappedFile::new(&file, &name, watch) } {
        Ok(map) => {
            check_is_fetched(&map)?;
            Ok(Storage::Mapped(map))
        }
        // An empty file cannot be mapped. Its reader reports the error.
        Err(_) if file.metadata().is_ok_and(|metadata| metadata.len() == 0) => {
            Ok(Storage::Owned(Vec::new()))
        }
        Err(error) => Err(error),
    }
}
