//! One batch: its lines are checked, answered, and written as they are answered.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::sleep;

use crate::api_error::ApiError;
use crate::api_key::Account;
use crate::batch_file::{BatchFileError, Lines, Output};
use crate::batch_line::{RequestLine, ResultError, ResultResponse, ask, result_line};
use crate::files::{FileRecord, new_id, on_disk};
use crate::local_client::LocalClient;
use crate::server_state::{ServerState, unix_now_s};

use super::record::{BatchError, BatchRecord, BatchStatus};
use super::table::{Batches, Job};

/// Most lines of a batch, as in OpenAI's API.
pub const MAX_NUM_LINES: usize = 50_000;
/// Ids of lines are kept in memory.
const MAX_ID_BYTES: usize = 512;
/// Mistakes of an input file that are told of.
const MAX_NUM_ERRORS: usize = 20;

pub async fn run_job(state: Arc<ServerState>, batches: Arc<Batches>, job: Job) {
    let id = job.record.id.clone();
    let run = Run {
        state,
        batches: batches.clone(),
        id: id.clone(),
    };
    if let Err(errors) = run.run(job).await {
        tracing::warn!(batch = id, reason = errors[0].message, "a batch has failed");
        if run.end_as_failed(errors).await.is_err() {
            tracing::error!(batch = id, "a batch's end cannot be written");
        }
    }
    batches.put_back(&id);
}

struct Run {
    state: Arc<ServerState>,
    batches: Arc<Batches>,
    id: String,
}

/// Why the lines of a batch are no longer answered.
enum End {
    /// All have been, or the batch ends early.
    Outcome(BatchStatus),
    /// The server ends, and goes on with the batch when it is started again.
    Interrupted,
}

/// What became of a line; `None` if the server ended before it was known.
type Answer = (String, Option<Result<ResultResponse, ResultError>>);

fn failure(code: &str, message: impl Into<String>) -> Vec<BatchError> {
    vec![BatchError {
        code: code.to_owned(),
        message: message.into(),
        param: None,
        line: None,
    }]
}

