//! One batch: its lines are checked and answered. Each answer is appended to a file as soon as it is complete, so the
//! files record the progress, even after a crash. Only the status is a separate record, which is replaced as a whole.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;

use crate::clock::unix_now_s;
use crate::local_client::LocalClient;
use crate::model_set::driver::ModelSet;
use crate::store::batch_file::{BatchFileError, Lines, Output};
use crate::store::batch_line::{ResultError, ResultResponse, result_line};
use crate::store::disk::on_disk;
use crate::wire::api_error::ApiError;

use super::input_check::check_lines;
use super::line_answer::{Asker, KeyIsGone, LineAnswer, LineOutcome, ModelPatience, PendingLine};
use crate::store::batch_record::{BatchError, BatchRecord, BatchStatus, disk_failure, failure};
use crate::store::batch_table::{Batches, Job};

/// A batch reads no further line while its unanswered lines take this many bytes or more.
const MAX_WAITING_BYTES: usize = 16 << 20;

pub async fn run_job(models: ModelSet, batches: Arc<Batches>, job: Job) {
    // Between two lines, the batch is still a use of the server.
    let _in_use = models.parts().use_count.uses.begin();
    let id = job.record.id.clone();
    let run = Run {
        models,
        batches: batches.clone(),
        id: id.clone(),
    };
    if let Err(errors) = run.run(job).await {
        tracing::warn!(batch = id, reason = errors[0].message, "a batch has failed");
        run.end_as_failed(errors).await;
    }
    batches.put_back(&id);
}

/// A batch in progress.
pub(super) struct Run {
    pub(super) models: ModelSet,
    pub(super) batches: Arc<Batches>,
    pub(super) id: String,
}

/// Why a batch stops answering lines.
enum End {
    /// All lines are answered, or the batch ends early.
    Outcome(BatchStatus),
    /// The server ends, and continues the batch after its next start.
    Interrupted,
}

impl Run {
    /// `Err` ends the batch as failed.
    async fn run(&self, job: Job) -> Result<(), Vec<BatchError>> {
        let Job {
            record,
            mut is_cancelled,
        } = job;
        if record.outcome.is_none() {
            let files = &self.batches.files;
            if !files.is_kept(&record.input_file_id) {
                return Err(failure("input_file", "The input file is no longer there."));
            }
            let input = files.path_of(&record.input_file_id);
            let asker = Asker {
                models: self.models.clone(),
                batches: self.batches.clone(),
                client: LocalClient::for_batch(self.models.clone()),
                owner: record.owner.as_deref().map(Arc::from),
                patience: Arc::new(ModelPatience::default()),
            };
            asker.account().map_err(key_is_gone)?;
            let ids = self.check(&record, input.clone()).await?;
            let mut answers = self.open_answers(ids).await?;
            if record.status == BatchStatus::Validating {
                self.reach(BatchStatus::InProgress).await?;
            }
            let early_end = async {
                tokio::select! {
                    biased;
                    _ = is_cancelled.wait_for(|&is_cancelled| is_cancelled) => {
                        BatchStatus::Cancelled
                    }
                    () = sleep_until(record.times.expires_at) => BatchStatus::Expired,
                }
            };
            let early_end = std::pin::pin!(early_end);
            let end = self
                .answer_lines(&asker, &input, &mut answers, early_end)
                .await?;
            let End::Outcome(outcome) = end else {
                return Ok(());
            };
            if outcome == BatchStatus::Expired {
                self.expire_lines(&input, &mut answers).await?;
            }
            self.decide(outcome).await?;
        }
        self.publish().await
    }

    /// Checks all lines before the first is answered, so that a mistake costs no computation. Returns the lines' ids.
    async fn check(
        &self,
        record: &BatchRecord,
        input: PathBuf,
    ) -> Result<HashSet<String>, Vec<BatchError>> {
        let endpoint = record.endpoint.clone();
        let max_line_bytes = self.models.parts().config.max_body_bytes;
        let checked = spawn_blocking(move || check_lines(&input, &endpoint, max_line_bytes));
        let checked = checked.await.map_err(disk_failure)?;
        let ids = checked?;
        self.batches
            .change(&self.id, |record| record.counts.total = ids.len());
        Ok(ids)
    }

