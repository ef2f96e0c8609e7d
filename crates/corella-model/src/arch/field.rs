//! The fields that describe a model, in config.json or in the metadata of a GGUF file.

use crate::CheckpointError;
use crate::file::gguf::{GgufFile, Metadata};
use crate::json::json_object::JsonObject;

/// A field with its name in both formats. The name is empty for a format without the field.
#[derive(Clone, Copy)]
pub struct Field {
    pub folder: &'static str,
    /// The key after the architecture's name and a dot.
    pub file: &'static str,
}

impl Field {
    pub const fn new(folder: &'static str, file: &'static str) -> Self {
        Self { folder, file }
    }

    pub const fn of_folder(folder: &'static str) -> Self {
        Self { folder, file: "" }
    }

    pub const fn of_file(file: &'static str) -> Self {
        Self { folder: "", file }
    }
}

/// Typed access to fields, with errors that name the field as its file does.
pub trait Fields {
    fn try_size(&self, field: Field) -> Result<Option<usize>, CheckpointError>;
    fn try_number(&self, field: Field) -> Result<Option<f64>, CheckpointError>;
    fn try_flag(&self, field: Field) -> Result<Option<bool>, CheckpointError>;
    fn try_text(&self, field: Field) -> Result<Option<&str>, CheckpointError>;
    fn missing(&self, field: Field) -> CheckpointError;
    fn refuse(&self, field: Field, why: &str) -> CheckpointError;
    /// The name of a field in this format.
    fn name(&self, field: Field) -> &'static str;
    /// The source, for fields of one format only.
    fn source(&self) -> Source<'_>;

    fn size(&self, field: Field) -> Result<usize, CheckpointError> {
        self.try_size(field)?.ok_or_else(|| self.missing(field))
    }

    fn number(&self, field: Field) -> Result<f64, CheckpointError> {
        self.try_number(field)?.ok_or_else(|| self.missing(field))
    }

    fn flag(&self, field: Field) -> Result<bool, CheckpointError> {
        Ok(self.try_flag(field)?.unwrap_or(false))
    }
}

/// The source of fields.
pub enum Source<'a> {
    Folder(&'a JsonObject<'a>),
    File(&'a FileFields<'a>),
}

/// The fields of config.json.
pub struct FolderFields<'a> {
    object: JsonObject<'a>,
}

impl<'a> FolderFields<'a> {
    pub fn new(object: JsonObject<'a>) -> Self {
        Self { object }
    }

    pub fn object(&self) -> &JsonObject<'a> {
        &self.object
    }
}

impl Fields for FolderFields<'_> {
    fn try_size(&self, field: Field) -> Result<Option<usize>, CheckpointError> {
        self.object.try_size(field.folder)
    }

    fn try_number(&self, field: Field) -> Result<Option<f64>, CheckpointError> {
        self.object.try_number(field.folder)
    }

    fn try_flag(&self, field: Field) -> Result<Option<bool>, CheckpointError> {
        match self.object.get(field.folder) {
            Some(_) => self.object.flag(field.folder).map(Some),
            None => Ok(None),
        }
    }

    fn try_text(&self, field: Field) -> Result<Option<&str>, CheckpointError> {
        self.object.try_text(field.folder)
    }

    fn missing(&self, field: Field) -> CheckpointError {
        self.object.missing(field.folder)
    }

    fn refuse(&self, field: Field, why: &str) -> CheckpointError {
        self.object.refuse(field.folder, why)
    }

    fn name(&self, field: Field) -> &'static str {
        field.folder
    }

    fn source(&self) -> Source<'_> {
        Source::Folder(&self.object)
    }
}

/// The metadata of a GGUF file whose keys begin with the architecture's name, and its tensors.
pub struct FileFields<'a> {
    file: &'a GgufFile,
    metadata: &'a Metadata,
    architecture: &'a str,
}

impl<'a> FileFields<'a> {
    pub fn new(file: &'a GgufFile) -> Result<Self, CheckpointError> {
        let metadata = &file.metadata;
        Ok(Self {
            file,
            metadata,
            architecture: metadata.text("general.architecture")?,
        })
    }

    pub fn architecture(&self) -> &'a str {
        self.architecture
    }

    pub fn file(&self) -> &'a GgufFile {
        self.file
    }

    /// Refuses a key by its whole name.
    pub fn refuse_key(&self, key: &str, why: &str) -> CheckpointError {
        self.metadata.refuse(key, why)
    }

    pub fn has_tensor(&self, name: &str) -> bool {
        self.file.shape(name).is_some()
    }

    /// Whether a field is an array.
    pub fn is_array(&self, field: Field) -> bool {
        self.key(field)
            .is_some_and(|key| self.metadata.is_array(&key))
    }

    /// A size for each layer, with 0 for layers without one; `None` if the field is no array.
    pub fn try_layer_sizes(&self, field: Field) -> Result<Option<Vec<usize>>, CheckpointError> {
        let Some(key) = self.key(field).filter(|key| self.metadata.is_array(key)) else {
            return Ok(None);
        };
        let sizes = self.metadata.integers(&key)?;
        let sizes: Option<Vec<usize>> = sizes
            .map(|size| u32::try_from(size).ok()?.try_into().ok())
            .collect();
        match sizes {
            Some(sizes) => Ok(Some(sizes)),
            None => Err(self.metadata.refuse(&key, "must be a size for each layer")),
        }
    }

    /// An array of flags; empty if absent.
    pub fn flags(&self, field: Field) -> Result<Vec<bool>, CheckpointError> {
        match self.key(field) {
            Some(key) => Ok(self.metadata.flags(&key)?.collect()),
            None => Ok(Vec::new()),
        }
    }

    fn key(&self, field: Field) -> Option<String> {
        (!field.file.is_empty()).then(|| format!("{}.{}", self.architecture, field.file))
    }

    fn of_key<T>(
        &self,
        field: Field,
        read: impl FnOnce(&'a Metadata, &str) -> Result<Option<T>, CheckpointError>,
    ) -> Result<Option<T>, CheckpointError> {
        match self.key(field) {
            Some(key) => read(self.metadata, &key),
            None => Ok(None),
        }
    }
}

impl Fields for FileFields<'_> {
    fn try_size(&self, field: Field) -> Result<Option<usize>, CheckpointError> {
        self.of_key(field, |metadata, key| metadata.try_size(key))
    }

    fn try_number(&self, field: Field) -> Result<Option<f64>, CheckpointError> {
        self.of_key(field, |metadata, key| metadata.try_number(key))
    }

    fn try_flag(&self, field: Field) -> Result<Option<bool>, CheckpointError> {
        self.of_key(field, |metadata, key| metadata.try_flag(key))
    }

    fn try_text(&self, field: Field) -> Result<Option<&str>, CheckpointError> {
        self.of_key(field, |metadata, key| metadata.try_text(key))
    }

    fn missing(&self, field: Field) -> CheckpointError {
        self.metadata.missing(&self.key(field).unwrap_or_default())
    }

    fn refuse(&self, field: Field, why: &str) -> CheckpointError {
        self.metadata
            .refuse(&self.key(field).unwrap_or_default(), why)
    }

    fn name(&self, field: Field) -> &'static str {
        field.file
    }

    fn source(&self) -> Source<'_> {
        Source::File(self)
    }
}