fn disk_failure(error: impl std::fmt::Display) -> Vec<BatchError> {
    failure(
        "disk_error",
        format!("The server could not use its disk: {error}"),
    )
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
            let input = files.find(record.owner.as_deref(), &record.input_file_id);
            let input = input.map_err(|error| failure("input_file", error.message()))?;
            let input = files.path_of(&input.id);
            let account = self.account(&record)?;
            let ids = self.check(&record, input.clone()).await?;
            let mut answers = self.open_answers(ids).await?;
            if record.status == BatchStatus::Validating {
                self.reach(BatchStatus::InProgress).await?;
            }
            let client = LocalClient::for_batch(self.state.clone(), account);
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
            let end = { self.answer_lines(&client, &input, &mut answers, early_end) }.await?;
            let End::Outcome(outcome) = end else {
                return Ok(());
            };
            if outcome == BatchStatus::Expired {
                self.expire_lines(&input, &mut answers).await?;
            }
            self.decide(outcome, &answers).await?;
        }
        self.publish().await
    }

    /// Whoever pays for the tokens.
    fn account(&self, record: &BatchRecord) -> Result<Option<Arc<Account>>, Vec<BatchError>> {
        let Some(owner) = &record.owner else {
            return Ok(None);
        };
        let account = self.state.api_keys.named(owner);
        match account {
            None if self.state.api_keys.are_required() => {
                let message = "The API key that made this batch is no longer valid.";
                Err(failure("invalid_api_key", message))
            }
            account => Ok(account),
        }
    }

    /// The ids of all lines. Nothing is computed for a file with a mistake in it.
    async fn check(
        &self,
        record: &BatchRecord,
        input: PathBuf,
    ) -> Result<HashSet<String>, Vec<BatchError>> {
        let endpoint = record.endpoint.clone();
        let max_line_bytes = self.state.config.max_body_bytes;
        let checked = spawn_blocking(move || check_lines(&input, &endpoint, max_line_bytes));
        let checked = checked.await.map_err(disk_failure)?;
        let ids = checked?;
        self.batches
            .change(&self.id, |record| record.counts.total = ids.len());
        Ok(ids)
    }

    /// Opens what has been answered before.
    async fn open_answers(&self, ids: HashSet<String>) -> Result<Answers, Vec<BatchError>> {
        let paths = (
            self.batches.answers_path(&self.id),
            self.batches.failures_path(&self.id),
        );
        let opened = spawn_blocking(move || {
            let answers = Output::open(&paths.0, &ids)?;
            let failures = Output::open(&paths.1, &ids)?;
            Ok::<_, BatchFileError>((answers, failures))
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
        let answers = Answers {
            answers: Arc::new(answers.file),
            failures: Arc::new(failures.file),
            answered,
        };
        let num_bytes = answers.num_bytes().map_err(disk_failure)?;
        // They were counted when they were written, before the server was started again.
        { self.batches.files.reserve(num_bytes.0 + num_bytes.1) }.map_err(no_room)?;
        Ok(answers)
    }

    async fn answer_lines(
        &self,
        client: &LocalClient,
        input: &Path,
        answers: &mut Answers,
        mut early_end: Pin<&mut impl Future<Output = BatchStatus>>,
    ) -> Result<End, Vec<BatchError>> {
        let max_num_running = self.batches.files.config.batch_concurrency;
        let lines = Lines::open(input, self.state.config.max_body_bytes);
        let mut lines = Some(lines.map_err(disk_failure)?);
        let mut running: JoinSet<Answer> = JoinSet::new();
        let mut is_interrupted = false;
        loop {
            while running.len() < max_num_running
                && !is_interrupted
                && let Some(rest) = lines.take()
            {
                let (rest, request) = next_request(rest).await?;
                let Some(request) = request else {
                    break;
                };
                lines = Some(rest);
                if !answers.answered.contains(&request.custom_id) {
                    let (state, batches) = (self.state.clone(), self.batches.clone());
                    running.spawn(answer(state, batches, client.clone(), request));
                }
            }
            // An answer that is there is always written, whatever else happens.
            tokio::select! {
                outcome = &mut early_end => return Ok(End::Outcome(outcome)),
                answer = running.join_next() => match answer {
                    None if is_interrupted => return Ok(End::Interrupted),
                    None => return Ok(End::Outcome(BatchStatus::Completed)),
                    Some(Ok((_, None))) => is_interrupted = true,
                    Some(Ok((custom_id, Some(result)))) => {
                        self.keep(answers, custom_id, &result).await?;
                    }
                    Some(Err(error)) => {
                        return Err(failure("server_error", format!("A line failed: {error}")));
                    }
                },
                () = self.state.draining(), if !is_interrupted => is_interrupted = true,
            }
        }
    }

    /// Writes what became of a line at once, so that it is not computed again after a crash.
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
        self.batches
            .files
            .reserve(line.len() as u64)
            .map_err(no_room)?;
        let written = on_disk(move || (&*file).write_all(line.as_bytes())).await;
        written.map_err(|error| failure("disk_error", error.message()))?;
        answers.answered.insert(custom_id);
        self.batches.change(&self.id, |record| match is_answer {
            true => record.counts.completed += 1,
            false => record.counts.failed += 1,
        });
        Ok(())
    }

    /// Writes an error for each line that the batch's time was too short for.
    async fn expire_lines(
        &self,
        input: &Path,
        answers: &mut Answers,
    ) -> Result<(), Vec<BatchError>> {
        let lines = Lines::open(input, self.state.config.max_body_bytes);
        let mut lines = lines.map_err(disk_failure)?;
        loop {
            let (rest, request) = next_request(lines).await?;
            let Some(request) = request else {
                return Ok(());
            };
            lines = rest;
            if !answers.answered.contains(&request.custom_id) {
                let error = ResultError {
                    code: "batch_expired",
                    message: "the batch's completion_window ended before this request was answered"
                        .to_owned(),
                };
                self.keep(answers, request.custom_id, &Err(error)).await?;
            }
        }
    }

    async fn reach(&self, status: BatchStatus) -> Result<(), Vec<BatchError>> {
        self.change_and_save(|record| {
            // A batch that is being cancelled at this moment stays so.
            if record.status != BatchStatus::Cancelling {
                record.reach(status, unix_now_s());
            }
        })
        .await
    }

    async fn change_and_save(
        &self,
        change: impl FnOnce(&mut BatchRecord),
    ) -> Result<(), Vec<BatchError>> {
        let Some(record) = self.batches.change(&self.id, change) else {
            return Ok(());
        };
        let batches = self.batches.clone();
        let saved = on_disk(move || batches.save(&record)).await;
        saved.map_err(|error| failure("disk_error", error.message()))
    }

    /// Notes how the batch ends and what its files are called. From here on, no line is answered.
    async fn decide(&self, outcome: BatchStatus, answers: &Answers) -> Result<(), Vec<BatchError>> {
        let (answer_bytes, failure_bytes) = answers.num_bytes().map_err(disk_failure)?;
        self.change_and_save(|record| {
            let file = |num_bytes: u64| (num_bytes > 0).then(|| new_id("file-"));
            record.output_file_id = file(answer_bytes);
            record.error_file_id = file(failure_bytes);
            record.outcome = Some(outcome);
            if outcome != BatchStatus::Cancelled {
                record.reach(BatchStatus::Finalizing, unix_now_s());
            }
        })
        .await
    }

    /// Makes files of the answers, and ends the batch. After a crash it begins where it was.
    async fn publish(&self) -> Result<(), Vec<BatchError>> {
        let Some(record) = self.batches.change(&self.id, |_| {}) else {
            return Ok(());
        };
        let batches = self.batches.clone();
        let publish = move || -> std::io::Result<()> {
            for (id, path, kind) in [
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
            ] {
                let Some(id) = id else {
                    crate::files::remove_if_there(&path)?;
                    continue;
                };
                let file = batches.files.path_of(id);
                if path.exists() {
                    File::open(&path)?.sync_all()?;
                    fs::rename(&path, &file)?;
                }
                let now_s = unix_now_s();
                batches.files.publish(FileRecord {
                    id: id.clone(),
                    owner: record.owner.clone(),
                    bytes: fs::metadata(&file)?.len(),
                    created_at: now_s,
                    expires_at: now_s + record.output_life_s,
                    filename: format!("{}_{kind}.jsonl", record.id),
                    purpose: "batch_output".to_owned(),
                })?;
            }
            Ok(())
        };
        let published = on_disk(publish).await;
        published.map_err(|error| failure("disk_error", error.message()))?;
        self.change_and_save(|record| {
            let outcome = record.outcome.unwrap_or(BatchStatus::Failed);
            record.reach(outcome, unix_now_s());
        })
        .await
    }

    /// What has been answered until then becomes files, too.
    async fn end_as_failed(&self, errors: Vec<BatchError>) -> Result<(), Vec<BatchError>> {
        let paths = [
            self.batches.answers_path(&self.id),
            self.batches.failures_path(&self.id),
        ];
        let [answer_bytes, failure_bytes] =
            paths.map(|path| fs::metadata(path).map_or(0, |file| file.len()));
        self.change_and_save(|record| {
            let file = |num_bytes: u64| (num_bytes > 0).then(|| new_id("file-"));
            record.errors = errors;
            if record.outcome.is_none() {
                record.output_file_id = file(answer_bytes);
                record.error_file_id = file(failure_bytes);
            }
            record.outcome = Some(BatchStatus::Failed);
        })
        .await?;
        self.publish().await
    }
}

