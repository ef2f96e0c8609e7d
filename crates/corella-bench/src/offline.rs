//! `bench offline`: loads an engine in this process, without HTTP or text.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corella_core::TokenId;
use corella_engine::{Engine, EngineStats, StreamEvent, Submission, TokenStream};
use tokio::task::JoinSet;

use crate::report::html_report;
use crate::report::provenance::Provenance;
use crate::report::result_file::ResultFile;
use crate::sample::progress::Progress;
use crate::sample::timeline::{Moment, Timeline};
use crate::{BenchError, Report, ReportFiles, ReportHead, RequestRecord};

const FIRST_INTERVAL: Duration = Duration::from_millis(5);

#[derive(Debug, Clone)]
pub struct OfflineOptions {
    pub num_prompts: usize,
    /// Lengths of the prompts in tokens: prompt i has `input_lens[i % len]`.
    pub input_lens: Vec<usize>,
    /// Whether all prompts are beginnings of one token sequence. Otherwise they have no common prefix.
    pub shared_prefix: bool,
    pub max_tokens: u32,
    pub seed: u64,
    pub files: ReportFiles,
}

/// Submits all prompts at once, in order, and waits for all of their tokens.
pub async fn run(
    engine: &Engine,
    model: String,
    vocab_size: usize,
    options: &OfflineOptions,
) -> Result<Report, BenchError> {
    let prompts = prompts(options, vocab_size)?;
    options.files.check()?;
    let provenance = Provenance::of_this_process(None);
    let progress = Arc::new(Progress::new(String::new(), prompts.len()));
    let start = Instant::now();
    let mut requests = JoinSet::new();
    for (index, prompt) in prompts.into_iter().enumerate() {
        let submission = Submission::new(prompt, options.max_tokens);
        let (submitted, progress) = (Instant::now(), progress.clone());
        let streams = engine.submit(submission);
        let submit = submitted.elapsed();
        requests.spawn(async move {
            let mut record = match streams {
                Ok(mut streams) => follow(streams.remove(0), submitted, &progress).await,
                Err(error) => failed(format!("{error:?}")),
            };
            record.start = submitted - start;
            record.submit = Some(submit);
            progress.add_request();
            (index, record)
        });
    }
    let mut timeline = Timeline::new(FIRST_INTERVAL);
    let mut records = Vec::with_capacity(requests.len());
    while !requests.is_empty() {
        tokio::select! {
            Some(record) = requests.join_next() => {
                records.push(record.map_err(|error| BenchError::Worker(error.to_string()))?);
            }
            () = tokio::time::sleep(timeline.interval) => {
                timeline.push(moment(&engine.stats(), start.elapsed()));
            }
        }
    }
    let duration = start.elapsed();
    timeline.push(moment(&engine.stats(), duration));
    progress.finish();

    records.sort_by_key(|(index, _)| *index);
    let head = ReportHead {
        backend: "corella-offline",
        model,
        request_rate: None,
        burstiness: 1.0,
        max_concurrency: None,
        max_tokens: Some(options.max_tokens),
        ignore_eos: true,
        base_url: None,
        percentiles: Vec::new(),
        provenance,
    };
    let records = records.into_iter().map(|(_, record)| record).collect();
    let mut report = Report::new(head, duration, records);
    report.max_passed_over = Some(engine.stats().scheduler.max_passed_over);
    report.timeline = Some(timeline);
    options.files.write(
        |is_detailed| report.to_json(is_detailed),
        || {
            html_report::write(&[ResultFile::new(
                report.head.model.clone(),
                report.to_json(true),
            )])
        },
    )?;
    Ok(report)
}

/// Generates the prompts with a multiplicative congruential generator (Lehmer 1951). Each prompt
/// has its own sequence of tokens unless `shared_prefix` is set.
fn prompts(options: &OfflineOptions, vocab_size: usize) -> Result<Vec<Vec<TokenId>>, BenchError> {
    if options.input_lens.is_empty() || options.input_lens.contains(&0) {
        return Err(BenchError::Option(
            "--input-lens needs numbers of at least 1".into(),
        ));
    }
    let token = |sequence: u64, at: u64| {
        let mixed =
            (options.seed + sequence * 1_000_003 + at + 1).wrapping_mul(48_271) % 0x7fff_ffff;
        (mixed % vocab_size as u64) as TokenId
    };
    let lens = options.input_lens.iter().cycle().take(options.num_prompts);
    let prompts = lens.enumerate().map(|(index, &len)| {
        let sequence = if options.shared_prefix {
            0
        } else {
            index as u64
        };
        (0..len as u64).map(|at| token(sequence, at)).collect()
    });
    Ok(prompts.collect())
}

async fn follow(mut stream: TokenStream, submitted: Instant, progress: &Progress) -> RequestRecord {
    let mut record = failed("the stream ended early".into());
    let mut last_token: Option<Instant> = None;
    while let Some(event) = poll_fn(|cx| stream.poll_next(cx)).await {
        let now = Instant::now();
        match event {
            StreamEvent::Accepted => {}
            StreamEvent::Refused(error) => record.error = Some(error.to_string()),
            StreamEvent::Output(output) => {
                record.num_input_tokens = output.num_prompt_tokens.into();
                record.num_output_tokens = output.num_output_tokens.into();
                record.queue = Some(Duration::from_micros(output.queue_us));
                if output.sample.is_some() {
                    progress.add_tokens(1);
                    match last_token.replace(now) {
                        Some(before) => record.itls.push(now - before),
                        None => record.ttft = Some(now - submitted),
                    }
                    record.latency = now - submitted;
                }
                if let Some(finish) = output.finish {
                    use corella_core::FinishReason::{Aborted, Error};
                    record.error = match finish {
                        Error(error) => Some(error.to_string()),
                        Aborted => Some("aborted".into()),
                        _ => None,
                    };
                }
            }
        }
    }
    record
}

fn failed(error: String) -> RequestRecord {
    RequestRecord {
        error: Some(error),
        ..RequestRecord::default()
    }
}

fn moment(stats: &EngineStats, at: Duration) -> Moment {
    let scheduler = &stats.scheduler;
    let num_rejected = scheduler.num_draft_tokens - scheduler.num_accepted_draft_tokens;
    Moment {
        at,
        num_running: scheduler.num_running as f64,
        num_waiting: scheduler.num_waiting as f64,
        kv_usage: scheduler.num_in_use_pages as f64 / scheduler.num_pages.max(1) as f64,
        // Nearly every generated token is later scheduled once as input, to compute the token after
        // it. All other scheduled tokens, except rejected drafts, are prefill.
        num_prefilled: scheduler
            .num_scheduled_tokens
            .saturating_sub(scheduler.num_generated_tokens + num_rejected)
            as f64,
        num_generated: scheduler.num_generated_tokens as f64,
    }
}
