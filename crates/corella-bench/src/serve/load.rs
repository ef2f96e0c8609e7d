//! The load: the requests, and when each is sent.

use std::path::Path;
use std::time::Duration;

use super::prompt::{self, Prompt};
use super::{BenchServeOptions, Endpoint, PromptSource};
use crate::BenchError;
use crate::sample::split_mix::split_mix;
use crate::trace::{self, LATEST};

/// One request, as planned before the run.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Item {
    /// When the request is sent, measured from the start of the run.
    pub at: Duration,
    pub prompt: Prompt,
    pub max_tokens: u32,
}

const TRACE_BLOCK_TOKENS: f64 = 512.0;

/// Makes all requests of a run. Equal options give equal requests. Run 0 is the warm-up. Random prompts differ between
/// runs; other prompts do not.
pub(super) fn load(options: &BenchServeOptions, run: usize) -> Result<Vec<Item>, BenchError> {
    let (first, count) = match run {
        0 => (0, options.num_warmups),
        run => (
            options.num_warmups + (run - 1) * options.num_prompts,
            options.num_prompts,
        ),
    };
    let given = match &options.prompts {
        PromptSource::Trace {
            file,
            time_scale,
            length_scale,
        } => {
            let items = read_trace(file, count, *time_scale, *length_scale)?;
            return check_endpoint(options.endpoint, items);
        }
        PromptSource::Random(random) => {
            let (run, first) = (run as u64, first as u64);
            (first..first + count as u64)
                .map(|index| random.prompt(options.seed, run, index))
                .collect()
        }
        PromptSource::File(path) => prompt::read(path)?,
        PromptSource::Repeats { phrase, repeats } => prompt::repeated(phrase, repeats)?,
    };
    let prompts = given.into_iter().cycle().take(count);
    let times = arrivals(options, count);
    let items = prompts.zip(times).map(|(prompt, at)| Item {
        at,
        prompt,
        max_tokens: options.max_tokens,
    });
    check_endpoint(options.endpoint, items.collect())
}

fn check_endpoint(endpoint: Endpoint, items: Vec<Item>) -> Result<Vec<Item>, BenchError> {
    let has_tokens = |item: &Item| matches!(item.prompt, Prompt::Tokens(_));
    if endpoint == Endpoint::Chat && items.iter().any(has_tokens) {
        let reason = "--endpoint chat cannot send token ids, and these prompts are token ids; --prompt-words makes \
                      random texts";
        return Err(BenchError::Option(reason.into()));
    }
    Ok(items)
}

/// Draws the times of requests with gamma-distributed intervals, like `vllm bench serve`. Burstiness 1 is a Poisson
/// process. With smaller values requests come in bursts, with larger ones more evenly.
fn arrivals(options: &BenchServeOptions, count: usize) -> Vec<Duration> {
    if let Some(interval) = options.submit_interval {
        let at = |index| interval.saturating_mul(index as u32).min(LATEST);
        return (0..count).map(at).collect();
    }
    let Some(rate) = options.request_rate else {
        return vec![Duration::ZERO; count];
    };
    let mut state = options.seed;
    let mut at = 0.0;
    let intervals = (0..count).map(|_| {
        let now = at;
        at += gamma(&mut state, options.burstiness) / (options.burstiness * rate);
        Duration::from_secs_f64(now.min(LATEST.as_secs_f64()))
    });
    intervals.collect()
}

