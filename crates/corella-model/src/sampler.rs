//! The reference sampler: one position's logits to one token.
//!
//! The result is a function of the logits' bits and the request alone, equal on every
//! machine: nothing here but IEEE additions, multiplications, divisions and comparisons in a
//! fixed order, with an exponential and a logarithm of our own.

use std::cmp::Ordering;
use std::fmt;

use corella_core::{Logprobs, Sample, SamplingParams, TokenId};

use crate::generator::uniform;

#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    pub params: &'a SamplingParams,
    /// Every token before the one to draw: prompt, then output. Its length is the position
    /// that keys the generator.
    pub history: &'a [TokenId],
    pub num_prompt_tokens: u32,
    /// Output tokens before which `masked_until_min_tokens` cannot be drawn.
    pub min_tokens: u32,
    pub masked_until_min_tokens: &'a [TokenId],
    /// As `TokenMask::allowed`; tokens beyond its end are not allowed.
    pub allowed: Option<&'a [u32]>,
}

/// Nothing can be drawn from such logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum SampleError {
    /// NaN or plus infinity. (Minus infinity is a token that cannot be drawn.)
    NotFinite { token: TokenId, value: f32 },
    /// Mask and model together leave no token.
    NothingAllowed,
}

impl fmt::Display for SampleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite { token, value } => {
                write!(f, "the logit of token {token} is {value}")
            }
            Self::NothingAllowed => f.write_str("no token is allowed here"),
        }
    }
}

impl std::error::Error for SampleError {}

