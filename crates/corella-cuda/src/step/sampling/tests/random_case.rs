//! Random draws, and the reference's results.

use std::sync::Arc;

use corella_core::{RequestId, SamplingParams, SlotId, SlotStart, TokenId, TokenRules};
use corella_model::{SampleRequest, Sampler, score};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// In [0, 1).
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 24) as f32
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    fn token(&mut self, vocab_size: usize) -> TokenId {
        self.below(vocab_size) as TokenId
    }

    fn logits(&mut self, len: usize) -> Vec<f32> {
        let scale = self.pick(&[0.01, 1.0, 4.0, 20.0, 90.0]);
        // A sum of uniform numbers is nearly normal, as logits are.
        let mut logits: Vec<f32> = (0..len)
            .map(|_| ((0..4).map(|_| self.unit()).sum::<f32>() - 2.0) * scale)
            .collect();
        match self.below(8) {
            0 => logits.iter_mut().for_each(|logit| *logit = logit.round()),
            1 => logits.fill(self.pick(&[-3.25, 0.0, -0.0, 12.0])),
            2 => {
                let best = self.below(len);
                logits[best] = 30.0 * scale;
            }
            3 => logits[len / 3..].fill(f32::NEG_INFINITY),
            4 => logits.iter_mut().for_each(|logit| *logit *= 1e37),
            _ => {}
        }
        if self.one_in(25) {
            logits.fill(f32::NEG_INFINITY);
        }
        if self.one_in(25) {
            for _ in 0..3 {
                let at = self.below(len);
                logits[at] = self.pick(&[f32::NAN, f32::INFINITY]);
            }
        }
        logits
    }

    fn sampling(&mut self, vocab_size: usize) -> SamplingParams {
        let mut sampling = SamplingParams {
            temperature: self.pick(&[0.0, 1.0, 0.7, 0.7, 1.5, 0.01, 40.0]),
            seed: self.next(),
            choice: self.below(3) as u32,
            ..SamplingParams::GREEDY
        };
        if self.one_in(20) {
            sampling.temperature = self.pick(&[f32::MIN_POSITIVE, 1e-40, 1e6, f32::MAX]);
        }
        if self.one_in(3) {
            sampling.top_k = self.pick(&[1, 2, 20, 50, 300, 2500, u32::MAX]);
        }
        if self.one_in(2) {
            sampling.top_p = self.pick(&[0.0, 0.01, 0.5, 0.9, 0.95, 0.999, 0.999_999_94, 1e-30]);
        }
        if self.one_in(3) {
            sampling.min_p = self.pick(&[0.02, 0.3, 1.0, 1.5]);
        }
        if self.one_in(3) {
            sampling.logprobs = Some(self.pick(&[0, 1, 5, 20, 3000]));
        }
        if self.one_in(4) {
            sampling.presence_penalty = self.pick(&[0.5, -0.3]);
        }
        if self.one_in(4) {
            sampling.frequency_penalty = self.pick(&[0.2, -0.1, 1.9]);
        }
        if self.one_in(4) {
            sampling.repetition_penalty = self.pick(&[1.3, 0.8, 2.0]);
        }
        if self.one_in(4) {
            sampling.rules = Some(Arc::new(self.rules(vocab_size)));
        }
        sampling
    }

    /// Some tokens of the vocabulary, and occasionally one beyond it.
    fn tokens(&mut self, max_len: usize, vocab_size: usize) -> Vec<TokenId> {
        let len = self.below(max_len + 1);
        (0..len).map(|_| self.token(vocab_size + 2)).collect()
    }

    fn rules(&mut self, vocab_size: usize) -> TokenRules {
        let mut rules = TokenRules::new();
        if self.one_in(2) {
            let max_len = self.pick(&[1, 5, vocab_size]);
            rules = rules.with_allowed(self.tokens(max_len, vocab_size));
        }
        if self.one_in(2) {
            // Few distinct tokens, so that sequences occur.
            let sequences = (0..30).map(|_| self.tokens(3, 9)).collect();
            rules = rules.with_banned(sequences);
        }
        if self.one_in(2) {
            let tokens = self.tokens(40, vocab_size.min(60));
            let bias = |token| (token, self.unit() * 20.0 - 10.0);
            rules = rules.with_bias(tokens.into_iter().map(bias).collect());
        }
        rules
    }
}

/// A draw, or a score of a token.
#[derive(Clone, Debug)]
pub struct Case {
    pub logits: Vec<f32>,
    pub start: SlotStart,
    pub mask: Option<Box<[u32]>>,
    pub score: Option<TokenId>,
}

impl Case {
    /// A case with logits and sampling parameters alone.
    pub fn plain(logits: Vec<f32>, sampling: SamplingParams) -> Self {
        Self {
            logits,
            start: SlotStart {
                slot: SlotId(0),
                request: RequestId(0),
                num_prompt_tokens: 0,
                cached_tokens: Vec::new(),
                min_tokens: 0,
                masked_until_min_tokens: Arc::new([]),
                adapter: None,
                snapshot: None,
                sampling,
            },
            mask: None,
            score: None,
        }
    }

    pub fn new(random: &mut Random, vocab_size: usize) -> Self {
        let sampling = random.sampling(vocab_size);
        let len = random.pick(&[0, 1, 7, 300]);
        let range = random.pick(&[9, vocab_size]);
        let history: Vec<TokenId> = (0..len)
            .map(|_| random.token(range.min(vocab_size)))
            .collect();
        let start = SlotStart {
            slot: SlotId(0),
            request: RequestId(0),
            num_prompt_tokens: random.below(len + 1) as u32,
            cached_tokens: history,
            min_tokens: random.pick(&[0, 0, 3, 1000]),
            masked_until_min_tokens: random.tokens(3, vocab_size).into(),
            adapter: None,
            snapshot: None,
            sampling,
        };
        let num_words = random.pick(&[vocab_size.div_ceil(32), vocab_size.div_ceil(64)]);
        let density = random.pick(&[1, 3, 6]);
        let mut word = || (0..density).fold(u32::MAX, |word, _| word & random.next() as u32);
        let words: Box<[u32]> = (0..num_words).map(|_| word()).collect();
        let mask = random.one_in(6).then_some(words);
        let mut score = None;
        let mut start = start;
        if random.one_in(8) {
            start.sampling.prompt_logprobs = Some(random.pick(&[0, 1, 20, 2500]));
            score = Some(random.token(vocab_size));
        }
        Self {
            logits: random.logits(vocab_size),
            start,
            mask,
            score,
        }
    }

    /// The reference's result, in a text with all bits.
    pub fn expected(&self) -> String {
        if let Some(token) = self.score {
            let num_top = self.start.sampling.prompt_logprobs.unwrap() as usize;
            return format!("{:?}", score(&self.logits, token, num_top));
        }
        let request = SampleRequest {
            params: &self.start.sampling,
            history: &self.start.cached_tokens,
            num_prompt_tokens: self.start.num_prompt_tokens,
            min_tokens: self.start.min_tokens,
            masked_until_min_tokens: &self.start.masked_until_min_tokens,
            allowed: self.mask.as_deref(),
        };
        format!(
            "{:?}",
            Sampler::new().sample(&mut self.logits.clone(), request)
        )
    }
}
