//! Compares the sampler with naive implementations of its rules.

use std::sync::Arc;

use corella_core::TokenRules;

use super::*;

const NO_HISTORY: [TokenId; 0] = [];

fn params(temperature: f32) -> SamplingParams {
    SamplingParams {
        temperature,
        ..SamplingParams::GREEDY
    }
}

fn request<'a>(params: &'a SamplingParams, history: &'a [TokenId]) -> SampleRequest<'a> {
    SampleRequest {
        params,
        history,
        num_prompt_tokens: 0,
        min_tokens: 0,
        masked_until_min_tokens: &[],
        allowed: None,
    }
}

fn sample(logits: &mut [f32], request: SampleRequest<'_>) -> Result<Sample, SampleError> {
    Sampler::new().sample(logits, request)
}

fn draw(logits: &[f32], params: &SamplingParams, history: &[TokenId]) -> TokenId {
    sample(&mut logits.to_vec(), request(params, history))
        .unwrap()
        .token
}

/// Pseudo-random logits in [-8, 8).
fn noise(seed: u64, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| (uniform(seed, 9, i as u32) * 16.0 - 8.0) as f32)
        .collect()
}

/// The share of each token in `num` draws at consecutive positions.
fn shares(logits: &[f32], params: &SamplingParams, num: usize) -> Vec<f64> {
    let history = vec![0; num];
    let mut shares = vec![0.0; logits.len()];
    for position in 0..num {
        shares[draw(logits, params, &history[..position]) as usize] += 1.0 / num as f64;
    }
    shares
}

fn softmax(logits: &[f32], temperature: f64) -> Vec<f64> {
    let weights: Vec<f64> = logits
        .iter()
        .map(|&l| (f64::from(l) / temperature).exp())
        .collect();
    let total: f64 = weights.iter().sum();
    weights.into_iter().map(|w| w / total).collect()
}

/// The tokens that a textbook implementation keeps: sort all, cut at k, at p, at min-p.
fn kept_by_sorting(logits: &[f32], params: &SamplingParams) -> Vec<usize> {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if params.top_k > 0 {
        ids.truncate(params.top_k as usize);
    }
    let leading: Vec<f32> = ids.iter().map(|&i| logits[i]).collect();
    let probabilities = softmax(&leading, f64::from(params.temperature));
    let mut before = 0.0;
    let mut kept = Vec::new();
    for (&id, &p) in ids.iter().zip(&probabilities) {
        if before >= f64::from(params.top_p) && !kept.is_empty() {
            break;
        }
        if p / probabilities[0] >= f64::from(params.min_p) {
            kept.push(id);
        }
        before += p;
    }
    kept
}

#[test]
fn greedy_takes_the_lowest_id_of_equals() {
    let mut logits = noise(1, 1000);
    for token in [711, 713, 999] {
        logits[token] = 20.0;
    }
    assert_eq!(draw(&logits, &SamplingParams::GREEDY, &[]), 711);
    assert_eq!(draw(&[-0.0, 0.0], &SamplingParams::GREEDY, &[]), 0);
}

#[test]
fn top_k_of_one_is_greedy() {
    for seed in 0..50 {
        let mut logits = noise(seed, 333);
        logits[200] = 9.0;
        logits[100] = 9.0;
        let params = SamplingParams {
            top_k: 1,
            seed,
            ..params(1.7)
        };
        assert_eq!(draw(&logits, &params, &[1, 2]), 100);
    }
}

#[test]
fn frequencies_follow_the_softmax() {
    let logits = noise(3, 600)
        .into_iter()
        .map(|l| l / 4.0)
        .collect::<Vec<_>>();
    for temperature in [0.5, 1.0, 2.0] {
        let expected = softmax(&logits, f64::from(temperature));
        const NUM: usize = 20_000;
        let shares = shares(&logits, &params(temperature), NUM);
        // The 60 bins of ten tokens have 59 degrees of freedom; 99.99 % of the values are below
        // 108.
        let chi_square: f64 = expected
            .chunks(10)
            .zip(shares.chunks(10))
            .map(|(e, s)| (e.iter().sum::<f64>(), s.iter().sum::<f64>()))
            .map(|(e, s)| NUM as f64 * (s - e).powi(2) / e)
            .sum();
        assert!(
            chi_square < 108.0,
            "chi square {chi_square} at temperature {temperature}"
        );
    }
}

