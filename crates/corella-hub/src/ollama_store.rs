//! Models that Ollama has fetched, in its own folder: a manifest for each tag names the file of the weights.

use std::fs::{self, File};
use std::io::Read;
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
    /// The SYSTEM of its Modelfile.
    pub system: Option<String>,
}

const MANIFESTS: &str = "manifests";
/// Manifests are files HOST/OWNER/NAME/TAG. Ollama shows neither this host nor this owner.
const LIBRARY: [&str; 2] = ["registry.ollama.ai/", "library/"];
const WEIGHTS: &str = "application/vnd.ollama.image.model";
/// A LoRA adapter. Models with one are refused, because the weights alone are another model.
const ADAPTER: &str = "application/vnd.ollama.image.adapter";
const SYSTEM: &str = "application/vnd.ollama.image.system";
/// No context holds a longer system message.
const MAX_SYSTEM_BYTES: u64 = 1 << 20;

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
        self.named(name).find_map(|manifest| manifest.model().ok())
    }

    /// Returns why a model of this name cannot be used, if Ollama has one.
    pub fn refusal(&self, name: &str) -> Option<String> {
        self.named(name).find_map(|manifest| {
            let reason = manifest.model().err()?;
            Some(format!(
                "{}, a model of Ollama, cannot be used: {reason}",
                manifest.name
            ))
        })
    }

    /// All models, by their names.
    pub fn models(&self) -> Vec<OllamaModel> {
        let manifests = self.manifests().into_iter();
        let mut models: Vec<_> =
            { manifests.filter_map(|manifest| manifest.model().ok()) }.collect();
        models.sort_by(|one, other| one.name.cmp(&other.name));
        models
    }

    fn named(&self, name: &str) -> impl Iterator<Item = ManifestFile<'_>> {
        let whole = format!("{name}:latest");
        let manifests = self.manifests().into_iter();
        manifests.filter(move |manifest| {
            [name, &whole]
                .iter()
                .any(|name| name.eq_ignore_ascii_case(&manifest.name))
        })
    }

    fn manifests(&self) -> Vec<ManifestFile<'_>> {
        let mut manifests = Vec::new();
        for folder in &self.folders {
            let mut paths = vec![folder.join(MANIFESTS)];
            for _ in ["host", "owner", "name", "tag"] {
                paths = paths.iter().flat_map(|path| entries(path)).collect();
            }
            manifests.extend(paths.into_iter().filter_map(|path| {
                let name = shown_name(folder, &path)?;
                Some(ManifestFile { folder, path, name })
            }));
        }
        manifests
    }
}

struct ManifestFile<'a> {
    folder: &'a Path,
    path: PathBuf,
    name: String,
}

impl ManifestFile<'_> {
    /// Reads the manifest. The error tells the user why the model cannot be used.
    fn model(&self) -> Result<OllamaModel, String> {
        let shown = self.path.display();
        let text =
            fs::read(&self.path).map_err(|error| format!("{shown} cannot be read: {error}"))?;
        let Manifest { layers } = serde_json::from_slice(&text)
            .map_err(|error| format!("{shown} is damaged: {error}"))?;
        let layer = |kind: &str| layers.iter().find(|layer| layer.media_type == kind);
        if layer(ADAPTER).is_some() {
            let instead = "give the model of FROM to `corella serve`, and the adapter as --lora-modules NAME=FOLDER";
            return Err(format!("its Modelfile has an ADAPTER; {instead}"));
        }
        let weights = layer(WEIGHTS).ok_or("its weights are not one GGUF file")?;
        let path = self
            .blob(weights)
            .ok_or_else(|| format!("{shown} is damaged"))?;
        let metadata = fs::metadata(&path).map_err(|error| {
            let name = &self.name;
            format!(
                "{}: {error}; `ollama pull {name}` fetches it again",
                path.display()
            )
        })?;
        Ok(OllamaModel {
            name: self.name.clone(),
            path,
            num_bytes: metadata.len(),
            system: layer(SYSTEM).and_then(|system| read_system(&self.blob(system)?)),
        })
    }

    /// The file of a layer, unless the manifest is damaged.
    fn blob(&self, layer: &Layer) -> Option<PathBuf> {
        let hash = layer
            .digest
            .strip_prefix("sha256:")
            .filter(|hash| is_lower_hex(hash))?;
        Some(self.folder.join("blobs").join(format!("sha256-{hash}")))
    }
}

fn read_system(path: &Path) -> Option<String> {
    let mut text = String::new();
    let mut file = File::open(path).ok()?.take(MAX_SYSTEM_BYTES);
    file.read_to_string(&mut text).ok()?;
    (!text.trim().is_empty()).then_some(text)
}

/// The paths in a folder; empty if the folder cannot be read.
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
                system: None,
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
        for (layers, reason) in [
            (
                format!("{weights}, {adapter}"),
                "its Modelfile has an ADAPTER",
            ),
            (
                weights.replace("image.model", "image.tensor"),
                "not one GGUF file",
            ),
            (
                weights.replace("0a", "0b"),
                "`ollama pull tiny:latest` fetches it again",
            ),
            (
                weights.replace("0a", "../manifests"),
                "/tiny/latest is damaged",
            ),
            ("no layer".to_owned(), "/tiny/latest is damaged: expected"),
        ] {
            let (folder, store) = store("parts", "registry.ollama.ai/library/tiny/latest", &layers);
            assert_eq!(store.find("tiny"), None, "{layers}");
            assert_eq!(store.models(), []);
            let refusal = store.refusal("tiny").unwrap();
            let begin = "tiny:latest, a model of Ollama, cannot be used: ";
            assert!(
                refusal.starts_with(begin) && refusal.contains(reason),
                "{refusal}"
            );
            assert_eq!(store.refusal("other"), None);
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn a_model_has_the_system_message_of_its_modelfile() {
        let layers = r#"{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:0a"},
            {"mediaType": "application/vnd.ollama.image.system", "digest": "sha256:0c"}"#;
        let (folder, store) = store("system", "registry.ollama.ai/library/tiny/latest", layers);
        // A model whose system message is missing is still found.
        assert_eq!(store.find("tiny").unwrap().system, None);
        fs::write(folder.join("blobs/sha256-0c"), "You are Mario.").unwrap();
        let system = store.find("tiny").unwrap().system;
        assert_eq!(system.as_deref(), Some("You are Mario."));
        assert_eq!(store.refusal("tiny"), None);
        fs::remove_dir_all(folder).unwrap();
    }
}