/// Files of lines that have an answer, and their ids.
struct Answers {
    answers: Arc<File>,
    failures: Arc<File>,
    answered: HashSet<String>,
}

impl Answers {
    fn num_bytes(&self) -> std::io::Result<(u64, u64)> {
        Ok((
            self.answers.metadata()?.len(),
            self.failures.metadata()?.len(),
        ))
    }
}

fn no_room(error: ApiError) -> Vec<BatchError> {
    failure("storage_full", error.message())
}

/// Ends at a time in seconds since 1970.
async fn sleep_until(unix_s: u64) {
    loop {
        match unix_s.saturating_sub(unix_now_s()) {
            0 => return,
            // The clock may be set meanwhile.
            seconds => sleep(Duration::from_secs(seconds.min(60))).await,
        }
    }
}

/// A line may have several megabytes, so it is read where the disk may be waited for.
async fn next_request(mut lines: Lines) -> Result<(Lines, Option<RequestLine>), Vec<BatchError>> {
    let read = spawn_blocking(move || {
        let request = lines.next_request();
        (lines, request)
    });
    let (lines, request) = read.await.map_err(disk_failure)?;
    Ok((lines, request.map_err(disk_failure)?))
}

fn check_lines(
    input: &Path,
    endpoint: &str,
    max_line_bytes: usize,
) -> Result<HashSet<String>, Vec<BatchError>> {
    let mut lines = Lines::open(input, max_line_bytes).map_err(disk_failure)?;
    let mut ids = HashSet::new();
    let mut errors = Vec::new();
    while errors.len() < MAX_NUM_ERRORS {
        let request = match lines.next_request() {
            Ok(None) => break,
            Ok(Some(request)) => request,
            Err(BatchFileError::Line { number, reason, .. }) => {
                // A line that is too long has not been read to its end.
                let is_readable = !reason.contains("MiB");
                errors.push(BatchError {
                    code: "invalid_line".to_owned(),
                    message: reason,
                    param: None,
                    line: Some(number),
                });
                if is_readable {
                    continue;
                }
                break;
            }
            Err(error) => return Err(disk_failure(error)),
        };
        let mut refuse = |code: &str, message: String, param: &str| {
            errors.push(BatchError {
                code: code.to_owned(),
                message,
                param: Some(param.to_owned()),
                line: Some(lines.number()),
            });
        };
        if request.url != endpoint {
            let message = format!("`url` must be {endpoint}, the endpoint of the batch");
            refuse("mismatched_endpoint", message, "url");
        }
        if request.custom_id.len() > MAX_ID_BYTES {
            let message = format!("`custom_id` must have at most {MAX_ID_BYTES} bytes");
            refuse("invalid_line", message, "custom_id");
        }
        if let Some(repeated) = ids.replace(request.custom_id) {
            let message = format!("an earlier line has the `custom_id` `{repeated}` too");
            refuse("duplicate_custom_id", message, "custom_id");
        }
        if ids.len() > MAX_NUM_LINES {
            let message = format!("a batch has at most {MAX_NUM_LINES} requests");
            refuse("too_many_requests", message, "input_file_id");
            break;
        }
    }
    match (errors.is_empty(), ids.is_empty()) {
        (true, false) => Ok(ids),
        (true, true) => Err(failure("empty_file", "The input file has no requests.")),
        (false, _) => Err(errors),
    }
}

