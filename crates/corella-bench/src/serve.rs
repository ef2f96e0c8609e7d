//! `bench serve`: sends requests to an OpenAI-compatible server and times what streams back.

mod client;
mod event;
mod option;
mod progress;
mod prompt;
mod report;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tokio::task::JoinSet;

use crate::BenchError;
use client::Client;
pub use option::{BenchServeOptions, Endpoint, PromptSource};
use progress::Progress;
pub use report::{Report, RequestRecord};

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
    if let Some(path) = &options.output_json {
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
    while let Some(worker) = workers.join_next().await {
        records.extend(worker.map_err(|error| BenchError::Worker(error.to_string()))?);
    }
    let duration = start.elapsed();
    progress.finish();

    records.sort_by_key(|(index, _)| *index);
    let records = records.into_iter().map(|(_, record)| record).collect();
    let report = Report::new(&options, model, duration, records);
    if let Some(path) = &options.output_json {
        let mut json = report.to_json(options.save_detailed).to_string();
        json.push('\n');
        std::fs::write(path, json)
            .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))?;
    }
    Ok(report)
}
