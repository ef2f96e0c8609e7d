//! The reference sampler: draws one token from the logits of a position.
//!
//! The result depends only on the bits of the logits and the request, and is the same on every machine: it uses IEEE
//! additions, multiplications, divisions and comparisons in a fixed order, with an exponential and a logarithm of its
//! own.

mod adjustment;
mod score;
mod vector;

use std::cmp::Ordering;

use corella_core::{Logprobs, NOTHING_ALLOWED, Sample, SamplingParams, TokenId};

use crate::generator::uniform;
use adjustment::{TokenCounts, adjust};
use vector::{exp, ln};

pub use score::score;

/// The input of a draw besides the logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    pub params: &'a SamplingParams,
    /// Every token before the one to draw: the prompt, then the output. The number of these tokens is the position that
    /// keys the generator.
    pub history: &'a [TokenId],
    pub num_prompt_tokens: u32,
    /// The number of output tokens before which `masked_until_min_tokens` cannot be drawn.
    pub min_tokens: u32,
    pub masked_until_min_tokens: &'a [TokenId],
    /// A mask as in `TokenMask::allowed`; tokens beyond its end are not allowed.
    pub allowed: Option<&'a [u32]>,
}

impl SampleRequest<'_> {
    /// The output so far.
    fn output(&self) -> &[TokenId] {
        let num_prompt_tokens = self.num_prompt_tokens as usize;
        self.history.get(num_prompt_tokens..).unwrap_or_default()
    }
}

/// The reason for which no token can be drawn from some logits.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A logit is NaN or plus infinity. (Minus infinity marks a token that cannot be drawn.)
    #[error("the logit of token {token} is {value}")]
    NotFinite { token: TokenId, value: f32 },
    /// The mask and the model together leave no token.
    #[error("{}", NOTHING_ALLOWED)]
    NothingAllowed,
}

/// Draws tokens, and keeps the memory for draws. Earlier draws do not affect later ones.
#[derive(Debug, Default)]
pub struct Sampler {
    counts: TokenCounts,
}

impl Sampler {
    pub fn new() -> Self {
        Self::default()
    }

    /// Draws a token: masks, token rules, penalties, then greedy or temperature → top-k → top-p → min-p → draw, as in
    /// Transformers. Equal logits rank by id, lowest first, so that top-k keeps exactly k. Log-probabilities are taken
    /// after masks, rules and penalties.
    pub fn sample(
        &mut self,
        logits: &mut [f32],
        request: SampleRequest<'_>,
    ) -> Result<Sample, SampleError> {
        let params = request.params;
        adjust(logits, &request, &mut self.counts);
        let max = finite_max(logits)?;
        let token = if params.temperature > 0.0 {
            let position = request.history.len() as u32;
            let u = uniform(params.seed, params.choice, position);
            if params.top_k == 0 {
                draw_from_all(logits, max, params, u)
            } else {
                draw_from_leading(logits, max, params, u)
            }
        } else {
            first_equal(logits, max)
        };
        let logprobs = params
            .logprobs
            .map(|num_top| Box::new(log_probabilities(logits, max, token, num_top as usize)));
        Ok(Sample { token, logprobs })
    }
}

fn finite_max(logits: &[f32]) -> Result<f32, SampleError> {
    let (max, drawable) = vector::max(logits);
    if !drawable {
        let is_bad = |logit: f32| logit.is_nan() || logit == f32::INFINITY;
        let bad = logits.iter().enumerate().find(|(_, logit)| is_bad(**logit));
        if let Some((token, &value)) = bad {
            return Err(SampleError::NotFinite {
                token: token as TokenId,
                value,
            });
        }
    }
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NothingAllowed);
    }
    Ok(max)
}

fn first_equal(logits: &[f32], max: f32) -> TokenId {
    logits
        .iter()
        .position(|&logit| logit == max)
        .expect("the maximum is not among the logits") as TokenId
}

/// Weights relative to the most likely token's, computed from logits in blocks. Every pass computes the weights anew,
/// so that they need no memory.
struct Weights<'a> {
    logits: &'a [f32],
    max: f32,
    temperature: f32,
}

