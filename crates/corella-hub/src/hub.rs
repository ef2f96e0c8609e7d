//! A model by its name: from the cache if present, else from the hub.

use std::fs;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::cache::{Cache, Repository};
use crate::client::{Client, Listing};
use crate::download::Download;
use crate::free_space::free_bytes;
use crate::listing::RemoteFile;
use crate::lock::FileLock;
use crate::selection::{self, FolderWeights, INDEX, SINGLE, Selection};
use crate::{CachedModel, FetchEvent, HubConfig, HubError, ModelName, Observer, Removed};

pub struct Hub {
    config: HubConfig,
    cache: Cache,
}

/// A model in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// The folder of the model, or its GGUF file, or the first part of a split one.
    pub path: PathBuf,
    pub commit: String,
    /// The number of newly fetched files.
    pub num_fetched: usize,
    /// The size of all files of the model, in bytes.
    pub num_bytes: u64,
}

impl Hub {
    pub fn new(config: HubConfig) -> Self {
        let cache = Cache {
            folder: config.cache.clone(),
        };
        Self { config, cache }
    }

    /// Returns the model in the cache, without asking the hub for a newer one. Fetches the model if it is missing or
    /// incomplete.
    pub fn resolve(&self, name: &ModelName, observer: Observer<'_>) -> Result<Fetched, HubError> {
        match self.find(name)? {
            Some(found) => Ok(found),
            None => self.fetch(name, observer),
        }
    }

    /// The model in the cache, if complete.
    pub fn find(&self, name: &ModelName) -> Result<Option<Fetched>, HubError> {
        let repository = self.cache.repository(&name.repository);
        let Some(commit) = repository.commit(name.revision_or_main())? else {
            return Ok(None);
        };
        let files = repository.complete(&commit, name.file.as_deref())?;
        Ok(files.map(|files| {
            let sizes = files
                .iter()
                .map(|file| fs::metadata(repository.file(&commit, file)));
            Fetched {
                path: model_path(&repository, &commit, &files),
                num_bytes: sizes.map(|size| size.map_or(0, |size| size.len())).sum(),
                num_fetched: 0,
                commit,
            }
        }))
    }

    /// Fetches the files of the hub's current commit that the cache lacks.
    pub fn fetch(&self, name: &ModelName, observer: Observer<'_>) -> Result<Fetched, HubError> {
        if self.config.is_offline {
            return Err(HubError::Offline(format!(
                "{name} is not in the cache ({}) as a whole, and --offline or HF_HUB_OFFLINE forbids to \
                 fetch it",
                self.config.cache.display()
            )));
        }
        let client = Client::new(&self.config)?;
        let Listing {
            commit,
            licence,
            files,
        } = client.listing(name, observer)?;
        let paths: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        let selection = Selection::new(&name.repository, &paths, name.file.as_deref())?;
        let fetch = Fetch {
            client: &client,
            name,
            commit: &commit,
            listed: &files,
            repository: self.cache.repository(&name.repository),
            num_parallel: self.config.num_parallel.max(1),
            observer,
        };
        fetch.repository.create()?;
        // Weights come last: a snapshot with weights has all other files.
        let (small, large) = match selection {
            Selection::Gguf(parts) => (Vec::new(), parts),
            Selection::Folder { small, weights } => match weights {
                FolderWeights::Single => (small, vec![SINGLE.to_owned()]),
                FolderWeights::Indexed => {
                    let mut small = small;
                    small.push(INDEX.to_owned());
                    fetch.files(&[INDEX.to_owned()])?;
                    let index = fetch.repository.file(&commit, INDEX);
                    let index = fs::read(&index).map_err(HubError::disk("read", &index))?;
                    let shards = selection::shards(&index).map_err(|reason| {
                        HubError::Corrupt(format!("{}: {INDEX}: {reason}", name.repository))
                    })?;
                    (small, shards)
                }
            },
        };
        fetch.announce(&small, &large, licence.as_deref(), &self.config.endpoint)?;
        let mut num_fetched = fetch.files(&small)?;
        num_fetched += fetch.files(&large)?;
        // The revision changes only now: an interrupted fetch leaves the old model whole.
        fetch
            .repository
            .set_commit(name.revision_or_main(), &commit)?;
        let files: Vec<String> = small.into_iter().chain(large).collect();
        Ok(Fetched {
            path: model_path(&fetch.repository, &commit, &files),
            num_bytes: fetch
                .listed(&files)?
                .iter()
                .map(|file| file.num_bytes)
                .sum(),
            num_fetched,
            commit,
        })
    }

    /// All models in the cache.
    pub fn list(&self) -> Result<Vec<CachedModel>, HubError> {
        self.cache.models()
    }

    /// All models in the cache but those of repositories that cannot be read. Each of these is told.
    pub fn list_readable(&self, tell: impl FnMut(HubError)) -> Vec<CachedModel> {
        self.cache.readable_models(tell)
    }

    /// Deletes a model, one revision of it, or one of its GGUF files. `None` if it is not in the cache.
    pub fn remove(&self, name: &ModelName) -> Result<Option<Removed>, HubError> {
        self.cache.repository(&name.repository).remove(name)
    }
}