#[test]
fn truncation_keeps_what_sorting_would() {
    let all = SamplingParams {
        seed: 5,
        ..params(1.5)
    };
    let cases = [
        SamplingParams {
            top_k: 7,
            ..all.clone()
        },
        SamplingParams {
            top_p: 0.6,
            ..all.clone()
        },
        SamplingParams {
            min_p: 0.2,
            ..all.clone()
        },
        SamplingParams {
            top_k: 40,
            top_p: 0.8,
            ..all.clone()
        },
        SamplingParams {
            top_p: 0.9,
            min_p: 0.1,
            ..all.clone()
        },
        SamplingParams {
            top_k: 40,
            top_p: 0.95,
            min_p: 0.3,
            ..all.clone()
        },
        SamplingParams {
            top_p: 0.0,
            ..all.clone()
        },
        SamplingParams {
            top_k: 100_000,
            top_p: 0.999,
            ..all.clone()
        },
    ];
    let logits = noise(8, 500);
    for params in cases {
        let kept = kept_by_sorting(&logits, &params);
        let leading: Vec<f32> = kept.iter().map(|&i| logits[i]).collect();
        let expected = softmax(&leading, f64::from(params.temperature));
        const NUM: usize = 8_000;
        let shares = shares(&logits, &params, NUM);
        let drawn_elsewhere: f64 = (0..logits.len())
            .filter(|id| !kept.contains(id))
            .map(|id| shares[id])
            .sum();
        assert_eq!(drawn_elsewhere, 0.0, "{params:?}");
        for (&id, &p) in kept.iter().zip(&expected) {
            let sigma = (p * (1.0 - p) / NUM as f64).sqrt();
            assert!(
                (shares[id] - p).abs() < 5.0 * sigma + 1e-9,
                "{params:?}, token {id}"
            );
        }
    }
}

#[test]
fn the_nucleus_is_the_one_that_sorting_finds() {
    for (seed, temperature) in [(1, 0.2), (2, 0.7), (3, 1.0), (4, 3.0), (5, 40.0)] {
        let logits = noise(seed, 3000);
        for top_p in [0.01, 0.3, 0.9, 0.99, 0.9999] {
            let params = SamplingParams {
                top_p,
                ..params(temperature)
            };
            let mut expected = kept_by_sorting(&logits, &params);
            expected.sort_unstable();
            let max = finite_max(&logits).unwrap();
            let weights = Weights {
                logits: &logits,
                max,
                temperature,
            };
            let cut = Cut::new(&weights, &params);
            let mut buffer = [0.0; BLOCK];
            let mut kept = Vec::new();
            for index in 0..weights.num_blocks() {
                let block = cut.block(&weights, index, &mut buffer).iter().enumerate();
                kept.extend(
                    block
                        .filter(|(_, w)| **w > 0.0)
                        .map(|(offset, _)| index * BLOCK + offset),
                );
            }
            assert_eq!(kept, expected, "top_p {top_p} at temperature {temperature}");
        }
    }
}

/// With a flat distribution, top-p keeps more than the first few hundred tokens.
#[test]
fn top_p_of_a_flat_distribution_reaches_far_enough() {
    let logits = vec![0.25; 5000];
    let params = SamplingParams {
        top_p: 0.5,
        ..params(1.0)
    };
    let history = vec![0; 3000];
    let drawn: Vec<_> = (0..3000)
        .map(|n| draw(&logits, &params, &history[..n]))
        .collect();
    assert!(drawn.iter().all(|&token| token < 2500));
    assert!(drawn.iter().any(|&token| token > 2400));
}

#[test]
fn leading_equals_a_full_sort() {
    for (seed, len, count) in [
        (1, 10, 3),
        (2, 1000, 1),
        (3, 1000, 64),
        (4, 5000, 999),
        (5, 7, 50),
    ] {
        // Few distinct values, so that ties at the cut are common.
        let logits: Vec<f32> = noise(seed, len).into_iter().map(f32::round).collect();
        let mut sorted: Vec<(TokenId, f32)> = logits
            .iter()
            .enumerate()
            .map(|(token, &logit)| (token as TokenId, logit))
            .collect();
        sorted.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        sorted.truncate(count);
        assert_eq!(leading(&logits, count), sorted);
    }
}