/// The number of weights in a block: few enough for the first-level cache, and enough for vector code to be faster.
const BLOCK: usize = 256;

impl Weights<'_> {
    fn num_blocks(&self) -> usize {
        self.logits.len().div_ceil(BLOCK)
    }

    fn block<'b>(&self, index: usize, buffer: &'b mut [f32; BLOCK]) -> &'b mut [f32] {
        let start = index * BLOCK;
        let logits = &self.logits[start..self.logits.len().min(start + BLOCK)];
        let weights = &mut buffer[..logits.len()];
        vector::weigh(logits, self.max, self.temperature, weights);
        weights
    }

    fn total(&self) -> f64 {
        let mut buffer = [0.0; BLOCK];
        (0..self.num_blocks())
            .map(|index| vector::sum(self.block(index, &mut buffer)))
            .sum()
    }
}

/// The cut of top-p and min-p: keeps tokens with a weight above `weight`, and tokens with exactly this weight up to the
/// id `last`.
struct Cut {
    weight: f32,
    last: TokenId,
}

impl Cut {
    fn new(weights: &Weights<'_>, params: &SamplingParams) -> Self {
        let nucleus = if params.top_p < 1.0 {
            Self::nucleus(weights, f64::from(params.top_p))
        } else {
            Self {
                weight: 0.0,
                last: TokenId::MAX,
            }
        };
        // A min-p above 1 keeps the most likely token, like top-p of 0.
        let min_p = params.min_p.min(1.0);
        if min_p > nucleus.weight {
            Self {
                weight: min_p,
                last: TokenId::MAX,
            }
        } else {
            nucleus
        }
    }

    /// The smallest set of most likely tokens that holds `share` of the probability. Weights are
    /// summed by size class, and only the class in which the sum reaches the share is sorted.
    fn nucleus(weights: &Weights<'_>, share: f64) -> Self {
        // A class has 4 bits of mantissa, so its weights differ by less than 1/16.
        let class = |weight: f32| ((1.0f32.to_bits() - weight.to_bits()) >> 19) as usize;
        let mut sums = [0.0f64; (127 << 4) + 1];
        let mut buffer = [0.0; BLOCK];
        for index in 0..weights.num_blocks() {
            for &weight in weights.block(index, &mut buffer).iter() {
                sums[class(weight)] += f64::from(weight);
            }
        }
        let mut missing = share * sums.iter().sum::<f64>();
        let Some(last_class) = sums.iter().position(|&sum| {
            let reached = missing <= sum;
            if !reached {
                missing -= sum;
            }
            reached
        }) else {
            return Self {
                weight: 0.0,
                last: TokenId::MAX,
            };
        };

        let mut members: Vec<(TokenId, f32)> = Vec::new();
        for index in 0..weights.num_blocks() {
            for (offset, &weight) in weights.block(index, &mut buffer).iter().enumerate() {
                if class(weight) == last_class {
                    members.push(((index * BLOCK + offset) as TokenId, weight));
                }
            }
        }
        members.sort_unstable_by(by_rank);
        let reached = members.iter().position(|&(_, weight)| {
            missing -= f64::from(weight);
            missing <= 0.0
        });
        let (last, weight) = members[reached.unwrap_or(members.len() - 1)];
        Self { weight, last }
    }

    /// A block of weights, with 0 for weights that are cut off.
    fn block<'b>(
        &self,
        weights: &Weights<'_>,
        index: usize,
        buffer: &'b mut [f32; BLOCK],
    ) -> &'b [f32] {
        let block = weights.block(index, buffer);
        let start = (index * BLOCK) as TokenId;
        for (id, weight) in (start..).zip(block.iter_mut()) {
            if *weight < self.weight || *weight == self.weight && id > self.last {
                *weight = 0.0;
            }
        }
        block
    }
}

