//! `corella batch`: answers the requests of a file, without a server.

mod file;
mod line;
mod progress;

use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use corella::Error;
use corella_engine::EngineState;
use corella_server::{LocalClient, LocalResponse, shutdown_signal};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::config::Batch;
use crate::local_server::LocalServer;
use file::{Lines, Output, check_input};
use line::{RequestLine, ResultError, ResultLine, ResultResponse};
use progress::Progress;

/// The exit status of a process that SIGINT has ended, by the convention of shells.
const INTERRUPTED: i32 = 130;

/// Returns the exit status.
pub fn run(config: Batch) -> Result<i32, Error> {
    let shown = config.output.display().to_string();
    if is_same_file(&config.input, &config.output) {
        return Err(Error::Config(format!(
            "--output {shown} is the file of the requests; give another one"
        )));
    }
    let ids = check_input(&config.input)?;
    let output = Output::open(&config.output, &ids)?;
    let (num_requests, num_before) = (ids.len(), output.answered.len());
    drop(ids);
    if num_before == num_requests {
        eprintln!("{shown} has the answers to all {num_requests} requests");
        return Ok(0);
    }
    if num_before > 0 {
        eprintln!("{shown} has {num_before} of {num_requests} answers; going on from there");
    }
    let server = LocalServer::load(&config.source, &config.options, config.request)?;
    eprintln!("{}", server.summary);
    let io_error = |what: &'static str| move |error| Error::Io(what.to_owned(), error);
    let runtime = Runtime::new().map_err(io_error("starting the batch"))?;
    let run = Run {
        lines: Lines::open(&config.input)?,
        answered: output.answered,
        file: output.file,
        shown: &shown,
        progress: Progress::new(server.engine.clone(), num_before, num_requests),
        server: &server,
        max_concurrency: config.max_concurrency,
    };
    let done = runtime.block_on(run.answer_all());
    // Requests that were interrupted may still be tokenised.
    runtime.shutdown_timeout(Duration::from_secs(1));
    server.engine.shutdown();
    done
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
        let traffic = Arc::new(Traffic::default());
        let mut running = JoinSet::new();
        let mut all_sent = false;
        loop {
            while !all_sent && running.len() < self.max_concurrency {
                match self.lines.next_request()? {
                    None => all_sent = true,
                    Some(request) if self.answered.contains(&request.custom_id) => {}
                    Some(request) => {
                        let client = self.server.client.clone();
                        running.spawn(answer(client, request, traffic.clone()));
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
                    eprintln!("interrupted; the same command goes on from what is in {shown}");
                    return Ok(INTERRUPTED);
                }
                _ = refresh.tick() => self.progress.show(running.len()),
            }
        }
        eprintln!("{}", self.progress.finish());
        Ok(0)
    }

    /// Writes the line of an answer at once, so that nothing is computed twice after a crash.
    fn keep(&mut self, answer: Answer) -> Result<(), Error> {
        // The requests that a lost engine drops have not failed by themselves, and are left for the
        // next run.
        if let EngineState::Lost(reason) = self.server.engine.state() {
            return Err(Error::Config(format!(
                "the engine has stopped: {reason}; the same command goes on from what is in {}",
                self.shown
            )));
        }
        self.progress.count(&answer.result);
        let line = answer.to_line(self.progress.num_done());
        let written = self.file.write_all(line.as_bytes());
        written.map_err(|error| Error::Io(format!("cannot write {}", self.shown), error))
    }
}

/// What became of a request.
struct Answer {
    custom_id: String,
    result: Result<ResultResponse, ResultError>,
}

impl Answer {
    /// `count` tells results apart that have no request id.
    fn to_line(&self, count: usize) -> String {
        let name = match &self.result {
            Ok(response) => response.request_id.clone(),
            Err(_) => format!("{:08x}{count:08x}", std::process::id()),
        };
        let (response, error) = match &self.result {
            Ok(response) => (Some(response), None),
            Err(error) => (None, Some(error)),
        };
        let line = ResultLine {
            id: format!("batch_req_{name}"),
            custom_id: &self.custom_id,
            response,
            error,
        };
        // JSON has no line breaks unless they are asked for.
        let mut line = serde_json::to_string(&line).unwrap_or_default();
        line.push('\n');
        line
    }
}

/// Asks the server, again and again while it is too busy with other requests of this batch.
async fn answer(client: LocalClient, request: RequestLine, traffic: Arc<Traffic>) -> Answer {
    const RETRY: Duration = Duration::from_millis(100);
    let custom_id = request.custom_id.clone();
    if let Some(error) = request.refusal() {
        let result = Err(error);
        return Answer { custom_id, result };
    }
    let body = Value::Object(request.body).to_string().into_bytes();
    loop {
        let turn = traffic.enter();
        let result = ask(&client, &request.url, body.clone()).await;
        // A request that is refused although no other was there would be refused for ever.
        let was_alone = turn.was_alone();
        match &result {
            Ok(response) if response.is_queue_full() && !was_alone => sleep(RETRY).await,
            _ => return Answer { custom_id, result },
        }
    }
}

/// Counts the requests that the server has.
#[derive(Default)]
struct Traffic {
    num_active: AtomicUsize,
    num_sent: AtomicUsize,
}

/// A request that the server has until this is dropped.
struct Turn<'a> {
    traffic: &'a Traffic,
    began_alone: bool,
    /// How many requests had been sent, with this one.
    num_sent: usize,
}

impl Traffic {
    fn enter(&self) -> Turn<'_> {
        Turn {
            traffic: self,
            began_alone: self.num_active.fetch_add(1, Ordering::SeqCst) == 0,
            num_sent: self.num_sent.fetch_add(1, Ordering::SeqCst) + 1,
        }
    }
}

impl Turn<'_> {
    /// Ends the turn, and says whether the server had no other request all the time.
    fn was_alone(self) -> bool {
        self.began_alone && self.traffic.num_sent.load(Ordering::SeqCst) == self.num_sent
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.traffic.num_active.fetch_sub(1, Ordering::SeqCst);
    }
}

async fn ask(
    client: &LocalClient,
    path: &str,
    body: Vec<u8>,
) -> Result<ResultResponse, ResultError> {
    let error = |code| move |message| ResultError { code, message };
    let response = client.post(path, body).await;
    let mut response: LocalResponse = response.map_err(error("invalid_url"))?;
    let body = response.bytes().await.map_err(error("answer_cut_off"))?;
    let body = serde_json::from_slice(&body).map_err(|_| ResultError {
        code: "answer_not_json",
        message: format!("{path} does not answer with JSON"),
    })?;
    Ok(ResultResponse {
        status_code: response.status,
        request_id: response.request_id,
        body,
    })
}
