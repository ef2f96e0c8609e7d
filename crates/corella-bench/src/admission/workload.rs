//! The workload: arrivals and lengths, the same for every rule.

use std::time::Duration;

use super::{AdmissionOptions, Arrivals, LengthSource};
use crate::BenchError;
use crate::sample::split_mix::split_mix;
use crate::trace::{self, LATEST};

/// The requests, in order of arrival.
#[derive(Debug)]
pub struct Workload {
    pub items: Vec<Item>,
    /// The number of requests that are too long for the context or the pool.
    pub num_left_out: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Item {
    pub at: Duration,
    pub num_prompt_tokens: u32,
    pub num_output_tokens: u32,
}

impl Workload {
    pub fn new(options: &AdmissionOptions) -> Result<Self, BenchError> {
        let mut items = items(options)?;
        items.sort_by_key(|item| item.at);
        let num_items = items.len();
        let config = &options.config;
        let pool_len = u64::from(config.num_pages) * u64::from(config.page_size);
        let max_len = pool_len.min(config.max_model_len.into());
        items.retain(|item| {
            u64::from(item.num_prompt_tokens) + u64::from(item.num_output_tokens) <= max_len
        });
        Ok(Self {
            num_left_out: num_items - items.len(),
            items,
        })
    }
}

fn items(options: &AdmissionOptions) -> Result<Vec<Item>, BenchError> {
    let lengths: Vec<(u32, u32)>;
    let mut times = Vec::new();
    match &options.lengths {
        LengthSource::Trace {
            file,
            prompt_scale,
            output_scale,
        } => {
            let requests = trace::read(file, options.num_requests.unwrap_or(usize::MAX))?;
            if let Arrivals::Trace { time_scale } = options.arrivals {
                let at = requests.iter().map(|request| request.at(time_scale));
                times = at.collect::<Result<_, _>>()?;
            }
            let scaled = |request: &trace::TraceRequest| {
                request.scaled_lengths(*prompt_scale, *output_scale)
            };
            lengths = requests.iter().map(scaled).collect();
        }
        LengthSource::Ranges {
            prompt,
            output,
            seed,
        } => {
            let mut state = *seed;
            let mut draw = |(first, last): (u32, u32)| {
                first + (split_mix(&mut state) % (u64::from(last - first) + 1)) as u32
            };
            let num_requests = options.num_requests.unwrap_or(1);
            let pairs = (0..num_requests).map(|_| (draw(*prompt), draw(*output)));
            lengths = pairs.collect();
        }
    }
    let at = |index: usize| match options.arrivals {
        Arrivals::AtOnce => Duration::ZERO,
        Arrivals::Rate(rate) => {
            let seconds = (index as f64 / rate).min(LATEST.as_secs_f64());
            Duration::from_secs_f64(seconds)
        }
        Arrivals::Trace { .. } => times.get(index).copied().unwrap_or_default(),
    };
    let items = lengths
        .into_iter()
        .enumerate()
        .map(|(index, lengths)| Item {
            at: at(index),
            num_prompt_tokens: lengths.0,
            num_output_tokens: lengths.1,
        });
    Ok(items.collect())
}
