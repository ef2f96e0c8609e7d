//! What is sent, and when.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use super::prompt::split_mix;
use super::{BenchServeOptions, Endpoint, PromptSource};
use crate::BenchError;

/// One request, known before the run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Item {
    /// After the start of the run.
    pub at: Duration,
    pub prompt: Prompt,
    pub max_tokens: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// A line of a trace in the format of the Mooncake traces (FAST 2025).
#[derive(Deserialize)]
struct TraceLine {
    /// Milliseconds.
    timestamp: f64,
    input_length: f64,
    output_length: f64,
    /// Of the prompt's blocks of 512 tokens; equal for equal prefixes.
    #[serde(default)]
    hash_ids: Vec<u64>,
}

const TRACE_BLOCK_TOKENS: f64 = 512.0;

/// All requests of the run, the same for the same options.
pub(super) fn load(options: &BenchServeOptions) -> Result<Vec<Item>, BenchError> {
    if let PromptSource::Trace {
        file,
        time_scale,
        length_scale,
    } = &options.prompts
    {
        if options.endpoint == Endpoint::Chat {
            let reason = "a trace has token ids for prompts, which --endpoint chat cannot send";
            return Err(BenchError::Option(reason.into()));
        }
        return read_trace(file, options.num_prompts, *time_scale, *length_scale);
    }
    let prompts = options.prompts.prompts(options.num_prompts, options.seed)?;
    let times = arrivals(options, prompts.len());
    let items = prompts.into_iter().zip(times).map(|(prompt, at)| Item {
        at,
        prompt: Prompt::Text(prompt),
        max_tokens: options.max_tokens,
    });
    Ok(items.collect())
}

/// Gamma-distributed intervals, as `vllm bench serve` draws them: burstiness 1 is a Poisson
/// process, below it requests come in bursts, above it evenly.
fn arrivals(options: &BenchServeOptions, count: usize) -> Vec<Duration> {
    let Some(rate) = options.request_rate else {
        return vec![Duration::ZERO; count];
    };
    let mut state = options.seed;
    let mut at = 0.0;
    let intervals = (0..count).map(|_| {
        let now = at;
        at += gamma(&mut state, options.burstiness) / (options.burstiness * rate);
        Duration::from_secs_f64(now)
    });
    intervals.collect()
}

/// Marsaglia and Tsang 2000, with scale 1.
fn gamma(state: &mut u64, shape: f64) -> f64 {
    if shape < 1.0 {
        return gamma(state, shape + 1.0) * uniform(state).powf(1.0 / shape);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        // Box and Muller 1958.
        let radius = (-2.0 * uniform(state).ln()).sqrt();
        let x = radius * (std::f64::consts::TAU * uniform(state)).cos();
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && uniform(state).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// Above 0, at most 1.
fn uniform(state: &mut u64) -> f64 {
    ((split_mix(state) >> 11) + 1) as f64 / (1u64 << 53) as f64
}

fn read_trace(
    path: &Path,
    num_prompts: usize,
    time_scale: f64,
    length_scale: f64,
) -> Result<Vec<Item>, BenchError> {
    let error = |reason: String| BenchError::File(format!("{}: {reason}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
    let mut items = Vec::new();
    for (index, line) in text.lines().take(num_prompts).enumerate() {
        let line: TraceLine = serde_json::from_str(line)
            .map_err(|cause| error(format!("line {}: {cause}", index + 1)))?;
        let scaled = |length: f64| (length * length_scale).round().max(1.0);
        let at = Duration::try_from_secs_f64(line.timestamp * time_scale / 1e3);
        items.push(Item {
            at: at.map_err(|cause| error(format!("line {}: {cause}", index + 1)))?,
            prompt: Prompt::Tokens(trace_prompt(&line, scaled(line.input_length), length_scale)),
            max_tokens: scaled(line.output_length) as u32,
        });
    }
    if items.is_empty() {
        return Err(error("no requests in it".into()));
    }
    Ok(items)
}

/// Tokens that any vocabulary has, the same for the same block.
fn trace_prompt(line: &TraceLine, num_tokens: f64, length_scale: f64) -> Vec<u32> {
    const FIRST: u64 = 100;
    const COUNT: u64 = 900;
    let block_tokens = (TRACE_BLOCK_TOKENS * length_scale).max(1.0);
    let token = |at: usize| {
        let block = (at as f64 / block_tokens) as usize;
        let id = line.hash_ids.get(block).copied().unwrap_or(u64::MAX);
        let mut state = id.wrapping_mul(0x9E37_79B9).wrapping_add(at as u64);
        (FIRST + split_mix(&mut state) % COUNT) as u32
    };
    (0..num_tokens as usize).map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> BenchServeOptions {
        BenchServeOptions {
            prompts: PromptSource::Words { num_words: 3 },
            num_prompts: 4000,
            ..BenchServeOptions::default()
        }
    }

    #[test]
    fn without_a_rate_all_are_sent_at_once() {
        assert!(
            load(&options())
                .unwrap()
                .iter()
                .all(|item| item.at == Duration::ZERO)
        );
    }

    /// The mean and the variance of the intervals: 1/rate, and 1/(burstiness rate²).
    #[test]
    fn intervals_have_their_mean_and_variance() {
        for burstiness in [0.5, 1.0, 4.0] {
            let options = BenchServeOptions {
                request_rate: Some(20.0),
                burstiness,
                ..options()
            };
            let items = load(&options).unwrap();
            let gaps: Vec<f64> = items
                .windows(2)
                .map(|pair| (pair[1].at - pair[0].at).as_secs_f64())
                .collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance =
                gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((mean * 20.0 - 1.0).abs() < 0.08, "{burstiness}: {mean}");
            let expected = 1.0 / (burstiness * 400.0);
            assert!(
                (variance / expected - 1.0).abs() < 0.2,
                "{burstiness}: {variance}"
            );
            assert_eq!(items, load(&options).unwrap());
        }
    }

    #[test]
    fn a_trace_is_scaled_and_shares_its_prefixes() {
        let path = std::env::temp_dir().join(format!("corella-load-{}.jsonl", std::process::id()));
        let trace = "{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 64, \"hash_ids\": [7, 8]}\n\
            {\"timestamp\": 3000, \"input_length\": 1300, \"output_length\": 1, \"hash_ids\": [7, 9, 10]}\n";
        std::fs::write(&path, trace).unwrap();
        let options = BenchServeOptions {
            prompts: PromptSource::Trace {
                file: path.clone(),
                time_scale: 0.5,
                length_scale: 0.25,
            },
            ..options()
        };
        let items = load(&options).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(items[1].at, Duration::from_millis(1500));
        assert_eq!((items[0].max_tokens, items[1].max_tokens), (16, 1));
        let (Prompt::Tokens(first), Prompt::Tokens(second)) = (&items[0].prompt, &items[1].prompt)
        else {
            panic!("a trace has tokens");
        };
        assert_eq!((first.len(), second.len()), (256, 325));
        assert_eq!(first[..128], second[..128]);
        assert_ne!(first[128..], second[128..256]);
        let chat = BenchServeOptions {
            endpoint: Endpoint::Chat,
            ..options
        };
        assert!(matches!(load(&chat), Err(BenchError::Option(_))));
    }
}
