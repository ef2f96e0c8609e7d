//! The folder of files: contents, the record of each, and their total size.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::clock::{random_seed, unix_now_s};
use crate::wire::api_error::ApiError;
use crate::wire::field_limit::{MAX_FILE_LIFE_S, MIN_FILE_LIFE_S};

/// The folder of files, and its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilesConfig {
    pub dir: PathBuf,
    /// Limits the bytes of one file.
    pub max_file_bytes: u64,
    /// Limits the bytes of all files, including the outputs of batches.
    pub max_files_bytes: u64,
    /// Limits the number of lines, over all batches, that are answered at the same time.
    pub batch_concurrency: usize,
}

/// The record of a file besides its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: String,
    /// The name of the API key that owns the file; `None` if the server required none.
    pub owner: Option<String>,
    pub bytes: u64,
    pub created_at: u64,
    pub expires_at: u64,
    pub filename: String,
    pub purpose: String,
}

impl FileRecord {
    pub fn object(&self) -> Value {
        json!({
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": null,
        })
    }
}

/// Files stay on disk when the server ends. Only one server at a time uses a folder.
pub struct FileStore {
    pub config: FilesConfig,
    table: Mutex<Table>,
    /// Locks the folder as long as the server runs.
    _lock: File,
}

#[derive(Default)]
struct Table {
    files: BTreeMap<String, FileRecord>,
    /// The bytes of all files and uploads.
    num_bytes: u64,
}

/// Limits the files of a key, which bounds the table in memory.
const MAX_NUM_FILES: usize = 100_000;

impl FileStore {
    /// Opens or creates a folder. Contents without a record come from an upload that a crash cut off, and are removed,
    /// except contents named in `referred`. A content whose record cannot be read, perhaps because another version of
    /// the program wrote it, stays for the operator.
    pub fn open(config: FilesConfig, referred: &BTreeSet<String>) -> io::Result<Self> {
        let lock = lock(&config.dir)?;
        let folder = config.dir.join(FILES);
        create_private_dir(&folder)?;
        let mut files = BTreeMap::new();
        for record in read_records::<FileRecord>(&folder)? {
            if folder.join(&record.id).exists() {
                files.insert(record.id.clone(), record);
            }
        }
        let mut num_bytes: u64 = files.values().map(|file| file.bytes).sum();
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_suffix(".json").unwrap_or(&name);
            let content = folder.join(id);
            if files.contains_key(id) {
                continue;
            }
            if referred.contains(id) {
                num_bytes += entry.metadata()?.len();
            } else if !(content.exists() && folder.join(format!("{id}.json")).exists()) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(Self {
            config,
            table: Mutex::new(Table { files, num_bytes }),
            _lock: lock,
        })
    }

    pub fn path_of(&self, id: &str) -> PathBuf {
        self.config.dir.join(FILES).join(id)
    }

    /// The file of this owner, unless it has expired.
    pub fn find(&self, owner: Option<&str>, id: &str) -> Result<FileRecord, ApiError> {
        let table = self.table();
        let file = table
            .files
            .get(id)
            .filter(|file| file.owner.as_deref() == owner);
        match file {
            Some(file) if file.expires_at > unix_now_s() => Ok(file.clone()),
            Some(_) => Err(ApiError::file_not_found(id, "has expired")),
            None => Err(ApiError::file_not_found(
                id,
                "does not exist, or was deleted",
            )),
        }
    }

    /// Returns whether the file exists. An expired file stays as long as a batch reads it.
    pub fn is_kept(&self, id: &str) -> bool {
        self.table().files.contains_key(id)
    }

    /// The files of this owner, the oldest first.
    pub fn list(&self, owner: Option<&str>) -> Vec<FileRecord> {
        let now_s = unix_now_s();
        let table = self.table();
        let files = table.files.values();
        let files = files.filter(|file| file.owner.as_deref() == owner && file.expires_at > now_s);
        let mut files: Vec<FileRecord> = files.cloned().collect();
        files.sort_by(|a, b| (a.created_at, &a.id).cmp(&(b.created_at, &b.id)));
        files
    }

    /// Begins a file, whose content goes to `Upload::path`.
    pub fn begin(self: &Arc<Self>, owner: Option<&str>) -> Result<Upload, ApiError> {
        let is_own = |file: &&FileRecord| file.owner.as_deref() == owner;
        let num_files = self.table().files.values().filter(is_own).count();
        if num_files >= MAX_NUM_FILES {
            let message = format!("You have {MAX_NUM_FILES} files here already; delete some.");
            return Err(ApiError::insufficient_storage(message));
        }
        let id = new_id("file-");
        Ok(Upload {
            path: self.path_of(&format!("{id}.part")),
            id,
            store: self.clone(),
            num_bytes: 0,
            is_complete: false,
        })
    }

