//! The mock executor's model: logits that are a hash of the sequence.

use std::cell::OnceCell;
use std::sync::Arc;
use std::time::Duration;

use corella_core::{
    HiddenState, KvGroup, Pooling, PromptLogprob, Sample, SamplingParams, SlotId, SlotStart,
    StepId, TokenId,
};

use crate::generator::mix;
use crate::{CostModel, MockScript, SampleRequest, Sampler, StepGate, score};

/// The settings of a mock executor and its model.
#[derive(Clone, Debug, Default)]
pub struct MockConfig {
    pub vocab_size: usize,
    /// The length of a hidden state.
    pub hidden_size: usize,
    pub num_pages: u32,
    pub page_size: u32,
    /// The KV groups. Each keeps every row, in pages of its own.
    pub kv_groups: Vec<KvGroup>,
    /// The number of snapshots of recurrent states; `None` for a model without recurrent layers.
    pub num_snapshots: Option<u32>,
    /// The number of layers. Each keeps every row. A step stores the layers one after the other, evenly over its time.
    pub num_layers: u32,
    /// Stands for the model's weights: two executors with the same seed are the same model.
    pub seed: u64,
    /// The duration of steps by the wall clock; `None` makes them as fast as possible.
    pub cost: Option<CostModel>,
    /// The number of pipeline stages. Each takes an equal part of a step's time, and works on other steps before and
    /// after. A step that needs a token of a step in flight waits for that token.
    pub num_stages: u32,
    /// The only tokens that are drawn, for example printable ones; if empty, all tokens are.
    pub drawable: Vec<TokenId>,
    pub end: Option<MockEnd>,
    pub echo: Option<MockEcho>,
    /// Outputs that are given word for word. All other outputs are made up.
    pub script: MockScript,
    pub faults: Vec<(StepId, Fault)>,
    /// The gate that steps pass when they return.
    pub gate: StepGate,
}

/// Where sequences end before the limit of the request.
#[derive(Clone, Debug)]
pub struct MockEnd {
    /// The token that ends a sequence. It is not drawn anywhere else.
    pub token: TokenId,
    /// The probability that the sequence ends at a position, decided by a hash of the history.
    pub probability: f64,
    /// The largest output length, in tokens.
    pub at_output: Option<u32>,
}

/// Makes outputs repeat themselves, as when a model copies from its prompt.
#[derive(Clone, Copy, Debug)]
pub struct MockEcho {
    /// The distance in tokens to the repeated token.
    pub distance: usize,
    /// The probability that a position repeats, decided by a hash of the history. Other positions
    /// are drawn as usual.
    pub probability: f64,
}

/// A fault in a step, while the engine waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The step fails.
    Fail,
    /// The executor panics.
    Panic,
    /// The step returns late, with a correct result.
    Hang(Duration),
    /// No token can be drawn for the first span that samples.
    Undrawn,
    /// This step and all later ones fail.
    Lost,
}

/// The tokens of a request so far.
pub(crate) struct Sequence {
    /// The start of the request, without its cached tokens.
    pub start: SlotStart,
    pub tokens: Vec<TokenId>,
    /// `chains[i]` hashes the adapter's name and `tokens[..=i]`.
    pub chains: Vec<u64>,
    /// The index of the reply whose cue is in the prompt. Set at its first look-up.
    pub cued_reply: OnceCell<Option<usize>>,
}

impl MockConfig {
    pub fn new(vocab_size: usize, num_pages: u32, page_size: u32) -> Self {
        Self {
            vocab_size,
            hidden_size: 16,
            num_pages,
            page_size,
            kv_groups: vec![KvGroup::default()],
            num_layers: 1,
            num_stages: 1,
            ..Self::default()
        }
    }

