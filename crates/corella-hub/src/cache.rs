//! The hub's cache on disk, in the layout of `huggingface_hub`, which other programs share:
//!
//! ```text
//! models--OWNER--MODEL/refs/main                  the last known commit of a branch or tag
//! models--OWNER--MODEL/snapshots/COMMIT/PATH      links to …
//! models--OWNER--MODEL/blobs/DIGEST               … the files, by checksum
//! models--OWNER--MODEL/blobs/DIGEST.incomplete    the arrived part of one
//! .locks/models--OWNER--MODEL/DIGEST.lock
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use crate::model_name::{is_commit, is_lower_hex};
use crate::selection::{self, FolderWeights, INDEX, SINGLE, Selection, gguf_models};
use crate::{Digest, HubError, ModelName};

/// The shortest valid prefix of a commit hash.
const MIN_COMMIT_LEN: usize = 7;

const PREFIX: &str = "models--";
const LOCKS: &str = ".locks";

pub struct Cache {
    pub folder: PathBuf,
}

/// A model in the cache, as `corella list` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// The name with which `corella serve` finds it.
    pub name: ModelName,
    pub commit: String,
    /// The size of the model's files, in bytes. Models of one repository may share files.
    pub num_bytes: u64,
    /// Whether all required files are present.
    pub is_complete: bool,
}

/// The files and bytes that a deletion freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Removed {
    pub num_files: usize,
    pub num_bytes: u64,
}

/// A repository's folder in the cache.
pub struct Repository {
    name: String,
    folder: PathBuf,
    locks: PathBuf,
}

impl Cache {
    pub fn repository(&self, name: &str) -> Repository {
        let folder = format!("{PREFIX}{}", name.replace('/', "--"));
        Repository {
            name: name.to_owned(),
            locks: self.folder.join(LOCKS).join(&folder),
            folder: self.folder.join(folder),
        }
    }

    /// All models that this program or others have fetched, in the order of their names.
    pub fn models(&self) -> Result<Vec<CachedModel>, HubError> {
        let mut first_error = None;
        let models = self.readable_models(|error| {
            first_error.get_or_insert(error);
        });
        first_error.map_or(Ok(models), Err)
    }

    /// Like [`models`](Self::models), but skips repositories that cannot be read. `tell` gets the error of each.
    pub fn readable_models(&self, mut tell: impl FnMut(HubError)) -> Vec<CachedModel> {
        let mut models = Vec::new();
        let folders = names_in(&self.folder).unwrap_or_else(|error| {
            tell(error);
            Vec::new()
        });
        for folder in folders {
            let name = folder
                .strip_prefix(PREFIX)
                .and_then(|name| name.split_once("--"));
            let Some((owner, model)) = name else {
                continue;
            };
            match self.repository(&format!("{owner}/{model}")).models() {
                Ok(of_repository) => models.extend(of_repository),
                Err(error) => tell(error),
            }
        }
        models.sort_by(|one, other| one.name.cmp(&other.name));
        models
    }
}