/// Masks, penalties, then greedy or temperature → top-k → top-p → min-p → draw, as in
/// Transformers. Equal logits rank by id, lowest first, so that top-k keeps exactly k.
/// Log-probabilities are those after masks and penalties.
pub fn sample(logits: &mut [f32], request: SampleRequest<'_>) -> Result<Sample, SampleError> {
    let params = request.params;
    mask(logits, &request);
    if params.has_penalties() {
        penalise(logits, &request);
    }
    let max = finite_max(logits)?;
    let token = if params.temperature > 0.0 {
        let position = request.history.len() as u32;
        let u = uniform(params.seed, params.choice, position);
        if params.top_k == 0 && params.top_p >= 1.0 {
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

fn mask(logits: &mut [f32], request: &SampleRequest<'_>) {
    let num_output_tokens = request
        .history
        .len()
        .saturating_sub(request.num_prompt_tokens as usize);
    if num_output_tokens < request.min_tokens as usize {
        for &token in request.masked_until_min_tokens {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
    if let Some(allowed) = request.allowed {
        for (word, logits) in logits.chunks_mut(32).enumerate() {
            let allowed = allowed.get(word).copied().unwrap_or(0);
            for (bit, logit) in logits.iter_mut().enumerate() {
                if allowed >> bit & 1 == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

fn penalise(logits: &mut [f32], request: &SampleRequest<'_>) {
    const PENDING: u32 = 1 << 31;
    let params = request.params;
    let mut counts = vec![0u32; logits.len()];
    for (position, &token) in request.history.iter().enumerate() {
        if let Some(count) = counts.get_mut(token as usize) {
            let is_output = position >= request.num_prompt_tokens as usize;
            *count = (*count | PENDING) + u32::from(is_output);
        }
    }
    for &token in request.history {
        let token = token as usize;
        if counts.get(token).is_none_or(|count| count & PENDING == 0) {
            continue;
        }
        counts[token] &= !PENDING;
        let logit = &mut logits[token];
        if *logit > 0.0 {
            *logit /= params.repetition_penalty;
        } else {
            *logit *= params.repetition_penalty;
        }
        if counts[token] > 0 {
            *logit -= params.frequency_penalty * counts[token] as f32;
            *logit -= params.presence_penalty;
        }
    }
}

/// Short enough for the first-level cache, long enough to be worth vector code.
const BLOCK: usize = 256;
const LANES: usize = 16;

fn finite_max(logits: &[f32]) -> Result<f32, SampleError> {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let mut drawable = true;
    for chunk in logits.chunks(LANES) {
        for (lane, &logit) in lanes.iter_mut().zip(chunk) {
            *lane = if logit > *lane { logit } else { *lane };
            drawable &= logit < f32::INFINITY;
        }
    }
    if !drawable {
        let not_finite = logits
            .iter()
            .enumerate()
            .find(|(_, l)| l.is_nan() || **l == f32::INFINITY);
        if let Some((token, &value)) = not_finite {
            return Err(SampleError::NotFinite {
                token: token as TokenId,
                value,
            });
        }
    }
    let max = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if max == f32::NEG_INFINITY {
        return Err(SampleError::NothingAllowed);
    }
    Ok(max)
}

fn first_equal(logits: &[f32], max: f32) -> TokenId {
    logits
        .iter()
        .position(|&logit| logit == max)
        .expect("max is one of the logits") as TokenId
}

/// The inverse of the cumulative distribution in the order of ids. Weights are computed a
/// block at a time, and again for the one block that holds the result.
fn draw_from_all(logits: &[f32], max: f32, params: &SamplingParams, u: f64) -> TokenId {
    let mut weights = [0.0; BLOCK];
    let sums: Vec<f64> = logits
        .chunks(BLOCK)
        .map(|block| {
            sum(weigh(
                block,
                max,
                params.temperature,
                params.min_p,
                &mut weights,
            ))
        })
        .collect();
    let mut rest = u * sums.iter().sum::<f64>();
    let mut drawn = first_equal(logits, max);
    for (index, (block, &sum)) in logits.chunks(BLOCK).zip(&sums).enumerate() {
        if rest >= sum {
            rest -= sum;
            continue;
        }
        let weights = weigh(block, max, params.temperature, params.min_p, &mut weights);
        for (offset, &weight) in weights.iter().enumerate() {
            // Rounding may leave a remainder at the end; then the last possible token wins.
            if weight > 0.0 {
                drawn = (index * BLOCK + offset) as TokenId;
                rest -= f64::from(weight);
                if rest < 0.0 {
                    return drawn;
                }
            }
        }
        return drawn;
    }
    drawn
}

/// Top-k and top-p need the most likely tokens in order, and no others.
fn draw_from_leading(logits: &[f32], max: f32, params: &SamplingParams, u: f64) -> TokenId {
    let weight = |logit: f32| f64::from(exp((logit - max) / params.temperature));
    let (mut kept, total) = if params.top_k > 0 {
        let kept = leading(logits, params.top_k as usize);
        let total = kept.iter().map(|&(_, logit)| weight(logit)).sum();
        (kept, total)
    } else {
        let mut weights = [0.0; BLOCK];
        let total: f64 = logits
            .chunks(BLOCK)
            .map(|block| sum(weigh(block, max, params.temperature, 0.0, &mut weights)))
            .sum();
        let mut count = 256;
        let kept = loop {
            let kept = leading(logits, count);
            let sum: f64 = kept.iter().map(|&(_, logit)| weight(logit)).sum();
            if sum >= f64::from(params.top_p) * total || count >= logits.len() {
                break kept;
            }
            count *= 8;
        };
        (kept, total)
    };

    let target = f64::from(params.top_p) * total;
    let (mut num_kept, mut kept_sum) = (0, 0.0);
    for &(_, logit) in &kept {
        let weight = weight(logit);
        // The first is always kept: its weight is 1.
        if num_kept > 0 && (kept_sum >= target || weight < f64::from(params.min_p)) {
            break;
        }
        num_kept += 1;
        kept_sum += weight;
    }
    kept.truncate(num_kept);

    let mut rest = u * kept_sum;
    for &(token, logit) in &kept {
        rest -= weight(logit);
        if rest < 0.0 {
            return token;
        }
    }
    // Rounding only: `u` is below 1.
    kept[num_kept - 1].0
}

/// The `count` most likely tokens in order, without sorting the rest: what is below the
/// `count`-th best so far is passed over, and the others are thinned out now and then.
fn leading(logits: &[f32], count: usize) -> Vec<(TokenId, f32)> {
    fn rank(a: &(TokenId, f32), b: &(TokenId, f32)) -> Ordering {
        b.1.partial_cmp(&a.1)
            .unwrap_or(Ordering::Equal)
            .then(a.0.cmp(&b.0))
    }
    let count = count.min(logits.len());
    if count == 0 {
        return Vec::new();
    }
    let mut best = Vec::with_capacity((2 * count).min(logits.len()));
    let mut floor = f32::NEG_INFINITY;
    for (token, &logit) in logits.iter().enumerate() {
        if logit > floor {
            if best.len() == 2 * count {
                best.select_nth_unstable_by(count - 1, rank);
                best.truncate(count);
                floor = best[count - 1].1;
                if logit <= floor {
                    continue;
                }
            }
            best.push((token as TokenId, logit));
        }
    }
    best.sort_unstable_by(rank);
    best.truncate(count);
    best
}

fn log_probabilities(logits: &[f32], max: f32, token: TokenId, num_top: usize) -> Logprobs {
    let mut weights = [0.0; BLOCK];
    let total: f64 = logits
        .chunks(BLOCK)
        .map(|block| sum(weigh(block, max, 1.0, 0.0, &mut weights)))
        .sum();
    let log_total = ln(total);
    let log_probability = |logit: f32| (f64::from(logit) - f64::from(max) - log_total) as f32;
    Logprobs {
        token: log_probability(logits[token as usize]),
        top: leading(logits, num_top)
            .into_iter()
            .map(|(token, logit)| (token, log_probability(logit)))
            .collect(),
    }
}

/// Weights relative to the most likely token; 0 below `min_p`.
fn weigh<'a>(
    block: &[f32],
    max: f32,
    temperature: f32,
    min_p: f32,
    weights: &'a mut [f32; BLOCK],
) -> &'a [f32] {
    let weights = &mut weights[..block.len()];
    for (weight, &logit) in weights.iter_mut().zip(block) {
        let value = exp((logit - max) / temperature);
        *weight = if value < min_p { 0.0 } else { value };
    }
    weights
}

fn sum(weights: &[f32]) -> f64 {
    let mut lanes = [0.0f64; LANES];
    for chunk in weights.chunks(LANES) {
        for (lane, &weight) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(weight);
        }
    }
    lanes.into_iter().sum()
}

/// e^x for x ≤ 0, within 2 units in the last place; 0 where the result would be subnormal.
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that `n * LN_2_HIGH` is exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding it rounds to an integer, which is then in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x > -87.3 { x } else { -87.3 };
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    // Taylor to the sixth power: |r| ≤ ln 2 / 2, the error is below 1.3e-7.
    let p = 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    let power = f32::from_bits(((n as i32 + 127) as u32) << 23);
    if x > -87.3 { p * power } else { 0.0 }
}

/// Natural logarithm of a number ≥ 1.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits(bits & !(0x7ff << 52) | 1023 << 52);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh((m - 1) / (m + 1)); |s| ≤ 0.172, so the omitted term is below 1e-17.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut series = 0.0;
    for odd in (1..=21).rev().step_by(2) {
        series = series * square + 1.0 / f64::from(odd);
    }
    2.0 * s * series + exponent as f64 * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests;