    /// Reserves room for bytes before they are written.
    pub fn reserve(&self, num_bytes: u64) -> Result<(), ApiError> {
        let max_bytes = self.config.max_files_bytes;
        let mut table = self.table();
        if table.num_bytes + num_bytes > max_bytes {
            return Err(ApiError::insufficient_storage(format!(
                "All files together may have {max_bytes} bytes (--max-files-bytes); delete some, or let the \
                 server be started with more."
            )));
        }
        table.num_bytes += num_bytes;
        Ok(())
    }

    /// Counts bytes that are on disk already.
    pub fn count(&self, num_bytes: u64) {
        self.table().num_bytes += num_bytes;
    }

    pub fn give_back(&self, num_bytes: u64) {
        let mut table = self.table();
        table.num_bytes = table.num_bytes.saturating_sub(num_bytes);
    }

    /// Makes a content in the folder a file. Its bytes have been reserved.
    pub fn publish(&self, record: FileRecord) -> io::Result<()> {
        write_record(&self.config.dir.join(FILES), &record.id, &record)?;
        self.show(record);
        Ok(())
    }

    /// Shows a content as a file until the server ends, without a record on disk.
    pub fn show(&self, record: FileRecord) {
        self.table().files.insert(record.id.clone(), record);
    }

    pub fn delete(&self, id: &str) -> io::Result<()> {
        let Some(file) = self.table().files.remove(id) else {
            return Ok(());
        };
        // A content without a record is not a file.
        remove_if_there(&self.path_of(&format!("{id}.json")))?;
        remove_if_there(&self.path_of(id))?;
        self.give_back(file.bytes);
        Ok(())
    }

    /// Deletes expired files unless `is_needed`.
    pub fn sweep(&self, is_needed: impl Fn(&str) -> bool) -> io::Result<()> {
        let now_s = unix_now_s();
        let table = self.table();
        let files = table.files.values();
        let expired = files.filter(|file| file.expires_at <= now_s && !is_needed(&file.id));
        let expired: Vec<String> = expired.map(|file| file.id.clone()).collect();
        drop(table);
        expired.iter().try_for_each(|id| self.delete(id))
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file being uploaded. Dropping an incomplete upload removes its content.
pub struct Upload {
    pub id: String,
    pub path: PathBuf,
    pub num_bytes: u64,
    store: Arc<FileStore>,
    is_complete: bool,
}

impl Upload {
    /// Reserves room for bytes before they are written, within the file's limit.
    pub fn grow(&mut self, num_bytes: u64) -> Result<(), ApiError> {
        let max_bytes = self.store.config.max_file_bytes;
        if self.num_bytes + num_bytes > max_bytes {
            return Err(ApiError::file_too_large(max_bytes));
        }
        self.store.reserve(num_bytes)?;
        self.num_bytes += num_bytes;
        Ok(())
    }

    /// Makes the written content a file.
    pub fn complete(mut self, record: FileRecord) -> io::Result<()> {
        File::open(&self.path)?.sync_all()?;
        fs::rename(&self.path, self.store.path_of(&self.id))?;
        self.is_complete = true;
        self.store.publish(record)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if !self.is_complete {
            // If this fails, the next start removes the file.
            let _ = fs::remove_file(&self.path);
            self.store.give_back(self.num_bytes);
        }
    }
}

/// The subfolder of contents and their records.
const FILES: &str = "files";

/// Makes a folder that only its owner can read, because prompts and answers are private. An existing folder stays
/// unchanged.
pub fn create_private_dir(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
}

fn lock(dir: &Path) -> io::Result<File> {
    create_private_dir(dir)?;
    let file = File::create(dir.join("lock"))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(io::Error::other(
            "another server uses it; give each server a folder of its own",
        )),
        Err(fs::TryLockError::Error(error)) => Err(error),
    }
}

/// An id that no other object has.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:016x}", random_seed(), random_seed())
}

pub fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a record such that a crash leaves either the old or the new one. If the new record exists, all earlier
/// renames in the folder are on disk, too.
pub fn write_record(folder: &Path, id: &str, record: &impl Serialize) -> io::Result<()> {
    let path = folder.join(format!("{id}.json"));
    let new = folder.join(format!("{id}.json.new"));
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.sync_all()?;
    fs::rename(&new, &path)?;
    File::open(folder)?.sync_all()
}

/// Returns the records of a folder. An unreadable record is left out, with a warning.
pub fn read_records<T: DeserializeOwned>(folder: &Path) -> io::Result<Vec<T>> {
    let mut records = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        match serde_json::from_slice(&fs::read(&path)?) {
            Ok(record) => records.push(record),
            Err(error) => tracing::warn!(%error, path = %path.display(), "a record is left out"),
        }
    }
    Ok(records)
}