    /// The expected tokens of a request, computed without pages, batches or steps. The tokens continue after an end
    /// token.
    pub fn lone_tokens(
        &self,
        prompt: &[TokenId],
        sampling: &SamplingParams,
        num_tokens: usize,
    ) -> Vec<TokenId> {
        let mut sequence = Sequence::new(self, self.lone_start(prompt, sampling));
        let mut logits = Vec::new();
        for _ in 0..num_tokens {
            let chain = sequence.chains.last().copied().unwrap_or(0);
            let drawn = self.draw(&sequence, sequence.tokens.len(), chain, None, &mut logits);
            sequence.push(
                self,
                drawn.expect("something is drawable without a mask").token,
            );
        }
        sequence.tokens.split_off(prompt.len())
    }

    /// The same, with each token drawn through the mask that `allowed` makes from the output so far. Ends when
    /// `allowed` gives no mask.
    pub fn lone_masked_tokens(
        &self,
        prompt: &[TokenId],
        sampling: &SamplingParams,
        mut allowed: impl FnMut(&[TokenId]) -> Option<Box<[u32]>>,
    ) -> Vec<TokenId> {
        let mut sequence = Sequence::new(self, self.lone_start(prompt, sampling));
        let mut logits = Vec::new();
        while let Some(mask) = allowed(&sequence.tokens[prompt.len()..]) {
            let (num_tokens, chain) = (sequence.tokens.len(), sequence.chains.last());
            let chain = chain.copied().unwrap_or(0);
            let drawn = self.draw(&sequence, num_tokens, chain, Some(&mask), &mut logits);
            sequence.push(self, drawn.expect("the mask allows something").token);
        }
        sequence.tokens.split_off(prompt.len())
    }

    fn chain(&self, before: Option<u64>, token: TokenId, position: usize) -> u64 {
        let before = before.unwrap_or_else(|| mix(self.seed, 1));
        mix(before, u64::from(token) << 32 | position as u64)
    }

    /// The expected log-probabilities of a prompt's tokens, except the first.
    pub fn lone_prompt_logprobs(&self, prompt: &[TokenId], num_top: usize) -> Vec<PromptLogprob> {
        let sequence = Sequence::new(self, self.lone_start(prompt, &SamplingParams::GREEDY));
        let mut logits = Vec::new();
        let score = |(at, &token): (usize, &TokenId)| {
            let chain = sequence.chains[at];
            self.fill_logits(&sequence, at + 1, chain, &mut logits);
            score(&logits, token, num_top).expect("a lone prompt has logits")
        };
        prompt.iter().skip(1).enumerate().map(score).collect()
    }

    /// The expected hidden state of a prompt.
    pub fn lone_hidden_state(&self, prompt: &[TokenId], pooling: Pooling) -> HiddenState {
        let sequence = Sequence::new(self, self.lone_start(prompt, &SamplingParams::GREEDY));
        let state = |position: usize| self.hidden_state(sequence.chains[position]);
        if pooling == Pooling::Max {
            let larger = |a: Vec<f32>, b: Vec<f32>| {
                let pairs = a.into_iter().zip(b);
                pairs.map(|(a, b)| a.max(b)).collect()
            };
            let states = (0..prompt.len()).map(state);
            return states.reduce(larger).unwrap_or_default().into();
        }
        let (first, end) = match pooling {
            Pooling::LastToken => (prompt.len() - 1, prompt.len()),
            Pooling::FirstToken => (0, 1),
            Pooling::Mean | Pooling::Max => (0, prompt.len()),
        };
        let mut sum = vec![0.0; self.hidden_size];
        for position in first..end {
            for (sum, value) in sum.iter_mut().zip(state(position)) {
                *sum += f64::from(value);
            }
        }
        let num_tokens = (end - first) as f64;
        sum.into_iter()
            .map(|sum| (sum / num_tokens) as f32)
            .collect()
    }

    /// The hidden state of the token with this hash: values from -1 to 1.
    pub(crate) fn hidden_state(&self, chain: u64) -> Vec<f32> {
        let value = |at| (mix(!chain, at) >> 40) as f32 / (1 << 23) as f32 - 1.0;
        (0..self.hidden_size as u64).map(value).collect()
    }