    /// Opens the files of answers and failures, and counts the lines that earlier runs wrote.
    async fn open_answers(&self, ids: HashSet<String>) -> Result<Answers, Vec<BatchError>> {
        let paths = (
            self.batches.answers_path(&self.id),
            self.batches.failures_path(&self.id),
        );
        let batches = self.batches.clone();
        let id = self.id.clone();
        let opened = spawn_blocking(move || {
            let files = &batches.files;
            let open = |path: &Path| {
                // The folder's total already includes earlier answers.
                let num_bytes = fs::metadata(path).map_or(0, |file| file.len());
                files.give_back(num_bytes);
                let output = Output::open(path, &ids)?;
                let num_bytes = fs::metadata(path).map_or(0, |file| file.len());
                files.count(num_bytes);
                Ok::<_, BatchFileError>(output)
            };
            let reserved = batches.reserve_end(&id);
            reserved.map_err(|error| {
                BatchFileError::Io("keeping disk for the end of the batch".to_owned(), error)
            })?;
            Ok::<_, BatchFileError>((open(&paths.0)?, open(&paths.1)?))
        });
        let opened = opened.await.map_err(disk_failure)?;
        let (answers, failures) = opened.map_err(disk_failure)?;
        let (num_completed, num_failed) = (answers.answered.len(), failures.answered.len());
        self.batches.change(&self.id, |record| {
            record.counts.completed = num_completed;
            record.counts.failed = num_failed;
        });
        let mut answered = answers.answered;
        answered.extend(failures.answered);
        Ok(Answers {
            answers: Arc::new(answers.file),
            failures: Arc::new(failures.file),
            answered,
        })
    }

    async fn answer_lines(
        &self,
        asker: &Asker,
        input: &Path,
        answers: &mut Answers,
        mut early_end: Pin<&mut impl Future<Output = BatchStatus>>,
    ) -> Result<End, Vec<BatchError>> {
        let max_num_running = self.batches.files.config.batch_concurrency;
        let lines = Lines::open(input, self.models.parts().config.max_body_bytes);
        let mut lines = Some(lines.map_err(disk_failure)?);
        let mut running: JoinSet<LineAnswer> = JoinSet::new();
        let mut num_waiting_bytes = 0;
        let mut is_interrupted = false;
        loop {
            while running.len() < max_num_running
                && num_waiting_bytes < MAX_WAITING_BYTES
                && !is_interrupted
                && let Some(rest) = lines.take()
            {
                let (rest, line) = next_line(rest).await?;
                let Some(line) = line else {
                    break;
                };
                lines = Some(rest);
                if !answers.answered.contains(&line.custom_id) {
                    num_waiting_bytes += line.num_bytes();
                    running.spawn(asker.clone().answer(line));
                }
            }
            // An answer that is taken here is written even if the batch ends meanwhile.
            let answer = tokio::select! {
                outcome = &mut early_end => return Ok(End::Outcome(outcome)),
                answer = running.join_next() => answer,
                () = self.models.parts().draining(), if !is_interrupted => {
                    is_interrupted = true;
                    continue;
                }
            };
            let answer = match answer {
                None if is_interrupted => return Ok(End::Interrupted),
                None => return Ok(End::Outcome(BatchStatus::Completed)),
                Some(Ok(answer)) => answer,
                Some(Err(error)) => {
                    return Err(failure("server_error", format!("A line failed: {error}")));
                }
            };
            num_waiting_bytes -= answer.num_bytes;
            match answer.outcome {
                LineOutcome::Answered(result) => {
                    self.keep(answers, answer.custom_id, &result).await?;
                }
                LineOutcome::Later => is_interrupted = true,
                LineOutcome::KeyIsGone => return Err(key_is_gone(KeyIsGone)),
            }
        }
    }

