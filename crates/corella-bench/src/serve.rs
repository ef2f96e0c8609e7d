//! `bench serve`: sends requests to an OpenAI-compatible server and times what streams back.

mod client;
mod event;
mod load;
mod option;
mod prompt;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
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
    let items = load::load(&options)?;
    let mut client = Client::new(&options)?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => client.served_model().await?,
    };
    client.set_model(&model);
    let client = Arc::new(client);
    for path in [&options.output_json, &options.report]
        .into_iter()
        .flatten()
    {
        // Found out now rather than after the run.
        std::fs::write(path, "")
            .map_err(|error| BenchError::File(format!("{}: {error}", path.display())))?;
    }

    for warmup in 0..options.num_warmups {
        let record = client.send(&items[warmup % items.len()], |_| {}).await;
        if let Some(error) = record.error {
            return Err(BenchError::Warmup(error));
        }
    }

    let progress = Arc::new(Progress::new(items.len()));
    let places = options.max_concurrency.unwrap_or(items.len());
    let places = Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS)));
    let has_times = items.iter().any(|item| item.at > Duration::ZERO);
    let start = Instant::now();
    let mut requests = JoinSet::new();
    for (index, item) in items.into_iter().enumerate() {
        let (client, places, progress) = (client.clone(), places.clone(), progress.clone());
        requests.spawn(async move {
            tokio::time::sleep_until((start + item.at).into()).await;
            // Fair: requests go in their order. It is never closed.
            let _place = places.acquire().await;
            let lag = start.elapsed().saturating_sub(item.at);
            let mut record = client
                .send(&item, |num_tokens| progress.add_tokens(num_tokens))
                .await;
            record.lag = has_times.then_some(lag);
            progress.add_request();
            (index, record)
        });
    }
    let mut records = Vec::with_capacity(requests.len());
    let mut timeline = Timeline::new(METRICS_INTERVAL);
    while !requests.is_empty() {
        tokio::select! {
            Some(record) = requests.join_next() => {
                records.push(record.map_err(|error| BenchError::Worker(error.to_string()))?);
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
    let report = Report::new(head, duration, records).judge(&options.goodput);
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