#[test]
fn a_draw_depends_on_seed_choice_and_position_only() {
    let logits = vec![0.0; 4096];
    let base = params(1.0);
    let other_seed = SamplingParams {
        seed: 1,
        ..base.clone()
    };
    let other_choice = SamplingParams {
        choice: 1,
        ..base.clone()
    };
    let sequence = |params: &SamplingParams| -> Vec<TokenId> {
        (0..32)
            .map(|position| draw(&logits, params, &vec![0; position]))
            .collect()
    };
    assert_eq!(sequence(&base), sequence(&base));
    assert_ne!(sequence(&base), sequence(&other_seed));
    assert_ne!(sequence(&base), sequence(&other_choice));
    assert_ne!(sequence(&other_seed), sequence(&other_choice));
    assert_eq!(
        draw(&logits, &base, &[1, 2, 3]),
        draw(&logits, &base, &[7, 8, 9])
    );
}

#[test]
fn end_tokens_are_masked_until_min_tokens_are_out() {
    let mut logits = vec![0.0; 64];
    logits[10] = 5.0;
    logits[20] = 3.0;
    let token = |history: &[TokenId]| {
        let request = SampleRequest {
            num_prompt_tokens: 2,
            min_tokens: 2,
            masked_until_min_tokens: &[10, 11, 99_999],
            ..request(&SamplingParams::GREEDY, history)
        };
        sample(&mut logits.clone(), request).unwrap().token
    };
    assert_eq!(token(&[1, 1]), 20);
    assert_eq!(token(&[1, 1, 20]), 20);
    assert_eq!(token(&[1, 1, 20, 20]), 10);
}

#[test]
fn a_mask_allows_its_bits_and_nothing_beyond_its_end() {
    let logits = noise(4, 100);
    let allowed = [1 << 5 | 1 << 31, 1];
    let params = SamplingParams {
        logprobs: Some(10),
        ..params(5.0)
    };
    let history = vec![0; 500];
    for position in 0..500 {
        let request = SampleRequest {
            allowed: Some(&allowed),
            ..request(&params, &history[..position])
        };
        let drawn = sample(&mut logits.clone(), request).unwrap();
        assert!([5, 31, 32].contains(&drawn.token));
        // Alternatives that cannot be drawn are not reported.
        assert_eq!(drawn.logprobs.unwrap().top.len(), 3);
    }
}

#[test]
fn penalties_by_hand() {
    let logits = [2.0, -2.0, 1.0, 0.5, 1.9];
    let log_ratio = |params: SamplingParams, token: usize| {
        // Token 4 is in no history, so its logit is the reference.
        let params = SamplingParams {
            logprobs: Some(5),
            ..params
        };
        let history = [0, 1, 0, 0, 2];
        let request = SampleRequest {
            num_prompt_tokens: 2,
            ..request(&params, &history)
        };
        let top = sample(&mut logits.to_vec(), request)
            .unwrap()
            .logprobs
            .unwrap()
            .top;
        let of = |id: usize| {
            top.iter()
                .find(|(token, _)| *token as usize == id)
                .unwrap()
                .1
        };
        of(token) - of(4) + 1.9
    };
    let close = |value: f32, expected: f32| {
        assert!((value - expected).abs() < 1e-5, "{value}, not {expected}");
    };
    let repetition = SamplingParams {
        repetition_penalty: 2.0,
        ..SamplingParams::GREEDY
    };
    for (token, expected) in [(0, 1.0), (1, -4.0), (2, 0.5), (3, 0.5)] {
        close(log_ratio(repetition.clone(), token), expected);
    }
    // In the output, token 0 occurs twice and token 2 once; token 1 occurs in the prompt only.
    let frequency = SamplingParams {
        frequency_penalty: 0.25,
        ..SamplingParams::GREEDY
    };
    for (token, expected) in [(0, 1.5), (1, -2.0), (2, 0.75), (3, 0.5)] {
        close(log_ratio(frequency.clone(), token), expected);
    }
    let presence = SamplingParams {
        presence_penalty: 0.25,
        ..SamplingParams::GREEDY
    };
    for (token, expected) in [(0, 1.75), (1, -2.0), (2, 0.75), (3, 0.5)] {
        close(log_ratio(presence.clone(), token), expected);
    }
}

#[test]
fn log_probabilities_are_those_before_temperature_and_truncation() {
    let logits = noise(6, 3000);
    let expected: Vec<f64> = softmax(&logits, 1.0).into_iter().map(f64::ln).collect();
    let params = SamplingParams {
        top_k: 20,
        top_p: 0.9,
        logprobs: Some(5),
        seed: 3,
        ..params(0.3)
    };
    let drawn = sample(&mut logits.clone(), request(&params, &NO_HISTORY)).unwrap();
    let logprobs = drawn.logprobs.unwrap();
    assert!((f64::from(logprobs.token) - expected[drawn.token as usize]).abs() < 1e-5);
    assert_eq!(logprobs.top.len(), 5);
    for &(token, logprob) in &logprobs.top {
        assert!((f64::from(logprob) - expected[token as usize]).abs() < 1e-5);
    }
    let mut best = expected.clone();
    best.sort_by(|a, b| b.total_cmp(a));
    assert!((f64::from(logprobs.top[4].1) - best[4]).abs() < 1e-5);
}

