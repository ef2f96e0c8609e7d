//! `corella batch`: answers the requests of a file, without a server.

mod progress;

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use corella_engine::EngineState;
use corella_server::batch::{
    BatchFileError, Lines, Output, RequestLine, ResultError, ResultResponse, check_input,
    result_line,
};
use corella_server::shutdown_signal;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::Error;
use crate::arguments::config::Batch;
use crate::client::patient_client::PatientClient;
use crate::serve::local_server::{LocalServer, MAX_BODY_BYTES};
use progress::Progress;

/// The exit status after SIGINT, by the convention of shells.
const INTERRUPTED: i32 = 130;

/// Returns the exit status.
pub fn run(config: Batch) -> Result<i32, Error> {
    let shown = config.output.display().to_string();
    if is_same_file(&config.input, &config.output) {
        return Err(Error::Config(format!(
            "--output {shown} is the input file; choose another file"
        )));
    }
    let ids = check_input(&config.input, MAX_BODY_BYTES)?;
    let output = Output::open(&config.output, &ids)?;
    let (num_requests, num_before) = (ids.len(), output.answered.len());
    drop(ids);
    if num_before == num_requests {
        eprintln!("{shown} has the answers to all {num_requests} requests");
        return Ok(0);
    }
    if num_before > 0 {
        eprintln!("{shown} has {num_before} of {num_requests} answers; resuming");
    }
    let server = LocalServer::load(config.llm)?;
    eprintln!("{}", server.summary);
    let io_error = |what: &'static str| move |error| Error::Io(what.to_owned(), error);
    let runtime = Runtime::new().map_err(io_error("starting the batch"))?;
    let run = Run {
        lines: Lines::open(&config.input, MAX_BODY_BYTES)?,
        answered: output.answered,
        file: output.file,
        shown: &shown,
        progress: Progress::new(server.engine.clone(), num_before, num_requests),
        server: &server,
        max_concurrency: config.max_concurrency,
    };
    let done = runtime.block_on(run.answer_all());
    // Interrupted requests may still be tokenised.
    runtime.shutdown_timeout(Duration::from_secs(1));
    server.engine.shutdown();
    done
}

impl From<BatchFileError> for Error {
    fn from(error: BatchFileError) -> Self {
        match error {
            BatchFileError::Io(what, error) => Self::Io(what, error),
            line @ BatchFileError::Line { .. } => Self::Config(line.to_string()),
        }
    }
}

fn is_same_file(a: &Path, b: &Path) -> bool {
    match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    }
}

struct Run<'a> {
    lines: Lines,
    answered: HashSet<String>,
    file: File,
    shown: &'a str,
    progress: Progress,
    server: &'a LocalServer,
    max_concurrency: usize,
}

impl Run<'_> {
    async fn answer_all(mut self) -> Result<i32, Error> {
        const REFRESH: Duration = Duration::from_millis(200);
        let io_error = |what: String| move |error| Error::Io(what, error);
        let mut interrupt =
            shutdown_signal().map_err(io_error("installing signal handlers".to_owned()))?;
        let mut refresh = interval(REFRESH);
        refresh.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut running = JoinSet::new();
        let mut all_sent = false;
        loop {
            while !all_sent && running.len() < self.max_concurrency {
                match self.lines.next_request()? {
                    None => all_sent = true,
                    Some(request) if self.answered.contains(&request.custom_id) => {}
                    Some(request) => {
                        // A request's number is its line's, so that a resumed batch draws the same tokens.
                        let number = self.lines.number() as u64;
                        let client = self.server.client.with_number(number);
                        running.spawn(answer(client, request));
                    }
                }
            }
            tokio::select! {
                ended = running.join_next() => match ended {
                    None => break,
                    Some(Err(error)) => {
                        return Err(Error::Config(format!("a request failed: {error}")));
                    }
                    Some(Ok(answer)) => self.keep(answer)?,
                },
                () = interrupt.requested() => {
                    let Self { progress, shown, .. } = self;
                    let summary = progress.finish();
                    eprintln!("{summary}");
                    eprintln!("interrupted; run the same command again to resume from {shown}");
                    return Ok(INTERRUPTED);
                }
                _ = refresh.tick() => self.progress.show(running.len()),
            }
        }
        let status = i32::from(self.progress.has_only_failures());
        eprintln!("{}", self.progress.finish());
        Ok(status)
    }

    /// Writes the line of an answer at once, so that a crash does not repeat its computation.
    fn keep(&mut self, answer: Answer) -> Result<(), Error> {
        // The requests that a lost engine drops have not failed by themselves, and are left for the
        // next run.
        if let EngineState::Lost(reason) = self.server.engine.state() {
            return Err(Error::Config(format!(
                "the engine has stopped: {reason}; run the same command again to resume from {}",
                self.shown
            )));
        }
        self.progress.count(&answer.custom_id, &answer.result);
        let line = result_line(&answer.custom_id, &answer.result, self.progress.num_done());
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|error| Error::Io(format!("cannot write {}", self.shown), error))
    }
}

/// The result of a request.
struct Answer {
    custom_id: String,
    result: Result<ResultResponse, ResultError>,
}

/// Sends a line's request to the server.
async fn answer(client: PatientClient, request: RequestLine) -> Answer {
    let custom_id = request.custom_id.clone();
    let result = match request.refusal() {
        Some(error) => Err(error),
        None => {
            let body = Value::Object(request.body).to_string().into_bytes();
            ask(&client, &request.url, body).await
        }
    };
    Answer { custom_id, result }
}

async fn ask(
    client: &PatientClient,
    path: &str,
    body: Vec<u8>,
) -> Result<ResultResponse, ResultError> {
    let response = client.post(path, body).await;
    let mut response = response.map_err(ResultError::invalid_url)?;
    let body = response.bytes().await;
    let request_id = response.request_id().to_owned();
    ResultResponse::new(path, response.status(), request_id, body)
}
