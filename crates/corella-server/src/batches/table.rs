//! All batches of a server, on disk and in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore, watch};

use crate::api_error::ApiError;
use crate::files::{FileStore, FilesConfig, read_records, remove_if_there, write_record};
use crate::server_state::unix_now_s;

use super::record::{BatchRecord, BatchStatus};

/// Batches and the files that they read and write. Both stay when the server ends.
pub struct Batches {
    pub files: Arc<FileStore>,
    table: Mutex<BTreeMap<String, Batch>>,
    /// Tells that there is a batch to run.
    pub(super) has_work: Notify,
    /// One for each line that may be answered at a time, whichever batch it is of.
    pub(super) permits: Arc<Semaphore>,
}

struct Batch {
    record: BatchRecord,
    is_running: bool,
    is_cancelled: watch::Sender<bool>,
}

/// A batch that is run.
pub struct Job {
    pub record: BatchRecord,
    pub is_cancelled: watch::Receiver<bool>,
}

/// Batches that are run at a time; others wait.
const MAX_NUM_RUNNING: usize = 16;
const MAX_NUM_UNFINISHED: usize = 1000;
/// Beyond it, the oldest that have ended are forgotten.
const MAX_NUM_BATCHES: usize = 10_000;

impl Batch {
    fn new(record: BatchRecord) -> Self {
        let is_cancelled = watch::Sender::new(record.status == BatchStatus::Cancelling);
        Self {
            record,
            is_running: false,
            is_cancelled,
        }
    }
}

impl Batches {
    /// Opens a folder, and makes it if it is not there.
    pub fn open(config: FilesConfig) -> io::Result<Arc<Self>> {
        let folder = config.dir.join(BATCHES);
        fs::create_dir_all(&folder)?;
        let records: Vec<BatchRecord> = read_records(&folder)?;
        let unpublished = records.iter().filter(|record| !record.status.has_ended());
        let referred: BTreeSet<String> = unpublished
            .flat_map(|record| [&record.output_file_id, &record.error_file_id])
            .flatten()
            .cloned()
            .collect();
        let permits = Arc::new(Semaphore::new(config.batch_concurrency));
        let files = Arc::new(FileStore::open(config, &referred)?);
        let table = { records.into_iter() }
            .map(|record| (record.id.clone(), Batch::new(record)))
            .collect();
        Ok(Arc::new(Self {
            files,
            table: Mutex::new(table),
            has_work: Notify::new(),
            permits,
        }))
    }

    fn folder(&self) -> PathBuf {
        self.files.config.dir.join(BATCHES)
    }

    /// Where the answers of a batch are written before they are a file.
    pub fn answers_path(&self, id: &str) -> PathBuf {
        self.folder().join(format!("{id}.output.jsonl"))
    }

    /// Likewise for the lines that have failed.
    pub fn failures_path(&self, id: &str) -> PathBuf {
        self.folder().join(format!("{id}.errors.jsonl"))
    }

    /// Adds a batch. This writes to disk.
    pub fn create(&self, record: BatchRecord) -> Result<(), ApiError> {
        {
            let table = self.table();
            let unfinished = table
                .values()
                .filter(|batch| !batch.record.status.has_ended());
            if unfinished.count() >= MAX_NUM_UNFINISHED {
                return Err(ApiError::conflict(format!(
                    "{MAX_NUM_UNFINISHED} batches have not ended, which is the most that are kept; wait, or \
                     cancel some."
                )));
            }
        }
        self.save(&record)
            .map_err(|error| crate::files::disk_error(&error))?;
        let mut table = self.table();
        table.insert(record.id.clone(), Batch::new(record));
        let ended = table
            .values()
            .filter(|batch| batch.record.status.has_ended());
        let oldest = ended.min_by_key(|batch| batch.record.times.created_at);
        if table.len() > MAX_NUM_BATCHES
            && let Some(oldest) = oldest.map(|batch| batch.record.id.clone())
        {
            table.remove(&oldest);
            // A record that stays is read at the next start, and forgotten later.
            let _ = remove_if_there(&self.folder().join(format!("{oldest}.json")));
        }
        drop(table);
        self.has_work.notify_one();
        Ok(())
    }

