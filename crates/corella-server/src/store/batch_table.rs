//! All batches of a server, on disk and in memory.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, Semaphore, watch};

use crate::clock::unix_now_s;
use crate::store::file_store::{
    FileStore, FilesConfig, create_private_dir, read_records, remove_if_there, write_record,
};
use crate::wire::api_error::ApiError;

use crate::store::batch_record::{BatchRecord, BatchStatus};

/// Batches and the files that they read and write. Both stay when the server ends.
pub struct Batches {
    pub files: Arc<FileStore>,
    table: Mutex<BTreeMap<String, Batch>>,
    /// Signals that a batch may be ready to run.
    pub(crate) has_work: Notify,
    /// A line is answered while it holds a permit. All batches share the permits.
    pub(crate) permits: Semaphore,
    /// Held while a record is written. Several threads may change a batch, and an older record must not overwrite a
    /// newer one.
    saving: Mutex<()>,
}

struct Batch {
    record: BatchRecord,
    is_running: bool,
    is_cancelled: watch::Sender<bool>,
}

/// A running batch.
pub struct Job {
    pub record: BatchRecord,
    pub is_cancelled: watch::Receiver<bool>,
}

/// Limits the running batches of an API key; its other batches wait. Keys do not wait for each other, because the lines
/// of a key may have to wait for its rate limit.
const MAX_NUM_RUNNING: usize = 16;
/// Limits the unfinished batches of a key.
const MAX_NUM_UNFINISHED: usize = 1000;
/// Limits the batches of a key. Beyond the limit, the oldest ended batch is forgotten.
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
    /// Opens or creates a folder.
    pub fn open(config: FilesConfig) -> io::Result<Arc<Self>> {
        let folder = config.dir.join(BATCHES);
        create_private_dir(&folder)?;
        let records: Vec<BatchRecord> = read_records(&folder)?;
        let unpublished = records.iter().filter(|record| !record.status.has_ended());
        let referred: BTreeSet<String> = unpublished
            .flat_map(|record| [&record.output_file_id, &record.error_file_id])
            .flatten()
            .cloned()
            .collect();
        let permits = Semaphore::new(config.batch_concurrency);
        let files = Arc::new(FileStore::open(config, &referred)?);
        remove_leftovers(&folder)?;
        let answers = fs::read_dir(&folder)?.map(|entry| {
            let entry = entry?;
            let is_answers = answered_batch(&entry.file_name().to_string_lossy()).is_some();
            Ok(if is_answers {
                entry.metadata()?.len()
            } else {
                0
            })
        });
        files.count(answers.sum::<io::Result<u64>>()?);
        let table = records
            .into_iter()
            .map(|record| (record.id.clone(), Batch::new(record)))
            .collect();
        Ok(Arc::new(Self {
            files,
            table: Mutex::new(table),
            has_work: Notify::new(),
            permits,
            saving: Mutex::default(),
        }))
    }

    fn folder(&self) -> PathBuf {
        self.files.config.dir.join(BATCHES)
    }

    /// Returns the path of a batch's answers before they are published as a file.
    pub fn answers_path(&self, id: &str) -> PathBuf {
        self.folder().join(format!("{id}{ANSWERS}"))
    }

    /// Returns the path of a batch's failed lines before they are published as a file.
    pub fn failures_path(&self, id: &str) -> PathBuf {
        self.folder().join(format!("{id}{FAILURES}"))
    }

    /// Reserves disk space for the records of a batch's end, so that a full disk cannot keep the batch from ending.
    pub fn reserve_end(&self, id: &str) -> io::Result<()> {
        fs::write(self.reserve_path(id), [0; END_BYTES])
    }

    /// Frees the space that `reserve_end` reserved.
    pub fn free_end(&self, id: &str) {
        // The next start removes a remaining file.
        let _ = fs::remove_file(self.reserve_path(id));
    }

    fn reserve_path(&self, id: &str) -> PathBuf {
        self.folder().join(format!("{id}{RESERVE}"))
    }

    /// Adds a batch. This writes to disk.
    pub fn create(&self, record: BatchRecord) -> Result<(), ApiError> {
        let owner = record.owner.clone();
        let is_unfinished =
            |batch: &&Batch| batch.record.owner == owner && !batch.record.status.has_ended();
        let num_unfinished = self.table().values().filter(is_unfinished).count();
        if num_unfinished >= MAX_NUM_UNFINISHED {
            return Err(ApiError::conflict(format!(
                "{MAX_NUM_UNFINISHED} batches have not ended, which is the most that are kept; wait, or cancel \
                 some."
            )));
        }
        write_record(&self.folder(), &record.id, &record)
            .map_err(|error| crate::store::disk::disk_error(&error))?;
        let mut table = self.table();
        table.insert(record.id.clone(), Batch::new(record));
        let own = table.values().filter(|batch| batch.record.owner == owner);
        let ended = own.clone().filter(|batch| batch.record.status.has_ended());
        let oldest = ended.min_by_key(|batch| batch.record.times.created_at);
        if own.count() > MAX_NUM_BATCHES
            && let Some(oldest) = oldest.map(|batch| batch.record.id.clone())
        {
            table.remove(&oldest);
            // If the record stays on disk, the next start reads it, and a later batch removes it.
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

    /// Returns a batch that still reads a file.
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
        let now_s = unix_now_s();
        if let Some(batch) = self.table().get_mut(id)
            && !batch.record.status.has_ended()
            && batch.record.outcome.is_none()
        {
            // A batch that has not begun has nothing to keep, and is cancelled at once.
            let has_begun = batch.is_running || batch.record.status != BatchStatus::Validating;
            batch.record.reach(BatchStatus::Cancelling, now_s);
            if !has_begun {
                batch.record.outcome = Some(BatchStatus::Cancelled);
                batch.record.reach(BatchStatus::Cancelled, now_s);
            }
        }
        self.save(id)
            .map_err(|error| crate::store::disk::disk_error(&error))?;
        if let Some(batch) = self.table().get(id) {
            batch.is_cancelled.send_replace(true);
        }
        self.has_work.notify_one();
        self.find(owner, id)
    }

    /// Changes a batch's record in memory.
    pub fn change(&self, id: &str, change: impl FnOnce(&mut BatchRecord)) -> Option<BatchRecord> {
        let mut table = self.table();
        let batch = table.get_mut(id)?;
        change(&mut batch.record);
        Some(batch.record.clone())
    }

    /// Writes a batch's current record to disk.
    pub fn save(&self, id: &str) -> io::Result<()> {
        let _saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let record = self.table().get(id).map(|batch| batch.record.clone());
        record.map_or(Ok(()), |record| write_record(&self.folder(), id, &record))
    }

    /// Changes a batch's record on disk, and then in memory: callers see nothing that a crash could take back.
    pub fn save_and_change(&self, id: &str, change: impl Fn(&mut BatchRecord)) -> io::Result<()> {
        let _saving = self.saving.lock().unwrap_or_else(PoisonError::into_inner);
        let record = self.table().get(id).map(|batch| batch.record.clone());
        let Some(mut record) = record else {
            return Ok(());
        };
        change(&mut record);
        write_record(&self.folder(), id, &record)?;
        self.change(id, change);
        Ok(())
    }

    /// Returns the next batch to run: the oldest waiting batch whose key may run one more batch.
    pub fn take_job(&self) -> Option<Job> {
        let mut table = self.table();
        let mut num_running: HashMap<Option<String>, usize> = HashMap::new();
        for batch in table.values().filter(|batch| batch.is_running) {
            *num_running.entry(batch.record.owner.clone()).or_default() += 1;
        }
        let waiting = table.values_mut().filter(|batch| {
            let num_running = num_running.get(&batch.record.owner);
            !batch.is_running
                && !batch.record.status.has_ended()
                && num_running.is_none_or(|&num_running| num_running < MAX_NUM_RUNNING)
        });
        let batch = waiting.min_by_key(|batch| batch.record.times.created_at)?;
        batch.is_running = true;
        Some(Job {
            record: batch.record.clone(),
            is_cancelled: batch.is_cancelled.subscribe(),
        })
    }

    /// Marks a batch as not running.
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

/// The subfolder of batches and their unfinished answers.
const BATCHES: &str = "batches";
/// Suffixes of the files of answers and of failed lines, after the id of their batch.
const ANSWERS: &str = ".output.jsonl";
const FAILURES: &str = ".errors.jsonl";
/// Suffix of the file that reserves disk space for the end of a batch.
const RESERVE: &str = ".reserve";
/// Space for the records of a batch and of two files, each written beside its predecessor, and for the folders' growth.
const END_BYTES: usize = 64 << 10;

/// Returns the batch of an output file, by the file's name.
fn answered_batch(name: &str) -> Option<&str> {
    name.strip_suffix(ANSWERS)
        .or_else(|| name.strip_suffix(FAILURES))
}

/// Removes what a crash leaves: half-written records, reserved space, and answers of forgotten batches.
fn remove_leftovers(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_left_over = match answered_batch(&name) {
            Some(id) => !folder.join(format!("{id}.json")).exists(),
            None => name.ends_with(".json.new") || name.ends_with(RESERVE),
        };
        if is_left_over {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::batch_record::{BatchCounts, BatchTimes};

    fn record(id: &str, owner: &str) -> BatchRecord {
        BatchRecord {
            id: id.into(),
            owner: Some(owner.into()),
            endpoint: "/v1/completions".into(),
            input_file_id: "file-1".into(),
            completion_window: "24h".into(),
            metadata: None,
            output_life_s: 3600,
            status: BatchStatus::Validating,
            outcome: None,
            errors: Vec::new(),
            output_file_id: None,
            error_file_id: None,
            times: BatchTimes::default(),
            counts: BatchCounts::default(),
        }
    }

    fn open(name: &str) -> Arc<Batches> {
        let name = format!("corella-table-{}-{name}", std::process::id());
        let config = FilesConfig {
            dir: std::env::temp_dir().join(name),
            max_file_bytes: 100,
            max_files_bytes: 100,
            batch_concurrency: 1,
        };
        Batches::open(config).expect("it opens")
    }

    /// A client may cancel a batch while the server ends the batch. The newest record stays, in either order of writes.
    #[test]
    fn the_newest_record_is_what_stays() {
        let batches = open("newest");
        batches
            .create(record("batch_1", "a"))
            .expect("there is room");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        batches.change("batch_1", |record| record.counts.total += 1);
                        batches.save("batch_1").expect("it can be written");
                    }
                });
            }
        });
        let records: Vec<BatchRecord> = read_records(&batches.folder()).expect("they are there");
        let totals: Vec<usize> = records.iter().map(|record| record.counts.total).collect();
        assert_eq!(totals, [200]);
        fs::remove_dir_all(&batches.files.config.dir).expect("it can be removed");
    }

    #[test]
    fn an_end_that_cannot_be_written_is_not_shown() {
        let batches = open("end");
        batches
            .create(record("batch_1", "a"))
            .expect("there is room");
        let end = |record: &mut BatchRecord| record.reach(BatchStatus::Completed, 5);
        let status = || {
            let record = batches.find(Some("a"), "batch_1");
            record.map(|record| record.status)
        };
        fs::remove_dir_all(batches.folder()).expect("it can be removed");
        assert!(batches.save_and_change("batch_1", end).is_err());
        assert_eq!(status(), Ok(BatchStatus::Validating));
        create_private_dir(&batches.folder()).expect("it can be made");
        batches
            .save_and_change("batch_1", end)
            .expect("it can be written");
        assert_eq!(status(), Ok(BatchStatus::Completed));
        let records: Vec<BatchRecord> = read_records(&batches.folder()).expect("it is there");
        assert_eq!(records[0].times.completed_at, Some(5));
        fs::remove_dir_all(&batches.files.config.dir).expect("it can be removed");
    }

    #[test]
    fn keys_do_not_wait_for_the_batches_of_others() {
        let batches = open("fair");
        for number in 0..MAX_NUM_RUNNING + 1 {
            let record = record(&format!("batch_{number}"), "many");
            batches.create(record).expect("there is room");
        }
        batches
            .create(record("batch_other", "few"))
            .expect("there is room");
        let taken: Vec<String> = std::iter::from_fn(|| batches.take_job())
            .map(|job| job.record.id)
            .collect();
        assert_eq!(taken.len(), MAX_NUM_RUNNING + 1);
        assert!(taken.contains(&"batch_other".to_owned()));
        // A batch that has not begun is cancelled at once, and never begins.
        let own = batches.list(Some("many"));
        let waiting = own.iter().find(|record| !taken.contains(&record.id));
        let waiting = waiting.expect("one of them waits").id.clone();
        let cancelled = batches.cancel(Some("many"), &waiting);
        let status = cancelled.map(|record| record.status);
        assert_eq!(status, Ok(BatchStatus::Cancelled));
        batches.put_back("batch_0");
        let next = batches.take_job().expect("there may be one more");
        assert_eq!(next.record.id, "batch_0");
        fs::remove_dir_all(&batches.files.config.dir).expect("it can be removed");
    }
}