#[test]
fn what_cannot_be_drawn_is_an_error_that_names_it() {
    let error = |logits: &[f32], temperature: f32| {
        sample(&mut logits.to_vec(), request(&params(temperature), &[]))
            .unwrap_err()
            .to_string()
    };
    for temperature in [0.0, 1.0] {
        assert_eq!(
            error(&[0.0, f32::NAN, 1.0], temperature),
            "the logit of token 1 is NaN"
        );
        assert_eq!(
            error(&[0.0, 1.0, f32::INFINITY], temperature),
            "the logit of token 2 is inf"
        );
        assert_eq!(
            error(&[f32::NEG_INFINITY; 3], temperature),
            "no token is allowed here"
        );
        assert_eq!(error(&[], temperature), "no token is allowed here");
    }
}

#[test]
fn extreme_temperatures_neither_panic_nor_draw_the_impossible() {
    let mut logits = noise(2, 300);
    logits[7] = 30.0;
    logits[8] = f32::NEG_INFINITY;
    for temperature in [f32::MIN_POSITIVE, 1e-40, 1e-6, 1e6, f32::MAX] {
        for (top_k, top_p) in [(0, 1.0), (0, 0.999_9), (299, 1.0)] {
            let params = SamplingParams {
                top_k,
                top_p,
                ..params(temperature)
            };
            let history = vec![0; 300];
            for position in 0..300 {
                let token = draw(&logits, &params, &history[..position]);
                assert_ne!(token, 8);
                assert!(temperature > 1.0 || token == 7);
            }
        }
    }
}

#[test]
fn what_was_drawn_before_changes_nothing() {
    let params = SamplingParams {
        repetition_penalty: 1.5,
        frequency_penalty: 0.75,
        presence_penalty: 0.25,
        logprobs: Some(20),
        ..params(1.0)
    };
    let mut sampler = Sampler::new();
    // Larger and smaller vocabularies in turn, with histories that contain tokens beyond the vocabulary.
    for (seed, len) in [(1, 30), (2, 500), (3, 40), (4, 41), (5, 500)] {
        let history: Vec<TokenId> = (0..60).map(|i| (i * i * seed as u32) % 45).collect();
        let request = SampleRequest {
            num_prompt_tokens: 20,
            ..request(&params, &history)
        };
        let logits = noise(seed, len);
        let again = sampler.sample(&mut logits.clone(), request);
        assert_eq!(again, sample(&mut logits.clone(), request));
    }
}

/// The expected logits under rules, computed for each token alone.
fn ruled_by_hand(logits: &[f32], rules: &TokenRules, output: &[TokenId]) -> Vec<f32> {
    let ruled = |(token, &logit): (usize, &f32)| {
        let token = token as TokenId;
        let is_allowed = rules
            .allowed()
            .is_none_or(|allowed| allowed.contains(&token));
        let completes = |sequence: &Vec<TokenId>| {
            let text: Vec<TokenId> = output.iter().copied().chain([token]).collect();
            text.len() >= sequence.len() && text[text.len() - sequence.len()..] == sequence[..]
        };
        let biases = rules.bias().iter().filter(|bias| bias.0 == token);
        match is_allowed && !rules.banned().iter().any(completes) {
            true => logit + biases.map(|bias| bias.1).sum::<f32>(),
            false => f32::NEG_INFINITY,
        }
    };
    logits.iter().enumerate().map(ruled).collect()
}

