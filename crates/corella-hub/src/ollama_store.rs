//! Models that Ollama has fetched, in its own folder: a manifest for each tag names the file of the weights.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::model_name::{is_lower_hex, is_part};

/// Ollama's folders of models, which are read and never changed.
pub struct OllamaStore {
    folders: Vec<PathBuf>,
}

/// A model whose weights are one GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OllamaModel {
    /// `NAME:TAG`.
    pub name: String,
    pub path: PathBuf,
    pub num_bytes: u64,
}

/// The manifests of Ollama's own library.
const LIBRARY: &str = "manifests/registry.ollama.ai/library";
const WEIGHTS: &str = "application/vnd.ollama.image.model";
/// A change of the weights, without which the model is another.
const ADAPTER: &str = "application/vnd.ollama.image.adapter";
const DEFAULT_TAG: &str = "latest";

#[derive(Deserialize)]
struct Manifest {
    layers: Vec<Layer>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Layer {
    media_type: String,
    digest: String,
}

impl OllamaStore {
    pub fn new(folders: Vec<PathBuf>) -> Self {
        Self { folders }
    }

    /// Looks for `NAME` or `NAME:TAG`.
    pub fn find(&self, name: &str) -> Option<OllamaModel> {
        let (name, tag) = name.split_once(':').unwrap_or((name, DEFAULT_TAG));
        let mut folders = self.folders.iter();
        folders.find_map(|folder| model(folder, name, tag))
    }

    /// All models, by their names.
    pub fn models(&self) -> Vec<OllamaModel> {
        let mut models = Vec::new();
        for folder in &self.folders {
            for name in entries(&folder.join(LIBRARY)) {
                let tags = entries(&folder.join(LIBRARY).join(&name)).into_iter();
                models.extend(tags.filter_map(|tag| model(folder, &name, &tag)));
            }
        }
        models.sort_by(|one, other| one.name.cmp(&other.name));
        models
    }
}

/// The names in a folder, and none if it cannot be read.
fn entries(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    { entries.map(|entry| entry.file_name().into_string()) }
        .flatten()
        .collect()
}

fn model(folder: &Path, name: &str, tag: &str) -> Option<OllamaModel> {
    if !(is_part(name) && is_part(tag)) {
        return None;
    }
    let manifest = fs::read(folder.join(LIBRARY).join(name).join(tag)).ok()?;
    let Manifest { layers } = serde_json::from_slice(&manifest).ok()?;
    if layers.iter().any(|layer| layer.media_type == ADAPTER) {
        return None;
    }
    let weights = layers.iter().find(|layer| layer.media_type == WEIGHTS)?;
    let hash = weights.digest.strip_prefix("sha256:")?;
    let path = folder.join("blobs").join(format!("sha256-{hash}"));
    let num_bytes = fs::metadata(&path).ok()?.len();
    is_lower_hex(hash).then(|| OllamaModel {
        name: format!("{name}:{tag}"),
        path,
        num_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as Ollama writes it, with one model of 7 bytes.
    fn store(test: &str, name: &str, layers: &str) -> (PathBuf, OllamaStore) {
        let folder =
            std::env::temp_dir().join(format!("corella-ollama-{}-{test}", std::process::id()));
        let (name, tag) = name.split_once(':').unwrap();
        let manifest = folder.join(LIBRARY).join(name);
        fs::create_dir_all(&manifest).unwrap();
        fs::create_dir_all(folder.join("blobs")).unwrap();
        fs::write(folder.join("blobs/sha256-0a"), "weights").unwrap();
        fs::write(manifest.join(tag), format!(r#"{{"layers": [{layers}]}}"#)).unwrap();
        let store = OllamaStore::new(vec![folder.join("none"), folder.clone()]);
        (folder, store)
    }

    #[test]
    fn a_model_is_found_by_its_name_and_tag() {
        let layers = r#"{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0b", "size": 1},
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a", "size": 7}"#;
        for (name, short) in [("tiny:latest", Some("tiny")), ("tiny:1b-q4_0", None)] {
            let (folder, store) = store("found", name, layers);
            let found = OllamaModel {
                name: name.to_owned(),
                path: folder.join("blobs/sha256-0a"),
                num_bytes: 7,
            };
            assert_eq!(store.find(name), Some(found.clone()));
            assert_eq!(store.find("tiny"), short.map(|_| found.clone()));
            assert_eq!(store.models(), [found]);
            assert_eq!(store.find("tiny:2b"), None);
            assert_eq!(store.find(&format!("../library/{name}")), None);
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn a_model_of_several_parts_is_not_one_file() {
        let weights =
            r#"{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a"}"#;
        let adapter = weights.replace("image.model", "image.adapter");
        for layers in [
            format!("{weights}, {adapter}"),
            weights.replace("image.model", "image.tensor"),
            weights.replace("0a", "0b"),
            weights.replace("0a", "../manifests"),
        ] {
            let (folder, store) = store("parts", "tiny:latest", &layers);
            assert_eq!(store.find("tiny"), None, "{layers}");
            fs::remove_dir_all(folder).unwrap();
        }
    }
}
