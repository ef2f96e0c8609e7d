//! `bench serve`: sends requests to an OpenAI-compatible server and times what streams back.

mod client;
mod event;
mod option;
mod prompt;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use crate::page;
use crate::progress::Progress;
use crate::timeline::{Timeline, parse_metrics};
use crate::{BenchError, Report, ReportHead};
use client::Client;
pub use option::{BenchServeOptions, Endpoint, PromptSource};

/// How often the server is asked what it is doing, when somebody wants to see it.
const METRICS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the whole benchmark: reads the prompts, warms up, sends every request, and writes
/// `output_json`. The table is the report's `Display`.
///
/// Failed requests do not fail the run; they are counted in the report.
pub async fn run(options: BenchServeOptions) -> Result<Report, BenchError> {
    options.check()?;
    let prompts = options.prompts.prompts(options.num_prompts, options.seed)?;
    let mut client = Client::new(&options)?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => client.served_model().await?,
    };
    client.set_model(&model);
    let client = Arc::new(client);
    let prompts: Arc<[String]> = prompts.into();
    for path in [&options.output_json, &options.report]
        .into_iter()
        .flatten()
    {
        // Found out now rather than after the run.
        std::fs::write(path, "")
            .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))?;
    }

    for warmup in 0..options.num_warmups {
        let record = client.send(&prompts[warmup % prompts.len()], |_| {}).await;
        if let Some(error) = record.error {
            return Err(BenchError::Warmup(error));
        }
    }

    let concurrency = options.max_concurrency.unwrap_or(options.num_prompts);
    let progress = Arc::new(Progress::new(options.num_prompts));
    let next = Arc::new(AtomicUsize::new(0));
    let start = Instant::now();
    let mut workers = JoinSet::new();
    for _ in 0..concurrency.min(options.num_prompts) {
        let (client, prompts) = (client.clone(), prompts.clone());
        let (next, progress) = (next.clone(), progress.clone());
        workers.spawn(async move {
            let mut records = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(prompt) = prompts.get(index) else {
                    return records;
                };
                let record = client
                    .send(prompt, |num_tokens| progress.add_tokens(num_tokens))
                    .await;
                progress.add_request();
                records.push((index, record));
            }
        });
    }
    let mut records = Vec::with_capacity(options.num_prompts);
    let mut timeline = Timeline::new(METRICS_INTERVAL);
    while !workers.is_empty() {
        tokio::select! {
            Some(worker) = workers.join_next() => {
                records.extend(worker.map_err(|error| BenchError::Worker(error.to_string()))?);
            }
            () = tokio::time::sleep(timeline.interval), if options.report.is_some() => {
                let text = client.metrics().await.unwrap_or_default();
                if let Some(moment) = parse_metrics(&text, start.elapsed()) {
                    timeline.push(moment);
                }
            }
        }
    }
    let duration = start.elapsed();
    progress.finish();

    records.sort_by_key(|(index, _)| *index);
    let records = records.into_iter().map(|(_, record)| record).collect();
    let head = ReportHead {
        backend: options.endpoint.backend(),
        model,
        max_concurrency: options.max_concurrency,
    };
    let report = Report::new(head, duration, records);
    if let Some(path) = &options.report {
        std::fs::write(path, page::html(&report, &timeline))
            .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))?;
    }
    if let Some(path) = &options.output_json {
        let mut json = report.to_json(options.save_detailed).to_string();
        json.push('\n');
        std::fs::write(path, json)
            .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))?;
    }
    Ok(report)
}