/// Draws by inverting the cumulative distribution in the order of ids.
fn draw_from_all(logits: &[f32], max: f32, params: &SamplingParams, u: f64) -> TokenId {
    let weights = Weights {
        logits,
        max,
        temperature: params.temperature,
    };
    let cut = Cut::new(&weights, params);
    let mut buffer = [0.0; BLOCK];
    let sums: Vec<f64> = (0..weights.num_blocks())
        .map(|index| vector::sum(cut.block(&weights, index, &mut buffer)))
        .collect();
    let mut rest = u * sums.iter().sum::<f64>();
    // Rounding may leave a remainder at the end of the last block. Its last token is then drawn.
    let last_block = sums.iter().rposition(|&sum| sum > 0.0).unwrap_or(0);
    let chosen = sums[..last_block].iter().position(|&sum| {
        let reached = rest < sum;
        if !reached {
            rest -= sum;
        }
        reached
    });
    let chosen = chosen.unwrap_or(last_block);
    let mut drawn = 0;
    for (offset, &weight) in cut.block(&weights, chosen, &mut buffer).iter().enumerate() {
        if weight > 0.0 {
            drawn = chosen * BLOCK + offset;
            rest -= f64::from(weight);
            if rest < 0.0 {
                break;
            }
        }
    }
    drawn as TokenId
}

/// Draws from the tokens of top-k, which are few enough to sort.
fn draw_from_leading(logits: &[f32], max: f32, params: &SamplingParams, u: f64) -> TokenId {
    let weight = |logit: f32| f64::from(exp((logit - max) / params.temperature));
    let mut kept = leading(logits, params.top_k as usize);
    let total: f64 = kept.iter().map(|&(_, logit)| weight(logit)).sum();
    let target = f64::from(params.top_p) * total;
    let (mut num_kept, mut kept_sum) = (0, 0.0);
    for &(_, logit) in &kept {
        let weight = weight(logit);
        // The first token is always kept: its weight is 1.
        let reached = params.top_p < 1.0 && kept_sum >= target;
        if num_kept > 0 && (reached || weight < f64::from(params.min_p)) {
            break;
        }
        num_kept += 1;
        kept_sum += weight;
    }
    kept.truncate(num_kept);

    let mut rest = u * kept_sum;
    let reached = kept.iter().find(|&&(_, logit)| {
        rest -= weight(logit);
        rest < 0.0
    });
    // Only rounding can pass the end, because `u` is below 1.
    reached.unwrap_or(&kept[num_kept - 1]).0
}

/// Orders tokens by logit, most likely first, and tokens with equal logits by id.
fn by_rank(a: &(TokenId, f32), b: &(TokenId, f32)) -> Ordering {
    b.1.partial_cmp(&a.1)
        .unwrap_or(Ordering::Equal)
        .then(a.0.cmp(&b.0))
}

/// The `count` most likely tokens in order, without sorting the rest: logits below the `count`-th best so far are
/// skipped, and the candidates are cut to `count` whenever their number has doubled.
fn leading(logits: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let mut best = Vec::with_capacity((2 * count).min(logits.len()));
    let mut floor = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > floor {
            if best.len() == 2 * count {
                best.select_nth_unstable_by(count - 1, by_rank);
                best.truncate(count);
                floor = best[count - 1].1;
                if logit <= floor {
                    continue;
                }
            }
            best.push((token as TokenId, logit));
        }
    }
    best.sort_unstable_by(by_rank);
    best.truncate(count);
    best
}

/// Returns 1 for the first token in the order of [`by_rank`].
fn rank(logits: &[f32], token: TokenId) -> u32 {
    let (before, rest) = logits.split_at(token as usize);
    let own = rest[0];
    let num_before = before.iter().filter(|&&logit| logit >= own).count();
    let num_behind = rest.iter().filter(|&&logit| logit > own).count();
    (1 + num_before + num_behind) as u32
}

fn log_probabilities(logits: &[f32], max: f32, token: TokenId, num_top: usize) -> Logprobs {
    let log_total = ln(Weights {
        logits,
        max,
        temperature: 1.0,
    }
    .total());
    let log_probability = |logit: f32| (f64::from(logit) - f64::from(max) - log_total) as f32;
    Logprobs {
        token: log_probability(logits[token as usize]),
        rank: rank(logits, token),
        top: leading(logits, num_top)
            .into_iter()
            .map(|(token, logit)| (token, log_probability(logit)))
            .collect(),
    }
}

#[cfg(test)]
mod tests;