impl Repository {
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.folder.join("blobs").join(digest.as_str())
    }

    pub fn incomplete_blob(&self, digest: &Digest) -> PathBuf {
        let name = format!("{}.incomplete", digest.as_str());
        self.folder.join("blobs").join(name)
    }

    pub fn lock(&self, digest: &Digest) -> PathBuf {
        self.locks.join(format!("{}.lock", digest.as_str()))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub fn file(&self, commit: &str, path: &str) -> PathBuf {
        self.snapshot(commit).join(path)
    }

    pub fn create(&self) -> Result<(), HubError> {
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).map_err(HubError::disk("create", &blobs))
    }

    /// The commit of a revision in the cache's record.
    pub fn commit(&self, revision: &str) -> Result<Option<String>, HubError> {
        let path = self.folder.join("refs").join(revision);
        match fs::read_to_string(&path) {
            Ok(commit) if is_commit(commit.trim()) => return Ok(Some(commit.trim().to_owned())),
            // An invalid file of another program counts as missing.
            Ok(_) => {}
            Err(error) if is_absent(&error) => {}
            Err(error) => return Err(HubError::disk("read", &path)(error)),
        }
        if revision.len() < MIN_COMMIT_LEN || !is_lower_hex(revision) {
            return Ok(None);
        }
        let mut commits = self
            .commits()?
            .into_iter()
            .filter(|commit| commit.starts_with(revision));
        let first = commits.next();
        Ok(first.filter(|_| commits.next().is_none()))
    }

    /// Records the current commit of a branch or tag.
    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if revision == commit || self.commit(revision)?.as_deref() == Some(commit) {
            return Ok(());
        }
        let path = self.folder.join("refs").join(revision);
        let folder = path.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(HubError::disk("create", folder))?;
        let mut name = path.as_os_str().to_owned();
        name.push(format!(".{}.tmp", std::process::id()));
        let written = fs::write(&name, commit).and_then(|()| fs::rename(&name, &path));
        written.map_err(HubError::disk("write", &path))
    }

    /// Links a cached file to its path in a snapshot.
    pub fn link(&self, commit: &str, path: &str, digest: &Digest) -> Result<(), HubError> {
        let link = self.file(commit, path);
        if link.exists() {
            return Ok(());
        }
        let folder = link.parent().unwrap_or(&self.folder);
        fs::create_dir_all(folder).map_err(HubError::disk("create", folder))?;
        // The target is relative, so that the cache may be moved. `up` leads out of the path's folders, the commit's
        // folder and the snapshots' folder.
        let up = "../".repeat(path.split('/').count() + 1);
        let target = format!("{up}blobs/{}", digest.as_str());
        match fs::remove_file(&link) {
            Err(error) if !is_absent(&error) => {
                return Err(HubError::disk("replace", &link)(error));
            }
            _ => {}
        }
        match make_link(&target, &self.blob(digest), &link) {
            // Another process has made the link.
            Err(error) if error.kind() == ErrorKind::AlreadyExists && link.exists() => Ok(()),
            done => done.map_err(HubError::disk("link", &link)),
        }
    }

    /// The paths of the files that a snapshot has on the disk, in order.
    pub fn paths(&self, commit: &str) -> Result<Vec<String>, HubError> {
        let mut paths = Vec::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let on_disk = self.file(commit, &folder);
            for name in names_in(&on_disk)? {
                // Metadata belongs to the link's target, so a dangling link is left out.
                match fs::metadata(on_disk.join(&name)) {
                    Ok(metadata) if metadata.is_dir() => folders.push(format!("{folder}{name}/")),
                    Ok(_) => paths.push(format!("{folder}{name}")),
                    Err(_) => {}
                }
            }
        }
        paths.sort();
        Ok(paths)
    }

    /// The files of a model, if all required ones are in the snapshot.
    pub fn complete(
        &self,
        commit: &str,
        wanted: Option<&str>,
    ) -> Result<Option<Vec<String>>, HubError> {
        let paths = self.paths(commit)?;
        let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
        let Ok(selection) = Selection::new(&self.name, &paths, wanted) else {
            return Ok(None);
        };
        let (mut files, weights) = match selection {
            Selection::Gguf(parts) => return Ok(Some(parts)),
            Selection::Folder { small, weights } => (small, weights),
        };
        let has_tokenizer = ["tokenizer.json", "tokenizer.model"]
            .iter()
            .any(|name| paths.contains(name));
        match weights {
            FolderWeights::Single => files.push(SINGLE.to_owned()),
            FolderWeights::Indexed => {
                let index = self.file(commit, INDEX);
                let index = fs::read(&index).map_err(HubError::disk("read", &index))?;
                let Ok(shards) = selection::shards(&index) else {
                    return Ok(None);
                };
                files.push(INDEX.to_owned());
                files.extend(shards);
            }
        }
        let has_all = files.iter().all(|file| paths.contains(&file.as_str()));
        Ok((has_all && has_tokenizer).then_some(files))
    }

    fn commits(&self) -> Result<Vec<String>, HubError> {
        let mut commits = names_in(&self.folder.join("snapshots"))?;
        commits.retain(|name| is_commit(name));
        Ok(commits)
    }

    /// The revisions of each commit.
    fn revisions(&self) -> Result<BTreeMap<String, BTreeSet<String>>, HubError> {
        let mut revisions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
        let mut folders = vec![String::new()];
        while let Some(folder) = folders.pop() {
            let on_disk = self.folder.join("refs").join(&folder);
            for name in names_in(&on_disk)? {
                let revision = format!("{folder}{name}");
                if on_disk.join(&name).is_dir() {
                    folders.push(format!("{revision}/"));
                } else if let Some(commit) = self.commit(&revision)? {
                    revisions.entry(commit).or_default().insert(revision);
                }
            }
        }
        Ok(revisions)
    }

    fn models(&self) -> Result<Vec<CachedModel>, HubError> {
        let revisions = self.revisions()?;
        let mut models = Vec::new();
        for commit in self.commits()? {
            let known = revisions.get(&commit);
            let revision = match known {
                Some(known) if known.contains(ModelName::MAIN) => None,
                Some(known) => known.first().cloned(),
                None => Some(commit[..12].to_owned()),
            };
            let paths = self.paths(&commit)?;
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            let mut add = |file: Option<String>, paths: &[String], is_complete| {
                let sizes = paths
                    .iter()
                    .map(|path| fs::metadata(self.file(&commit, path)));
                models.push(CachedModel {
                    name: ModelName {
                        repository: self.name.clone(),
                        file,
                        revision: revision.clone(),
                    },
                    commit: commit.clone(),
                    num_bytes: sizes.map(|size| size.map_or(0, |size| size.len())).sum(),
                    is_complete,
                });
            };
            let ggufs = gguf_models(&paths);
            for model in &ggufs {
                let file = Some(model.short_name().to_owned());
                match model.parts(&self.name, &paths) {
                    Ok(parts) => add(file, &parts, true),
                    Err(_) => add(file, std::slice::from_ref(&model.path), false),
                }
            }
            if paths.contains(&selection::CONFIG) || ggufs.is_empty() {
                let files = match self.complete(&commit, None)? {
                    Some(files) if files.iter().any(|file| file == selection::CONFIG) => {
                        Some(files)
                    }
                    _ => None,
                };
                let all: Vec<String> = paths.iter().map(|&path| path.to_owned()).collect();
                let is_complete = files.is_some();
                // A repository of GGUF files may have a configuration, too.
                if is_complete || ggufs.is_empty() {
                    add(None, &files.unwrap_or(all), is_complete);
                }
            }
        }
        Ok(models)
    }

    /// Deletes a repository, one revision of it, or one GGUF model. `None` if it is not in the cache.
    pub fn remove(&self, name: &ModelName) -> Result<Option<Removed>, HubError> {
        let before = self.blob_sizes()?;
        if before.is_empty() && self.commits()?.is_empty() {
            return Ok(None);
        }
        let commits = match &name.revision {
            Some(revision) => Vec::from_iter(self.commit(revision)?),
            None => self.commits()?,
        };
        let mut is_found = name.revision.is_none() && name.file.is_none();
        for commit in &commits {
            match &name.file {
                Some(wanted) => {
                    let paths = self.paths(commit)?;
                    let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
                    let parts = match Selection::new(&self.name, &paths, Some(wanted)) {
                        Ok(Selection::Gguf(parts)) => parts,
                        _ => continue,
                    };
                    is_found = true;
                    for part in &parts {
                        let link = self.file(commit, part);
                        fs::remove_file(&link).map_err(HubError::disk("delete", &link))?;
                    }
                    if paths.len() == parts.len() {
                        self.remove_snapshot(commit)?;
                    }
                }
                None => {
                    is_found = true;
                    self.remove_snapshot(commit)?;
                }
            }
        }
        if !is_found {
            return Ok(None);
        }
        if self.commits()?.is_empty() {
            remove_folder(&self.folder)?;
            remove_folder(&self.locks)?;
        } else {
            self.remove_unused_blobs()?;
        }
        let after = self.blob_sizes()?;
        let freed = before.iter().filter(|(blob, _)| !after.contains_key(*blob));
        let mut removed = Removed::default();
        for (_, num_bytes) in freed {
            removed.num_files += 1;
            removed.num_bytes += num_bytes;
        }
        Ok(Some(removed))
    }

    fn remove_snapshot(&self, commit: &str) -> Result<(), HubError> {
        for revision in self.revisions()?.remove(commit).into_iter().flatten() {
            let path = self.folder.join("refs").join(revision);
            fs::remove_file(&path).map_err(HubError::disk("delete", &path))?;
        }
        let tree = self.folder.join("trees").join(format!("{commit}.json"));
        match fs::remove_file(&tree) {
            Err(error) if !is_absent(&error) => return Err(HubError::disk("delete", &tree)(error)),
            _ => {}
        }
        remove_folder(&self.snapshot(commit))
    }

    /// Deletes the blobs without a link in a snapshot, including partial ones.
    fn remove_unused_blobs(&self) -> Result<(), HubError> {
        let mut used = BTreeSet::new();
        for commit in self.commits()? {
            for path in self.paths(&commit)? {
                let target = fs::read_link(self.file(&commit, &path)).unwrap_or_default();
                used.extend(
                    target
                        .file_name()
                        .map(|name| name.to_string_lossy().into_owned()),
                );
            }
        }
        for name in self
            .blob_sizes()?
            .into_keys()
            .filter(|name| !used.contains(name))
        {
            let path = self.folder.join("blobs").join(name);
            fs::remove_file(&path).map_err(HubError::disk("delete", &path))?;
        }
        Ok(())
    }

    fn blob_sizes(&self) -> Result<BTreeMap<String, u64>, HubError> {
        let blobs = self.folder.join("blobs");
        let sizes = names_in(&blobs)?.into_iter().map(|name| {
            // A blob that is a link leads to a file that other repositories share. That file stays.
            let size = fs::symlink_metadata(blobs.join(&name)).ok();
            (
                name,
                size.filter(|size| size.is_file())
                    .map_or(0, |size| size.len()),
            )
        });
        Ok(sizes.collect())
    }
}

