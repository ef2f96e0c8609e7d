//! The end of a batch: its answers become files, even if the disk is full.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::sleep;

use crate::clock::unix_now_s;
use crate::store::disk::on_disk;
use crate::store::file_store::{FileRecord, new_id, remove_if_there};

use super::job::Run;
use crate::store::batch_record::{BatchError, BatchRecord, BatchStatus, failure};
use crate::store::batch_table::Batches;

/// Limits the attempts to write a failed batch's end. After the last attempt, the end stays in memory only.
const NUM_DISK_TRIES: usize = 3;
const DISK_RETRY: Duration = Duration::from_secs(5);

/// An output file of a batch, and the path of its lines before they are published.
struct Output {
    id: String,
    lines: PathBuf,
    kind: &'static str,
}

impl Run {
    /// Records the batch's outcome and the names of its files. After that, no line is answered.
    pub(super) async fn decide(&self, outcome: BatchStatus) -> Result<(), Vec<BatchError>> {
        let [answers, failures] = self.new_file_ids();
        self.change_and_save(|record| {
            record.output_file_id = answers;
            record.error_file_id = failures;
            record.outcome = Some(outcome);
            if outcome != BatchStatus::Cancelled {
                record.reach(BatchStatus::Finalizing, unix_now_s());
            }
        })
        .await
    }

    /// Makes files of the answers, and ends the batch. After a crash, the next call continues where this one stopped.
    pub(super) async fn publish(&self) -> Result<(), Vec<BatchError>> {
        let Some(record) = self.batches.change(&self.id, |_| {}) else {
            return Ok(());
        };
        let batches = self.batches.clone();
        let published = on_disk(move || publish(&batches, &record)).await;
        published.map_err(|error| failure("disk_error", error.message()))?;
        let (batches, id, now_s) = (self.batches.clone(), self.id.clone(), unix_now_s());
        let saved = on_disk(move || {
            batches.save_and_change(&id, |record| {
                let outcome = record.outcome.unwrap_or(BatchStatus::Failed);
                record.reach(outcome, now_s);
            })
        });
        let saved = saved.await;
        saved.map_err(|error| failure("disk_error", error.message()))
    }

    /// Ends the batch as failed. The answers written so far become files, too.
    ///
    /// If the disk refuses this record, too, callers see the end and the files only as long as the server runs. The
    /// next start of the server finds an unfinished batch and continues it.
    pub(super) async fn end_as_failed(&self, errors: Vec<BatchError>) {
        self.batches.free_end(&self.id);
        for num_tried in 1..=NUM_DISK_TRIES {
            if self.write_failure(errors.clone()).await.is_ok() {
                return;
            }
            if num_tried < NUM_DISK_TRIES {
                tokio::select! {
                    () = sleep(DISK_RETRY) => {}
                    () = self.models.parts().draining() => {}
                }
            }
        }
        tracing::error!(
            batch = self.id,
            "a batch's end cannot be written; the batch continues after the server's next start"
        );
        let Some(record) = self.batches.change(&self.id, |_| {}) else {
            return;
        };
        let batches = self.batches.clone();
        let shown = on_disk(move || Ok(show(&batches, &record))).await;
        let is_shown = |id: &String| shown.as_ref().is_ok_and(|shown| shown.contains(id));
        self.batches.change(&self.id, |record| {
            record.output_file_id.take_if(|id| !is_shown(id));
            record.error_file_id.take_if(|id| !is_shown(id));
            record.reach(BatchStatus::Failed, unix_now_s());
        });
    }

    async fn write_failure(&self, errors: Vec<BatchError>) -> Result<(), Vec<BatchError>> {
        let [answers, failures] = self.new_file_ids();
        self.change_and_save(|record| {
            record.errors = errors;
            // If there is an outcome, `decide` or an earlier attempt has named the files.
            if record.outcome.is_none() {
                record.output_file_id = answers;
                record.error_file_id = failures;
            }
            record.outcome = Some(BatchStatus::Failed);
        })
        .await?;
        self.publish().await
    }

    /// Returns new ids for the files of answers and of failures. A file without lines gets no id.
    fn new_file_ids(&self) -> [Option<String>; 2] {
        let paths = [
            self.batches.answers_path(&self.id),
            self.batches.failures_path(&self.id),
        ];
        paths.map(|path| {
            let num_bytes = fs::metadata(path).map_or(0, |file| file.len());
            (num_bytes > 0).then(|| new_id("file-"))
        })
    }
}

fn outputs(batches: &Batches, record: &BatchRecord) -> Vec<Output> {
    let all = [
        (
            &record.output_file_id,
            batches.answers_path(&record.id),
            "output",
        ),
        (
            &record.error_file_id,
            batches.failures_path(&record.id),
            "errors",
        ),
    ];
    let output = |(id, lines, kind): (&Option<String>, _, _)| {
        id.clone().map(|id| Output { id, lines, kind })
    };
    all.into_iter().filter_map(output).collect()
}

impl Output {
    fn record(&self, batch: &BatchRecord, num_bytes: u64) -> FileRecord {
        let now_s = unix_now_s();
        FileRecord {
            id: self.id.clone(),
            owner: batch.owner.clone(),
            bytes: num_bytes,
            created_at: now_s,
            expires_at: now_s + batch.output_life_s,
            filename: format!("{}_{}.jsonl", batch.id, self.kind),
            purpose: "batch_output".to_owned(),
        }
    }
}

/// Turns the lines of a batch's answers and failures into files with records, and removes the batch's other files.
fn publish(batches: &Batches, record: &BatchRecord) -> io::Result<()> {
    for output in outputs(batches, record) {
        let file = batches.files.path_of(&output.id);
        if output.lines.exists() {
            File::open(&output.lines)?.sync_all()?;
            fs::rename(&output.lines, &file)?;
        }
        let num_bytes = fs::metadata(&file)?.len();
        batches.files.publish(output.record(record, num_bytes))?;
    }
    // A file that is still at one of these paths is empty, or `show` has linked it under its id.
    remove_if_there(&batches.answers_path(&record.id))?;
    remove_if_there(&batches.failures_path(&record.id))?;
    batches.free_end(&record.id);
    Ok(())
}

/// Links the lines of a batch's answers and failures as files, keeps the files' records in memory only, and returns the
/// files' ids. The next start of the server still finds the lines at their old paths.
fn show(batches: &Batches, record: &BatchRecord) -> Vec<String> {
    let show_one = |output: Output| -> io::Result<String> {
        let file = batches.files.path_of(&output.id);
        if !file.exists() {
            fs::hard_link(&output.lines, &file)?;
        }
        let num_bytes = fs::metadata(&file)?.len();
        batches.files.show(output.record(record, num_bytes));
        Ok(output.id)
    };
    let shown = outputs(batches, record).into_iter().map(show_one);
    shown.filter_map(Result::ok).collect()
}