/// The path to load: the GGUF file, or the folder.
fn model_path(repository: &Repository, commit: &str, files: &[String]) -> PathBuf {
    match files.first() {
        Some(first) if first.ends_with(".gguf") => repository.file(commit, first),
        _ => repository.snapshot(commit),
    }
}

struct Fetch<'a> {
    client: &'a Client,
    name: &'a ModelName,
    commit: &'a str,
    listed: &'a [RemoteFile],
    repository: Repository,
    num_parallel: usize,
    observer: Observer<'a>,
}

impl Fetch<'_> {
    fn listed(&self, paths: &[String]) -> Result<Vec<&RemoteFile>, HubError> {
        let listed = |path: &String| {
            let file = self.listed.iter().find(|file| file.path == *path);
            file.ok_or_else(|| {
                HubError::Refused(format!(
                    "{} has no {path}, which it needs",
                    self.name.repository
                ))
            })
        };
        paths.iter().map(listed).collect()
    }

    fn is_missing(&self, file: &RemoteFile) -> bool {
        let in_snapshot = self.repository.file(self.commit, &file.path);
        !self.repository.blob(&file.digest).exists() && !in_snapshot.exists()
    }

    /// Reports the files that will be fetched. Returns an error if the disk has no room for them.
    fn announce(
        &self,
        small: &[String],
        large: &[String],
        licence: Option<&str>,
        endpoint: &str,
    ) -> Result<(), HubError> {
        let mut missing = self.listed(small)?;
        missing.extend(self.listed(large)?);
        missing.retain(|file| self.is_missing(file));
        self.check_space(&missing)?;
        let repository = &self.name.repository;
        if !missing.is_empty() {
            (self.observer)(FetchEvent::Started {
                name: self.name,
                file: match &missing[..] {
                    [only] => Some(&only.path),
                    _ => None,
                },
                num_files: missing.len(),
                num_bytes: { missing.iter() }
                    .map(|file| file.num_bytes)
                    .fold(0, u64::saturating_add),
                licence,
                page: &format!("{}/{repository}", endpoint.trim_end_matches('/')),
            });
        }
        Ok(())
    }

    /// Fetches the missing files, several at a time, and returns their number. After the first error, no further fetch
    /// begins.
    fn files(&self, paths: &[String]) -> Result<usize, HubError> {
        let files = self.listed(paths)?;
        let mut missing: Vec<_> = files
            .iter()
            .copied()
            .filter(|file| self.is_missing(file))
            .collect();
        // The largest file takes longest, so it starts first.
        missing.sort_by_key(|file| std::cmp::Reverse(file.num_bytes));
        if !missing.is_empty() {
            (self.observer)(FetchEvent::Planned {
                num_bytes: missing.iter().map(|file| file.num_bytes).sum(),
            });
        }
        let next = AtomicUsize::new(0);
        let is_stopped = AtomicBool::new(false);
        let first_error = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..self.num_parallel.min(missing.len()) {
                scope.spawn(|| {
                    while !is_stopped.load(Ordering::Relaxed) {
                        let Some(file) = missing.get(next.fetch_add(1, Ordering::Relaxed)) else {
                            return;
                        };
                        if let Err(error) = self.file(file, &is_stopped)
                            && !is_stopped.swap(true, Ordering::Relaxed)
                            && let Ok(mut first) = first_error.lock()
                        {
                            first.get_or_insert(error);
                        }
                    }
                });
            }
        });
        if let Some(error) = first_error.into_inner().ok().flatten() {
            return Err(error);
        }
        for file in &files {
            self.repository
                .link(self.commit, &file.path, &file.digest)?;
        }
        Ok(missing.len())
    }

    fn file(&self, file: &RemoteFile, is_stopped: &AtomicBool) -> Result<(), HubError> {
        let blob = self.repository.blob(&file.digest);
        let _lock = FileLock::acquire(
            &self.repository.lock(&file.digest),
            &file.path,
            self.observer,
        )?;
        if blob.exists() {
            // Another process has fetched the file meanwhile.
            (self.observer)(FetchEvent::Received {
                num_bytes: file.num_bytes,
            });
            return Ok(());
        }
        let download = Download {
            client: self.client,
            name: self.name,
            commit: self.commit,
            file,
            observer: self.observer,
            is_stopped,
        };
        download.run(&self.repository.incomplete_blob(&file.digest), &blob)
    }

    fn check_space(&self, missing: &[&RemoteFile]) -> Result<(), HubError> {
        let left = |file: &&RemoteFile| {
            let there = fs::metadata(self.repository.incomplete_blob(&file.digest));
            file.num_bytes
                .saturating_sub(there.map_or(0, |there| there.len()))
        };
        let needed = missing.iter().map(left).fold(0, u64::saturating_add);
        let folder = self.repository.snapshot(self.commit);
        let cache = folder.ancestors().find(|folder| folder.exists());
        match cache.and_then(free_bytes) {
            Some(free) if free < needed => Err(HubError::Disk(
                format!(
                    "cannot fetch {}: it needs {:.1} GB more, and {} has {:.1} GB left",
                    self.name,
                    needed as f64 / 1e9,
                    folder.display(),
                    free as f64 / 1e9
                ),
                std::io::ErrorKind::StorageFull.into(),
            )),
            _ => Ok(()),
        }
    }
}
