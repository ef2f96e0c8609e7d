//! The files of a model.

use std::borrow::Cow;
use std::path::Path;

use corella_model::{Checkpoint, CheckpointError, gguf_model_name};

use crate::{Error, ModelSource, built_in};

/// The content of a model's file, if the model has it.
pub(crate) type FileContent = Result<Option<Cow<'static, [u8]>>, CheckpointError>;

/// Opens a model, and returns its name and checkpoint.
pub(crate) fn open(source: &ModelSource) -> Result<(String, Checkpoint), Error> {
    open_by(source, |path| Checkpoint::open(path))
}

/// Opens a model whose files may become shorter while it is in use.
pub(crate) fn open_watched(source: &ModelSource) -> Result<(String, Checkpoint), Error> {
    open_by(source, |path| Checkpoint::open_watched(path))
}

fn open_by(
    source: &ModelSource,
    open: impl Fn(&Path) -> Result<Checkpoint, CheckpointError>,
) -> Result<(String, Checkpoint), Error> {
    let checkpoint = match source {
        ModelSource::BuiltIn => Checkpoint::from_static(&built_in::FILES)?,
        ModelSource::Path(path) | ModelSource::Named { path, .. } => open(path)?,
    };
    Ok((name_of(source), checkpoint))
}

/// Returns the name of a model, which need not exist.
pub(crate) fn name_of(source: &ModelSource) -> String {
    match source {
        ModelSource::BuiltIn => built_in::NAME.to_owned(),
        ModelSource::Path(path) => model_name(path),
        ModelSource::Named { name, .. } => name.clone(),
    }
}

/// Returns the name of a folder, or of a file without `.gguf` and the number of its part. A link's own name counts, not
/// its target's.
pub(crate) fn model_name(path: &Path) -> String {
    // `.` and `models/x/..` have no name of their own.
    let target = match path.file_name() {
        Some(_) => None,
        None => path.canonicalize().ok(),
    };
    let name = target.as_deref().unwrap_or(path).file_name();
    let name = name.unwrap_or(path.as_os_str()).to_string_lossy();
    let of_file = gguf_model_name(&name).filter(|_| !path.is_dir());
    of_file.unwrap_or(&name).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_name_of_its_own_has_that_of_its_target() {
        let folder =
            std::env::temp_dir().join(format!("corella-model-names-{}", std::process::id()));
        let (model, link) = (folder.join("fox"), folder.join("owl"));
        std::fs::create_dir_all(&model).unwrap();
        #[cfg(unix)]
        std::os::unix::fs::symlink(&model, &link).unwrap();
        for (path, name) in [
            (model.clone(), "fox"),
            (model.join("."), "fox"),
            (folder.join("missing.gguf"), "missing"),
        ] {
            assert_eq!(model_name(&path), name, "{}", path.display());
        }
        std::fs::create_dir_all(model.join("x")).unwrap();
        assert_eq!(model_name(&model.join("x").join("..")), "fox");
        #[cfg(unix)]
        assert_eq!(model_name(&link), "owl");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