    /// Writes a line's result at once, so that it is not computed again after a crash.
    async fn keep(
        &self,
        answers: &mut Answers,
        custom_id: String,
        result: &Result<ResultResponse, ResultError>,
    ) -> Result<(), Vec<BatchError>> {
        let line = result_line(&custom_id, result, answers.answered.len());
        let is_answer = result
            .as_ref()
            .is_ok_and(|response| response.status_code == 200);
        let file = match is_answer {
            true => answers.answers.clone(),
            false => answers.failures.clone(),
        };
        let files = self.batches.files.clone();
        files.reserve(line.len() as u64).map_err(no_room)?;
        let written = on_disk(move || {
            let num_bytes_before = file.metadata()?.len();
            (&*file).write_all(line.as_bytes()).inspect_err(|_| {
                // A part of a line is not an answer. If the part cannot be removed, the next reader of the file detects
                // it.
                let _ = file.set_len(num_bytes_before);
                files.give_back(line.len() as u64);
            })
        });
        let written = written.await;
        written.map_err(|error| failure("disk_error", error.message()))?;
        answers.answered.insert(custom_id);
        self.batches.change(&self.id, |record| match is_answer {
            true => record.counts.completed += 1,
            false => record.counts.failed += 1,
        });
        Ok(())
    }

    /// Writes an error for each line that was not answered before the batch expired.
    async fn expire_lines(
        &self,
        input: &Path,
        answers: &mut Answers,
    ) -> Result<(), Vec<BatchError>> {
        let lines = Lines::open(input, self.models.parts().config.max_body_bytes);
        let mut lines = lines.map_err(disk_failure)?;
        loop {
            let (rest, line) = next_line(lines).await?;
            let Some(line) = line else {
                return Ok(());
            };
            lines = rest;
            if !answers.answered.contains(&line.custom_id) {
                let error = ResultError {
                    code: "batch_expired",
                    message: "the batch's completion_window ended before this request was answered"
                        .to_owned(),
                };
                self.keep(answers, line.custom_id, &Err(error)).await?;
            }
        }
    }

    async fn reach(&self, status: BatchStatus) -> Result<(), Vec<BatchError>> {
        self.change_and_save(|record| {
            // A batch that is being cancelled at this moment keeps that status.
            if record.status != BatchStatus::Cancelling {
                record.reach(status, unix_now_s());
            }
        })
        .await
    }

    pub(super) async fn change_and_save(
        &self,
        change: impl FnOnce(&mut BatchRecord),
    ) -> Result<(), Vec<BatchError>> {
        self.batches.change(&self.id, change);
        let (batches, id) = (self.batches.clone(), self.id.clone());
        let saved = on_disk(move || batches.save(&id)).await;
        saved.map_err(|error| failure("disk_error", error.message()))
    }
}

/// The files of answers and of failures, and the ids of the lines in both.
struct Answers {
    answers: Arc<File>,
    failures: Arc<File>,
    answered: HashSet<String>,
}

fn no_room(error: ApiError) -> Vec<BatchError> {
    failure("storage_full", error.message())
}

/// Sleeps until a time in seconds since 1970.
async fn sleep_until(unix_s: u64) {
    loop {
        match unix_s.saturating_sub(unix_now_s()) {
            0 => return,
            // Short sleeps notice when the clock is set.
            seconds => sleep(Duration::from_secs(seconds.min(60))).await,
        }
    }
}

fn key_is_gone(_: KeyIsGone) -> Vec<BatchError> {
    let message = "The API key that made this batch is no longer valid.";
    failure("invalid_api_key", message)
}

/// A line may have several megabytes, so it is read on a thread that may wait for the disk.
async fn next_line(mut lines: Lines) -> Result<(Lines, Option<PendingLine>), Vec<BatchError>> {
    let read = spawn_blocking(move || {
        let line = lines.next_request();
        (lines, line.map(|line| line.map(PendingLine::new)))
    });
    let (lines, line) = read.await.map_err(disk_failure)?;
    Ok((lines, line.map_err(disk_failure)?))
}