#[cfg(unix)]
fn make_link(target: &str, _blob: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Copies the file itself into the snapshot where links need rights that users lack.
#[cfg(not(unix))]
fn make_link(_target: &str, blob: &Path, link: &Path) -> io::Result<()> {
    fs::rename(blob, link)
}

/// The names in a folder, in order; empty for a missing folder.
fn names_in(folder: &Path) -> Result<Vec<String>, HubError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(HubError::disk("read", folder)(error)),
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<_> = names.collect();
    names.sort();
    Ok(names)
}

fn remove_folder(folder: &Path) -> Result<(), HubError> {
    match fs::remove_dir_all(folder) {
        Err(error) if !is_absent(&error) => Err(HubError::disk("delete", folder)(error)),
        _ => Ok(()),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::IsADirectory
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_that_cannot_be_read_hides_no_other() {
        let name = format!("corella-cache-{}", std::process::id());
        let cache = Cache {
            folder: std::env::temp_dir().join(name),
        };
        drop(fs::remove_dir_all(&cache.folder));
        let commit = "a".repeat(40);
        for name in ["one/first", "one/second", "one/third"] {
            let repository = cache.repository(name);
            let file = repository.file(&commit, "model-Q8_0.gguf");
            fs::create_dir_all(repository.snapshot(&commit)).expect("it is created");
            fs::write(file, "weights").expect("it is written");
            fs::create_dir_all(repository.folder.join("refs")).expect("it is created");
        }
        // A reference that is no text cannot be read, whatever rights the test has.
        let broken = cache.repository("one/second").folder.join("refs/main");
        fs::write(&broken, [0xff]).expect("it is written");
        let mut errors = Vec::new();
        let models = cache.readable_models(|error| errors.push(error.to_string()));
        let names = models.iter().map(|model| model.name.repository.as_str());
        assert_eq!(Vec::from_iter(names), ["one/first", "one/third"]);
        let broken = broken.display().to_string();
        assert!(
            matches!(&*errors, [error] if error.contains(&broken)),
            "{errors:?}"
        );
        let error = cache.models().expect_err("one cannot be read");
        assert_eq!(error.to_string(), errors[0]);
        fs::remove_dir_all(&cache.folder).expect("it is removed");
    }
}