    /// The batch of this owner.
    pub fn find(&self, owner: Option<&str>, id: &str) -> Result<BatchRecord, ApiError> {
        let table = self.table();
        let batch = table.get(id);
        let batch = batch.filter(|batch| batch.record.owner.as_deref() == owner);
        match batch {
            Some(batch) => Ok(batch.record.clone()),
            None => Err(ApiError::batch_not_found(id)),
        }
    }

    /// The batches of this owner, the oldest first.
    pub fn list(&self, owner: Option<&str>) -> Vec<BatchRecord> {
        let table = self.table();
        let batches = table.values().map(|batch| &batch.record);
        let mut batches: Vec<BatchRecord> = batches
            .filter(|record| record.owner.as_deref() == owner)
            .cloned()
            .collect();
        batches.sort_by(|a, b| (a.times.created_at, &a.id).cmp(&(b.times.created_at, &b.id)));
        batches
    }

    /// The batch that still reads a file.
    pub fn user_of(&self, file: &str) -> Option<String> {
        let table = self.table();
        let mut records = table.values().map(|batch| &batch.record);
        let user =
            records.find(|record| record.input_file_id == file && !record.status.has_ended());
        user.map(|record| record.id.clone())
    }

    /// Begins to cancel a batch. This writes to disk.
    pub fn cancel(&self, owner: Option<&str>, id: &str) -> Result<BatchRecord, ApiError> {
        let record = self.find(owner, id)?;
        match record.status {
            BatchStatus::Validating | BatchStatus::InProgress => {}
            BatchStatus::Cancelling => return Ok(record),
            status => {
                let status = serde_json::to_value(status).unwrap_or_default();
                return Err(ApiError::conflict(format!(
                    "The batch `{id}` cannot be cancelled: it is {status}."
                )));
            }
        }
        let record = self.change(id, |record| {
            if !record.status.has_ended() && record.outcome.is_none() {
                record.reach(BatchStatus::Cancelling, unix_now_s());
            }
        });
        let record = record.ok_or_else(|| ApiError::batch_not_found(id))?;
        self.save(&record)
            .map_err(|error| crate::files::disk_error(&error))?;
        if let Some(batch) = self.table().get(id) {
            batch.is_cancelled.send_replace(true);
        }
        self.has_work.notify_one();
        Ok(record)
    }

    /// Changes what is known of a batch in memory.
    pub fn change(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) -> Option<BatchRecord> {
        let mut table = self.table();
        let batch = table.get_mut(id)?;
        change(&mut batch.record);
        Some(batch.record.clone())
    }

    pub fn save(&self, record: &BatchRecord) -> io::Result<()> {
        write_record(&self.folder(), &record.id, record)
    }

    /// The next batch to run: the oldest that is not run, if there may be one more.
    pub fn take_job(&self) -> Option<Job> {
        let mut table = self.table();
        if table.values().filter(|batch| batch.is_running).count() >= MAX_NUM_RUNNING {
            return None;
        }
        let waiting = { table.values_mut() }
            .filter(|batch| !batch.is_running && !batch.record.status.has_ended());
        let batch = waiting.min_by_key(|batch| batch.record.times.created_at)?;
        batch.is_running = true;
        Some(Job {
            record: batch.record.clone(),
            is_cancelled: batch.is_cancelled.subscribe(),
        })
    }

    /// A batch is no longer run.
    pub fn put_back(&self, id: &str) {
        if let Some(batch) = self.table().get_mut(id) {
            batch.is_running = false;
        }
        self.has_work.notify_one();
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<String, Batch>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of the folder with batches, and their answers until they are complete.
const BATCHES: &str = "batches";
