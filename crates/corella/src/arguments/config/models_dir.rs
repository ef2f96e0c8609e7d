//! The models of `corella serve --models-dir FOLDER`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use corella_model::gguf_model_name;

use crate::model::model_file::open;
use crate::{Error, ModelSource};

/// Returns the models in a folder, in the order of their paths, with their names. The log says which others are skipped:
/// those that cannot be opened, and those whose name is taken.
pub fn models_in(
    folder: &Path,
    is_taken: impl Fn(&str) -> bool,
) -> Result<Vec<(String, ModelSource)>, Error> {
    let entries = paths(folder)
        .map_err(|error| Error::Io(format!("--models-dir {}", folder.display()), error))?;
    let mut models: Vec<(String, ModelSource)> = Vec::new();
    for path in entries {
        let Some(name) = name(&path) else { continue };
        let is_second = is_taken(&name) || models.iter().any(|(other, _)| *other == name);
        let opened = match is_second {
            true => Err("another model has its name".to_owned()),
            false => opened(&path, &name),
        };
        match opened {
            Ok(source) => models.push((name, source)),
            Err(reason) => tracing::warn!("--models-dir skips {}: {reason}", path.display()),
        }
    }
    Ok(models)
}

fn paths(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut paths = entries.collect::<io::Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

/// Returns the name of a model: that of its folder, or of its GGUF file. Returns `None` for hidden and other files, and
/// for the later parts of a model in several files.
fn name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_string_lossy();
    let name = match path.is_dir() {
        true => &name,
        false => gguf_model_name(&name).filter(|name| !is_later_part(name))?,
    };
    (!name.starts_with('.')).then(|| name.to_owned())
}

/// Returns whether a name without `.gguf` ends like `-00002-of-00003`. The first part has another name.
fn is_later_part(name: &str) -> bool {
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.rsplit_once("-of-").and_then(|(before, count)| {
        let (_, number) = before.rsplit_once('-')?;
        Some(is_number(number) && is_number(count))
    });
    parts == Some(true)
}

fn opened(path: &Path, name: &str) -> Result<ModelSource, String> {
    if path.is_dir() && matches!(path.join("config.json").try_exists(), Ok(false)) {
        return Err("it has no config.json".to_owned());
    }
    let source = ModelSource::Named {
        path: path.to_owned(),
        name: name.to_owned(),
    };
    match open(&source) {
        Ok(_) => Ok(source),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_part_of_a_model_has_its_name() {
        for (file, expected) in [
            ("fox-Q4_K_M.gguf", Some("fox-Q4_K_M")),
            ("fox-00001-of-00002.gguf", Some("fox")),
            ("fox-00002-of-00002.gguf", None),
            ("one-of-many.gguf", Some("one-of-many")),
            (".fox.gguf", None),
            ("README.md", None),
        ] {
            let found = name(&Path::new("no-such-folder").join(file));
            assert_eq!(found.as_deref(), expected, "{file}");
        }
    }

    #[test]
    fn what_cannot_be_opened_is_skipped() {
        let folder = std::env::temp_dir().join(format!("corella-models-{}", std::process::id()));
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let copy = |name: &str| {
            let to = folder.join(name);
            fs::create_dir_all(&to).unwrap();
            for file in fs::read_dir(root.join("models/nano")).unwrap() {
                let file = file.unwrap();
                fs::copy(file.path(), to.join(file.file_name())).unwrap();
            }
        };
        for name in ["fox", "owl", "taken"] {
            copy(name);
        }
        fs::write(folder.join("owl/config.json"), "{").unwrap();
        fs::create_dir(folder.join("empty")).unwrap();
        fs::write(folder.join("hare.gguf"), "GGUF").unwrap();
        fs::write(folder.join("note.txt"), "").unwrap();
        let models = models_in(&folder, |name| name == "taken").unwrap();
        let names: Vec<_> = models.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["fox"]);
        fs::remove_dir_all(&folder).unwrap();
        let told = models_in(&folder, |_| false).map_err(|error| error.to_string());
        let told = told.expect_err("the folder is gone");
        assert!(told.starts_with("--models-dir"), "{told}");
    }
}