#[test]
fn rules_are_what_they_say_of_each_token() {
    const LEN: usize = 70;
    let rules = [
        TokenRules::new().with_allowed(vec![69, 3, 4, 0, 31, 3, 70, 10_000]),
        TokenRules::new().with_allowed(vec![5]),
        TokenRules::new().with_banned(vec![
            vec![9],
            vec![1, 2],
            vec![3, 1, 2, 4],
            vec![70],
            vec![2, 70],
        ]),
        TokenRules::new().with_bias(vec![(2, 1.5), (4, -100.0), (69, 0.25), (70, 5.0)]),
        TokenRules::new()
            .with_allowed((0..60).collect())
            .with_banned(vec![vec![2, 4], vec![8]])
            .with_bias(vec![(8, 100.0), (65, 100.0), (7, 2.5)]),
    ];
    // The prompt ends with the beginning of a banned sequence, which is not part of the output.
    let history: [TokenId; 8] = [6, 3, 1, 1, 3, 1, 2, 1];
    for rules in rules {
        for (temperature, num_tokens) in [0.0, 2.0]
            .into_iter()
            .flat_map(|t| (3..9).map(move |n| (t, n)))
        {
            let plain = SamplingParams {
                logprobs: Some(LEN as u32),
                repetition_penalty: 1.5,
                frequency_penalty: 0.25,
                ..params(temperature)
            };
            let ruled = SamplingParams {
                rules: Some(Arc::new(rules.clone())),
                ..plain.clone()
            };
            let logits = noise(num_tokens as u64, LEN);
            let draw = |logits: &[f32], params: &SamplingParams| {
                let request = SampleRequest {
                    num_prompt_tokens: 3,
                    ..request(params, &history[..num_tokens])
                };
                sample(&mut logits.to_vec(), request).unwrap()
            };
            let by_hand = ruled_by_hand(&logits, &rules, &history[3..num_tokens]);
            assert_eq!(draw(&logits, &ruled), draw(&by_hand, &plain), "{rules:?}");
            assert_ne!(draw(&logits, &ruled), draw(&logits, &plain), "{rules:?}");
        }
    }
}

#[test]
fn rules_that_leave_nothing_are_an_error() {
    let rules = TokenRules::new()
        .with_allowed(vec![7, 8])
        .with_banned(vec![vec![7], vec![8, 8]])
        .with_bias(vec![(7, 100.0)]);
    let params = SamplingParams {
        rules: Some(Arc::new(rules)),
        ..SamplingParams::GREEDY
    };
    let draw = |history: &[TokenId]| sample(&mut noise(1, 20), request(&params, history));
    assert_eq!(draw(&[8, 1]).unwrap().token, 8);
    assert_eq!(draw(&[1, 8]), Err(SampleError::NothingAllowed));
}

#[test]
fn a_score_is_the_place_in_the_sorted_vocabulary() {
    let mut logits = noise(5, 300);
    // Equal logits rank by id.
    logits[7] = logits[200];
    logits[250] = f32::NEG_INFINITY;
    let mut by_rank: Vec<usize> = (0..logits.len()).collect();
    by_rank.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let probabilities = softmax(&logits, 1.0);
    for (at, &token) in by_rank.iter().enumerate() {
        let scored = score(&logits, token as TokenId, 4).unwrap();
        assert_eq!(
            (scored.token, scored.logprobs.rank),
            (token as TokenId, at as u32 + 1)
        );
        let expected = probabilities[token].ln();
        let is_right = |found: f32, expected: f64| (f64::from(found) - expected).abs() < 1e-5;
        assert!(expected.is_infinite() || is_right(scored.logprobs.token, expected));
        assert_eq!(expected.is_infinite(), scored.logprobs.token.is_infinite());
        for (&(token, logprob), &best) in scored.logprobs.top.iter().zip(&by_rank) {
            assert_eq!(token as usize, best);
            assert!(is_right(logprob, probabilities[best].ln()));
        }
        assert_eq!(scored.logprobs.top.len(), 4);
    }
    logits[3] = f32::NAN;
    assert!(matches!(
        score(&logits, 0, 0),
        Err(SampleError::NotFinite { token: 3, .. })
    ));
}

#[test]
fn a_drawn_token_has_its_place_in_the_sorted_vocabulary() {
    let mut logits = noise(5, 300);
    logits[7] = logits[200];
    let mut ranks = Vec::new();
    for seed in 0..50 {
        let params = SamplingParams {
            temperature: 3.0,
            seed,
            logprobs: Some(0),
            ..SamplingParams::GREEDY
        };
        let drawn = sample(&mut logits.clone(), request(&params, &[])).unwrap();
        let is_before = |other: usize| {
            let (a, b) = (logits[other], logits[drawn.token as usize]);
            a > b || a == b && other < drawn.token as usize
        };
        let num_before = (0..logits.len()).filter(|&other| is_before(other)).count();
        let rank = drawn.logprobs.expect("they were asked for").rank;
        assert_eq!(rank as usize, num_before + 1);
        ranks.push(rank);
    }
    assert!(ranks.iter().any(|&rank| rank > 50), "{ranks:?}");
}