    fn lone_start(&self, prompt: &[TokenId], sampling: &SamplingParams) -> SlotStart {
        SlotStart {
            slot: SlotId(0),
            request: Default::default(),
            sampling: sampling.clone(),
            num_prompt_tokens: prompt.len() as u32,
            cached_tokens: prompt.to_vec(),
            min_tokens: 0,
            masked_until_min_tokens: Arc::new([]),
            adapter: None,
            snapshot: None,
        }
    }

    /// Draws the token that follows the first `num_tokens` tokens of a sequence.
    pub(crate) fn draw(
        &self,
        sequence: &Sequence,
        num_tokens: usize,
        chain: u64,
        allowed: Option<&[u32]>,
        logits: &mut Vec<f32>,
    ) -> Result<Sample, String> {
        self.fill_logits(sequence, num_tokens, chain, logits);
        let request = SampleRequest {
            params: &sequence.start.sampling,
            history: &sequence.tokens[..num_tokens],
            num_prompt_tokens: sequence.start.num_prompt_tokens,
            min_tokens: sequence.start.min_tokens,
            masked_until_min_tokens: &sequence.start.masked_until_min_tokens,
            allowed,
        };
        let sampled = Sampler::new().sample(logits, request);
        sampled.map_err(|error| format!("slot {}: {error}", sequence.start.slot))
    }

    /// Computes the logits after the first `num_tokens` tokens of a sequence.
    pub(crate) fn fill_logits(
        &self,
        sequence: &Sequence,
        num_tokens: usize,
        chain: u64,
        logits: &mut Vec<f32>,
    ) {
        let logit = |token: TokenId| (mix(chain, u64::from(token)) >> 40) as f32 / (1 << 21) as f32;
        logits.clear();
        logits.resize(self.vocab_size, f32::NEG_INFINITY);
        if self.drawable.is_empty() {
            for (token, value) in logits.iter_mut().enumerate() {
                *value = logit(token as TokenId);
            }
        }
        for &token in &self.drawable {
            logits[token as usize] = logit(token);
        }
        let history = &sequence.tokens[..num_tokens];
        let chance = |what: u64| (mix(chain, what) >> 11) as f64 / (1u64 << 53) as f64;
        if let Some(echo) = &self.echo
            && let Some(from) = num_tokens.checked_sub(echo.distance)
            && chance(u64::MAX - 1) < echo.probability
        {
            logits[history[from] as usize] = 100.0;
        }
        let num_output = (num_tokens as u32 + 1).saturating_sub(sequence.start.num_prompt_tokens);
        let dictation = self.script.reply(sequence);
        let dictated = dictation.and_then(|tokens| tokens.get(num_output.checked_sub(1)? as usize));
        if let Some(&token) = dictated {
            logits[token as usize] = 1000.0;
        }
        if let Some(end) = &self.end {
            let ends = match dictation {
                Some(_) => dictated.is_none(),
                None => {
                    chance(u64::MAX) < end.probability
                        || end.at_output.is_some_and(|at| num_output >= at)
                }
            };
            logits[end.token as usize] = if ends { 1000.0 } else { f32::NEG_INFINITY };
        }
    }
}

impl Sequence {
    pub fn new(config: &MockConfig, mut start: SlotStart) -> Self {
        let cached_tokens = std::mem::take(&mut start.cached_tokens);
        let mut sequence = Self {
            start,
            tokens: Vec::new(),
            chains: Vec::new(),
            cued_reply: OnceCell::new(),
        };
        for token in cached_tokens {
            sequence.push(config, token);
        }
        sequence
    }

    /// Removes all tokens after the first `num_tokens`.
    pub fn truncate(&mut self, num_tokens: usize) {
        self.tokens.truncate(num_tokens);
        self.chains.truncate(num_tokens);
    }

    pub fn push(&mut self, config: &MockConfig, token: TokenId) {
        let before = self
            .chains
            .last()
            .copied()
            .or_else(|| self.start.adapter.as_deref().map(hash_name));
        let chain = config.chain(before, token, self.tokens.len());
        self.tokens.push(token);
        self.chains.push(chain);
    }
}

fn hash_name(name: &str) -> u64 {
    name.bytes()
        .fold(1, |hash, byte| mix(hash, u64::from(byte)))
}
