//! The options of `bench serve`. Their names follow `vllm bench serve`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::rustls::ClientConfig;

use super::random_prompt::RandomPrompts;
use crate::{BenchError, Objective, ReportFiles};

#[derive(Debug, Clone)]
pub struct BenchServeOptions {
    /// The server's URL, `http://HOST:PORT` or `https://HOST:PORT`, with or without `/v1`.
    pub base_url: String,
    /// Verifies a server's certificate, for `https://`.
    pub tls: Option<Arc<ClientConfig>>,
    /// The model to request. `None` takes the first model in the server's list.
    pub model: Option<String>,
    pub endpoint: Endpoint,
    pub prompts: PromptSource,
    /// Whether to send token ids. The server tokenizes the prompts before the run.
    pub pre_tokenize: bool,
    /// The number of requests to send. If there are fewer prompts, they are reused in order.
    pub num_prompts: usize,
    /// Mean number of requests per second. `None` sends requests as soon as `max_concurrency` allows.
    pub request_rate: Option<f64>,
    /// Shape of the gamma distribution of the intervals: 1 is a Poisson process, smaller values are
    /// burstier.
    pub burstiness: f64,
    /// The time between two requests. `None` uses `request_rate`.
    pub submit_interval: Option<Duration>,
    /// The limit of unfinished requests. `None` means no limit.
    pub max_concurrency: Option<usize>,
    pub max_tokens: u32,
    /// Whether to request `max_tokens` tokens even if the model would end earlier.
    pub ignore_eos: bool,
    /// The seed of random prompts, which every request also contains as its sampling seed.
    pub seed: u64,
    pub temperature: f32,
    /// The API key, sent as a bearer token.
    pub api_key: Option<String>,
    /// The number of requests sent one by one before the run, which are not timed.
    pub num_warmups: usize,
    /// The number of runs, one after the other. Each has its own random prompts.
    pub num_repeats: usize,
    /// A request fails when the server sends nothing for this long.
    pub idle_timeout: Duration,
    pub files: ReportFiles,
    /// The objectives of goodput. A request is good if it meets all of them.
    pub goodput: Vec<Objective>,
    /// Percentiles to report beside the median, p95 and p99.
    pub percentiles: Vec<f64>,
}

impl Default for BenchServeOptions {
    fn default() -> Self {
        Self {
            base_url: "http://127.0.0.1:8000".into(),
            tls: None,
            model: None,
            endpoint: Endpoint::Completions,
            prompts: PromptSource::Random(RandomPrompts::default()),
            pre_tokenize: false,
            num_prompts: 100,
            request_rate: None,
            burstiness: 1.0,
            submit_interval: None,
            goodput: Vec::new(),
            percentiles: Vec::new(),
            max_concurrency: None,
            max_tokens: 128,
            ignore_eos: false,
            seed: 0,
            temperature: 0.0,
            api_key: None,
            num_warmups: 1,
            num_repeats: 1,
            idle_timeout: Duration::from_secs(600),
            files: ReportFiles::default(),
        }
    }
}

impl BenchServeOptions {
    pub(super) fn check(&self) -> Result<(), BenchError> {
        let positive = [
            ("num-prompts", self.num_prompts),
            ("max-concurrency", self.max_concurrency.unwrap_or(1)),
            ("max-tokens", self.max_tokens as usize),
            ("repeats", self.num_repeats),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(BenchError::Option(format!("--{name} must be at least 1")));
        }
        let mut above_zero = vec![
            ("request-rate", self.request_rate.unwrap_or(1.0)),
            ("burstiness", self.burstiness),
        ];
        if let PromptSource::Trace {
            time_scale,
            length_scale,
            ..
        } = self.prompts
        {
            above_zero.push(("time-scale", time_scale));
            above_zero.push(("length-scale", length_scale));
        }
        if let Some((name, _)) = above_zero
            .iter()
            .find(|(_, value)| !(*value > 0.0 && value.is_finite()))
        {
            return Err(BenchError::Option(format!("--{name} must be above 0")));
        }
        if self.endpoint == Endpoint::Chat && self.pre_tokenize {
            let reason = "--pre-tokenize needs --endpoint completions: a conversation is text";
            return Err(BenchError::Option(reason.into()));
        }
        match &self.prompts {
            PromptSource::Random(random) => {
                random.check(self.num_warmups + self.num_repeats * self.num_prompts)
            }
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Endpoint {
    /// `/v1/completions`
    #[default]
    Completions,
    /// `/v1/chat/completions`, with each prompt as one user message.
    Chat,
}

impl Endpoint {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
        }
    }

    /// The name of the endpoint in reports of `vllm bench serve`.
    pub(super) fn backend(self) -> &'static str {
        match self {
            Self::Completions => "openai",
            Self::Chat => "openai-chat",
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum PromptSource {
    /// A file with one prompt per line. Lines of a `.jsonl` file are objects with a `prompt`, which
    /// is text or a list of token ids.
    File(PathBuf),
    Random(RandomPrompts),
    /// A phrase: prompt i repeats it `repeats[i % repeats.len()]` times.
    Repeats {
        phrase: String,
        repeats: Vec<usize>,
    },
    /// A trace, whose times and lengths are multiplied by factors. The prompts share prefixes as in the trace.
    Trace {
        file: PathBuf,
        time_scale: f64,
        length_scale: f64,
    },
}
