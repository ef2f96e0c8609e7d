//! `bench serve`: sends requests to an OpenAI-compatible server and times its streamed answers.

mod client;
mod event;
mod histogram;
mod load;
mod option;
mod prompt;
mod random_prompt;
mod server_metrics;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::report::html_report;
use crate::report::provenance::Provenance;
use crate::report::result_file::ResultFile;
use crate::sample::progress::Progress;
use crate::sample::timeline::{Timeline, parse_metrics};
use crate::{BenchError, Repeats, Report, ReportHead};
use client::Client;
use load::Item;
use prompt::Prompt;
use server_metrics::add_server_metrics;

pub use option::{BenchServeOptions, Endpoint, PromptSource};
pub use random_prompt::{COMMON_VOCAB_SIZE, RandomPrompts, Unit};

/// Time between two reads of the server's metrics, for an HTML report.
const METRICS_INTERVAL: Duration = Duration::from_millis(100);

/// Runs the whole benchmark: reads the prompts, warms up, does the configured number of runs, and writes the files. The
/// `Display` of the result is the table.
///
/// Failed requests do not fail the run; they are counted in the report.
pub async fn run(options: BenchServeOptions) -> Result<Repeats, BenchError> {
    options.check()?;
    let mut client = Client::new(&options)?;
    // Errors in the prompts are found before the first request to the server.
    load::load(&options, 1)?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => client.served_model().await?,
    };
    client.set_model(&model);
    let client = Arc::new(client);
    options.files.check()?;
    let provenance = Provenance::of_this_process(client.version().await);

    for item in prepare(&options, &client, 0).await? {
        let record = client.send(&item, |_| {}).await;
        if let Some(error) = record.error {
            let url = &options.base_url;
            return Err(BenchError::Warmup(format!("{url}: {error}")));
        }
    }
    let mut repeats = Repeats { runs: Vec::new() };
    for run in 1..=options.num_repeats {
        let items = prepare(&options, &client, run).await?;
        let label = match options.num_repeats {
            1 => String::new(),
            num_repeats => format!("run {run} of {num_repeats}: "),
        };
        let head = ReportHead {
            backend: options.endpoint.backend(),
            model: model.clone(),
            request_rate: options.request_rate,
            burstiness: options.burstiness,
            max_concurrency: options.max_concurrency,
            max_tokens: match options.prompts {
                PromptSource::Trace { .. } => None,
                _ => Some(options.max_tokens),
            },
            ignore_eos: options.ignore_eos,
            base_url: Some(options.base_url.clone()),
            percentiles: options.percentiles.clone(),
            provenance: provenance.clone(),
        };
        let progress = Progress::new(label, items.len());
        let report = measure(&options, &client, head, items, progress).await?;
        repeats.runs.push(report);
    }

    options.files.write(
        |is_detailed| repeats.to_json(is_detailed),
        || html_report::write(&[ResultFile::new(model, repeats.to_json(true))]),
    )?;
    Ok(repeats)
}

/// Makes the requests of a run.
async fn prepare(
    options: &BenchServeOptions,
    client: &Client,
    run: usize,
) -> Result<Vec<Item>, BenchError> {
    let mut items = load::load(options, run)?;
    for item in &mut items {
        if let Prompt::Text(text) = &item.prompt
            && options.pre_tokenize
        {
            item.prompt = Prompt::Tokens(client.tokenize(text).await?);
        }
    }
    Ok(items)
}

/// Sends the requests of one run and times them.
async fn measure(
    options: &BenchServeOptions,
    client: &Arc<Client>,
    head: ReportHead,
    items: Vec<Item>,
    progress: Progress,
) -> Result<Report, BenchError> {
    let metrics_before = client.metrics().await.unwrap_or_default();
    let progress = Arc::new(progress);
    let places = options.max_concurrency.unwrap_or(items.len());
    let places = Arc::new(Semaphore::new(places.min(Semaphore::MAX_PERMITS)));
    let may_end_early = !options.ignore_eos;
    let is_watched = options.files.html.is_some() || options.files.is_detailed;
    let has_times = items.iter().any(|item| item.at > Duration::ZERO);
    let start = Instant::now();
    let mut requests = JoinSet::new();
    for (index, item) in items.into_iter().enumerate() {
        let (client, places, progress) = (client.clone(), places.clone(), progress.clone());
        requests.spawn(async move {
            tokio::time::sleep_until((start + item.at).into()).await;
            // The semaphore is fair, so requests keep their order. It is never closed.
            let _place = places.acquire().await;
            let begun = start.elapsed();
            let mut record = client
                .send(&item, |num_tokens| progress.add_tokens(num_tokens))
                .await;
            record.start = begun + record.submit.unwrap_or_default();
            record.max_output_tokens = may_end_early.then(|| item.max_tokens.into());
            record.lag = has_times.then(|| begun.saturating_sub(item.at));
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
            () = tokio::time::sleep(timeline.interval), if is_watched => {
                let text = client.metrics().await.unwrap_or_default();
                if let Some(moment) = parse_metrics(&text, start.elapsed()) {
                    timeline.push(moment);
                }
            }
        }
    }
    let duration = start.elapsed();
    progress.finish();
    let metrics_after = client.metrics().await.unwrap_or_default();

    records.sort_by_key(|(index, _)| *index);
    let records = records.into_iter().map(|(_, record)| record).collect();
    let mut report = Report::new(head, duration, records).judge(&options.goodput);
    report.timeline = Some(timeline).filter(|timeline| !timeline.moments.is_empty());
    add_server_metrics(&mut report, &metrics_before, &metrics_after);
    Ok(report)
}