/// A gamma-distributed number with scale 1 (Marsaglia and Tsang 2000).
fn gamma(state: &mut u64, shape: f64) -> f64 {
    if shape < 1.0 {
        return gamma(state, shape + 1.0) * uniform(state).powf(1.0 / shape);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        // Two uniform numbers make a normally distributed one (Box and Muller 1958).
        let radius = (-2.0 * uniform(state).ln()).sqrt();
        let x = radius * (std::f64::consts::TAU * uniform(state)).cos();
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && uniform(state).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// A uniform number above 0 and at most 1.
fn uniform(state: &mut u64) -> f64 {
    ((split_mix(state) >> 11) + 1) as f64 / (1u64 << 53) as f64
}

fn read_trace(
    path: &Path,
    num_prompts: usize,
    time_scale: f64,
    length_scale: f64,
) -> Result<Vec<Item>, BenchError> {
    let requests = trace::read(path, num_prompts)?;
    let items = requests.iter().enumerate().map(|(index, request)| {
        let (num_prompt_tokens, max_tokens) = request.scaled_lengths(length_scale, length_scale);
        let tokens = trace_prompt(index, &request.hash_ids, num_prompt_tokens, length_scale);
        Ok(Item {
            at: request.at(time_scale)?,
            prompt: Prompt::Tokens(tokens),
            max_tokens,
        })
    });
    items.collect()
}

/// Returns the prompt of a trace's request. Its token ids are from 100 to 999, which every vocabulary has. Blocks with
/// equal ids at equal positions have equal tokens. A block without an id in the trace is unique to the request.
fn trace_prompt(index: usize, hash_ids: &[u64], num_tokens: u32, length_scale: f64) -> Vec<u32> {
    const FIRST: u64 = 100;
    const COUNT: u64 = 900;
    let block_tokens = (TRACE_BLOCK_TOKENS * length_scale).max(1.0);
    let own = u64::MAX - index as u64;
    let token = |at: u32| {
        let block = (f64::from(at) / block_tokens) as usize;
        let id = hash_ids.get(block).copied().unwrap_or(own);
        let mut state = id.wrapping_mul(0x9E37_79B9).wrapping_add(at.into());
        (FIRST + split_mix(&mut state) % COUNT) as u32
    };
    (0..num_tokens).map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> BenchServeOptions {
        BenchServeOptions {
            num_prompts: 4000,
            ..BenchServeOptions::default()
        }
    }

    #[test]
    fn without_a_rate_all_are_sent_at_once() {
        assert!(
            load(&options(), 1)
                .unwrap()
                .iter()
                .all(|item| item.at == Duration::ZERO)
        );
    }

    /// The expected mean of the intervals is 1/rate, and their variance 1/(burstiness rate²).
    #[test]
    fn intervals_have_their_mean_and_variance() {
        for burstiness in [0.5, 1.0, 4.0] {
            let options = BenchServeOptions {
                request_rate: Some(20.0),
                burstiness,
                ..options()
            };
            let items = load(&options, 1).unwrap();
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
            assert_eq!(items, load(&options, 1).unwrap());
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
        let items = load(&options, 1).unwrap();
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
        assert!(matches!(load(&chat, 1), Err(BenchError::Option(_))));
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_submit_interval_is_kept() {
        let options = BenchServeOptions {
            submit_interval: Some(Duration::from_millis(250)),
            num_prompts: 3,
            ..options()
        };
        let times = load(&options, 1).unwrap().into_iter().map(|item| item.at);
        let expected = [0, 250, 500].map(Duration::from_millis);
        assert_eq!(times.collect::<Vec<_>>(), expected);

        let at_once = BenchServeOptions {
            submit_interval: Some(Duration::ZERO),
            ..options
        };
        let items = load(&at_once, 1).unwrap();
        assert!(items.iter().all(|item| item.at.is_zero()));
    }

    #[test]
    fn a_time_beyond_any_clock_is_only_late() {
        let rate = BenchServeOptions {
            request_rate: Some(1e-300),
            ..options()
        };
        let interval = BenchServeOptions {
            submit_interval: Some(Duration::from_secs(u64::MAX)),
            ..options()
        };
        for options in [rate, interval] {
            assert_eq!(load(&options, 1).unwrap()[1].at, LATEST);
        }
    }

    #[test]
    fn each_run_has_its_own_random_prompts_and_the_same_given_ones() {
        let options = BenchServeOptions {
            num_warmups: 2,
            num_prompts: 3,
            ..options()
        };
        let runs = |options| [0, 1, 2].map(|run| load(&options, run).unwrap());
        let random = runs(options.clone());
        assert_eq!(random.each_ref().map(Vec::len), [2, 3, 3]);
        let mut prompts: Vec<String> = random
            .iter()
            .flatten()
            .map(|item| format!("{:?}", item.prompt))
            .collect();
        prompts.sort();
        prompts.dedup();
        assert_eq!(prompts.len(), 8);

        let repeats = PromptSource::Repeats {
            phrase: "fly".into(),
            repeats: vec![3, 1],
        };
        let given = runs(BenchServeOptions {
            prompts: repeats,
            ..options
        });
        let prompt = |text: &str| Prompt::Text(text.into());
        let expected = [prompt("fly fly fly"), prompt("fly"), prompt("fly fly fly")];
        for run in &given[1..] {
            assert!(run.iter().map(|item| &item.prompt).eq(&expected));
        }
    }
}