/// Asks again and again while the server is too busy, and leaves a line for later if the server ends.
async fn answer(
    state: Arc<ServerState>,
    batches: Arc<Batches>,
    client: LocalClient,
    request: RequestLine,
) -> Answer {
    const RETRY: Duration = Duration::from_secs(1);
    let custom_id = request.custom_id.clone();
    if let Some(error) = request.refusal() {
        return (custom_id, Some(Err(error)));
    }
    let path = request.url.clone();
    let body = serde_json::Value::Object(request.body)
        .to_string()
        .into_bytes();
    loop {
        // A line that waits for the limit of its key does not keep other batches waiting.
        let Ok(permit) = batches.permits.clone().acquire_owned().await else {
            return (custom_id, None);
        };
        wait_for_others(&state).await;
        if state.is_draining() {
            return (custom_id, None);
        }
        let result = ask(&client, &path, body.clone()).await;
        drop(permit);
        match &result {
            Ok(response) if response.is_queue_full() || response.is_rate_limited() => {}
            Ok(response) if response.status_code == 503 => {}
            // An answer that broke off because the server ends is none.
            Err(_) if state.is_draining() => return (custom_id, None),
            _ => return (custom_id, Some(result)),
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            () = state.draining() => return (custom_id, None),
        }
    }
}

/// Requests of clients that wait go first, whatever the scheduling policy.
async fn wait_for_others(state: &ServerState) {
    const PERIOD: Duration = Duration::from_millis(10);
    while state.engine.stats().scheduler.num_waiting > 0 && !state.is_draining() {
        sleep(PERIOD).await;
    }
}