/// Checks the lifetime of a file.
pub fn life_s(field: &str, seconds: Option<u64>) -> Result<u64, ApiError> {
    let seconds = seconds.filter(|seconds| (MIN_FILE_LIFE_S..=MAX_FILE_LIFE_S).contains(seconds));
    seconds.ok_or_else(|| {
        let message =
            format!("must be from {MIN_FILE_LIFE_S} (an hour) to {MAX_FILE_LIFE_S} (30 days)");
        ApiError::invalid(field, message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str) -> FilesConfig {
        let name = format!("corella-files-{}-{name}", std::process::id());
        FilesConfig {
            dir: std::env::temp_dir().join(name),
            max_file_bytes: 100,
            max_files_bytes: 250,
            batch_concurrency: 1,
        }
    }

    fn record(upload: &Upload, expires_at: u64) -> FileRecord {
        FileRecord {
            id: upload.id.clone(),
            owner: Some("a".into()),
            bytes: upload.num_bytes,
            created_at: 1,
            expires_at,
            filename: "x.jsonl".into(),
            purpose: "batch".into(),
        }
    }

    fn add(store: &Arc<FileStore>, num_bytes: usize, expires_at: u64) -> Result<String, ApiError> {
        let mut upload = store.begin(Some("a"))?;
        upload.grow(num_bytes as u64)?;
        fs::write(&upload.path, vec![b'x'; num_bytes]).expect("it can be written");
        let record = record(&upload, expires_at);
        let id = record.id.clone();
        upload.complete(record).expect("it can be written");
        Ok(id)
    }

    #[test]
    fn files_outlive_the_server_and_the_rest_does_not() {
        let config = config("outlive");
        let none = BTreeSet::new();
        let store = Arc::new(FileStore::open(config.clone(), &none).expect("it opens"));
        let id = add(&store, 90, u64::MAX).expect("there is room");
        let locked = FileStore::open(config.clone(), &none)
            .err()
            .expect("it is locked");
        assert!(locked.to_string().contains("another server"), "{locked}");
        let mut cut_off = store.begin(Some("a")).expect("there is room");
        cut_off.grow(50).expect("there is room");
        fs::write(&cut_off.path, "half").expect("it can be written");
        // A crash runs no destructor.
        std::mem::forget(cut_off);
        fs::write(store.path_of("file-1"), "no record").expect("it can be written");
        fs::write(store.path_of("file-2"), "an output").expect("it can be written");
        // A content written by another version of the program.
        fs::write(store.path_of("file-3"), "a content").expect("it can be written");
        fs::write(store.path_of("file-3.json"), r#"{"id":"file-3"}"#).expect("it can be written");
        drop(store);
        // The forgotten upload holds the store, and with it the lock.
        let second = FilesConfig {
            dir: config.dir.with_extension("moved"),
            ..config.clone()
        };
        fs::rename(&config.dir, &second.dir).expect("it can be moved");
        fs::remove_file(second.dir.join("lock")).expect("it is there");
        let referred = BTreeSet::from(["file-2".to_owned()]);
        let store = Arc::new(FileStore::open(second.clone(), &referred).expect("it opens"));
        assert_eq!(store.find(Some("a"), &id).map(|file| file.bytes), Ok(90));
        let mut names: Vec<String> = fs::read_dir(second.dir.join(FILES))
            .expect("it is there")
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        let kept = ["file-2", "file-3", "file-3.json"].map(str::to_owned);
        let mut expected = vec![id.clone(), format!("{id}.json")];
        expected.extend(kept);
        expected.sort();
        assert_eq!(names, expected);
        // The output counts before it becomes a file: 90 + 9 of 250 bytes.
        assert!(store.reserve(152).is_err());
        assert_eq!(store.reserve(151), Ok(()));
        fs::remove_dir_all(second.dir).expect("it can be removed");
    }

    #[test]
    fn bounds_owners_and_expiry_hold() {
        let config = config("bounds");
        let store = FileStore::open(config.clone(), &BTreeSet::new()).expect("it opens");
        let store = Arc::new(store);
        let first = add(&store, 100, u64::MAX).expect("there is room");
        let second = add(&store, 100, 1).expect("there is room");
        assert!(
            add(&store, 101, u64::MAX).is_err_and(|error| error.message().contains("101")
                || error.message().contains("--max-file-bytes"))
        );
        let full = add(&store, 51, u64::MAX).expect_err("there is no room");
        assert!(full.message().contains("--max-files-bytes"), "{full:?}");
        add(&store, 50, u64::MAX).expect("what was refused takes nothing");
        assert!(store.find(Some("b"), &first).is_err() && store.find(None, &first).is_err());
        let expired = store
            .find(Some("a"), &second)
            .expect_err("its time is over");
        assert!(expired.message().contains("expired"));
        assert_eq!(store.list(Some("a")).len(), 2);
        store.sweep(|id| id == second).expect("it can");
        assert!(store.path_of(&second).exists(), "it is needed");
        store.sweep(|_| false).expect("it can");
        assert!(!store.path_of(&second).exists());
        store.delete(&first).expect("it can");
        assert!(store.find(Some("a"), &first).is_err());
        add(&store, 100, u64::MAX).expect("there is room again");
        fs::remove_dir_all(config.dir).expect("it can be removed");
    }
}
