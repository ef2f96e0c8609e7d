//! Models that Ollama has fetched, in its own folder: a manifest for each tag names the file of the weights.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::model_name::is_lower_hex;

/// Ollama's folders of models, which are read and never changed.
pub struct OllamaStore {
    folders: Vec<PathBuf>,
}

/// A model whose weights are one GGUF file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OllamaModel {
    /// The name that Ollama shows: `NAME:TAG` of its library, `OWNER/NAME:TAG` or `HOST/OWNER/NAME:TAG`.
    pub name: String,
    pub path: PathBuf,
    pub num_bytes: u64,
}

const MANIFESTS: &str = "manifests";
/// Manifests are files HOST/OWNER/NAME/TAG. Ollama shows neither this host nor this owner.
const LIBRARY: [&str; 2] = ["registry.ollama.ai/", "library/"];
const WEIGHTS: &str = "application/vnd.ollama.image.model";
/// A change of the weights, without which the model is another.
const ADAPTER: &str = "application/vnd.ollama.image.adapter";

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

    /// Looks for a model by its name, in any case. Without a tag, the tag is `latest`.
    pub fn find(&self, name: &str) -> Option<OllamaModel> {
        let whole = format!("{name}:latest");
        let is_meant =
            |known: &str| name.eq_ignore_ascii_case(known) || whole.eq_ignore_ascii_case(known);
        let mut models = self.models().into_iter();
        models.find(|model| is_meant(&model.name))
    }

    /// All models, by their names.
    pub fn models(&self) -> Vec<OllamaModel> {
        let mut models = Vec::new();
        for folder in &self.folders {
            let mut paths = vec![folder.join(MANIFESTS)];
            for _ in ["host", "owner", "name", "tag"] {
                paths = paths.iter().flat_map(|path| entries(path)).collect();
            }
            models.extend(paths.iter().filter_map(|path| model(folder, path)));
        }
        models.sort_by(|one, other| one.name.cmp(&other.name));
        models
    }
}

/// The content of a folder, and nothing if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// The name that Ollama shows for a manifest.
fn shown_name(folder: &Path, manifest: &Path) -> Option<String> {
    let path = manifest.strip_prefix(folder.join(MANIFESTS)).ok()?;
    let (name, tag) = path.to_str()?.rsplit_once('/')?;
    let [host, owner] = LIBRARY;
    let of_host = name.strip_prefix(host);
    let name = of_host.map_or(name, |name| name.strip_prefix(owner).unwrap_or(name));
    Some(format!("{name}:{tag}"))
}

fn model(folder: &Path, manifest: &Path) -> Option<OllamaModel> {
    let Manifest { layers } = serde_json::from_slice(&fs::read(manifest).ok()?).ok()?;
    if layers.iter().any(|layer| layer.media_type == ADAPTER) {
        return None;
    }
    let weights = layers.iter().find(|layer| layer.media_type == WEIGHTS)?;
    let hash = weights.digest.strip_prefix("sha256:")?;
    let path = folder.join("blobs").join(format!("sha256-{hash}"));
    let num_bytes = fs::metadata(&path).ok()?.len();
    let name = shown_name(folder, manifest)?;
    is_lower_hex(hash).then_some(OllamaModel {
        name,
        path,
        num_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder as Ollama writes it, with one model of 7 bytes.
    fn store(test: &str, manifest: &str, layers: &str) -> (PathBuf, OllamaStore) {
        let folder =
            std::env::temp_dir().join(format!("corella-ollama-{}-{test}", std::process::id()));
        let manifest = folder.join("manifests").join(manifest);
        fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        fs::create_dir_all(folder.join("blobs")).unwrap();
        fs::write(folder.join("blobs/sha256-0a"), "weights").unwrap();
        fs::write(manifest, format!(r#"{{"layers": [{layers}]}}"#)).unwrap();
        let store = OllamaStore::new(vec![folder.join("none"), folder.clone()]);
        (folder, store)
    }

    /// Pairs of a manifest and the name that `ollama list` shows for it.
    #[test]
    fn a_model_is_found_by_its_name_and_tag() {
        let layers = r#"{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:0b", "size": 1},
            {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a", "size": 7}"#;
        for (manifest, name) in [
            ("registry.ollama.ai/library/tiny/latest", "tiny:latest"),
            ("registry.ollama.ai/library/tiny/1b-q4_0", "tiny:1b-q4_0"),
            ("registry.ollama.ai/me/mario/latest", "me/mario:latest"),
            ("hf.co/me/Fox-1B-GGUF/Q4_K_M", "hf.co/me/Fox-1B-GGUF:Q4_K_M"),
            (
                "localhost:5000/library/tiny/v1",
                "localhost:5000/library/tiny:v1",
            ),
        ] {
            let (folder, store) = store("found", manifest, layers);
            let found = OllamaModel {
                name: name.to_owned(),
                path: folder.join("blobs/sha256-0a"),
                num_bytes: 7,
            };
            assert_eq!(store.models(), std::slice::from_ref(&found));
            assert_eq!(store.find(name), Some(found.clone()));
            assert_eq!(store.find(&name.to_lowercase()), Some(found.clone()));
            if let Some(short) = name.strip_suffix(":latest") {
                assert_eq!(store.find(short), Some(found));
            }
            for other in [
                "tiny:2b",
                "mario",
                "hf.co/me/Fox-1B-GGUF",
                &format!("../library/{name}"),
            ] {
                assert_eq!(store.find(other), None, "{other}");
            }
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
            let (folder, store) = store("parts", "registry.ollama.ai/library/tiny/latest", &layers);
            assert_eq!(store.find("tiny"), None, "{layers}");
            fs::remove_dir_all(folder).unwrap();
        }
    }
}
