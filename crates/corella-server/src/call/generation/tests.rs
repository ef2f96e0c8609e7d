//! A delta for each token.

use corella_core::Sample;
use corella_text::Tokenizer;

use super::*;

const STOP: &str = "stop";

fn tokenizer() -> Tokenizer {
    let tokenizer = include_bytes!("../../../../../models/nano/tokenizer.json");
    Tokenizer::from_bytes(tokenizer).expect("a tokenizer")
}

fn choice(tokenizer: &Tokenizer, each_token: bool) -> Choice {
    let detokenizer = Detokenizer::new(tokenizer.clone(), true, &[]);
    Choice {
        stream: None,
        watch: None,
        text: TextStream::with_detokenizer(detokenizer, vec![STOP.to_owned()], false),
        reply: None,
        stop: vec![STOP.to_owned()],
        wants_logprobs: true,
        logprob_sum: 0.0,
        num_logprobs: 0,
        returns_token_ids: true,
        each_token,
        next: ChoiceDelta::default(),
        num_prompt_tokens: 0,
        cache_use: CacheUse::default(),
        retentions: Vec::new(),
        num_output_tokens: 0,
        resumed: Resumed::default(),
    }
}

fn output(token: TokenId, finish: Option<FinishReason>) -> RequestOutput {
    let logprobs = Logprobs {
        token: -1.0,
        rank: 1,
        top: Vec::new(),
    };
    RequestOutput {
        sample: Some(Sample {
            token,
            logprobs: Some(Box::new(logprobs)),
        }),
        finish,
        ..RequestOutput::default()
    }
}

/// Returns the deltas of the tokens. The last token ends the answer.
fn deltas(each_token: bool, tokens: &[TokenId]) -> Vec<ChoiceDelta> {
    let mut choice = choice(&tokenizer(), each_token);
    let last = tokens.len() - 1;
    let outputs = tokens.iter().enumerate().map(|(at, &token)| {
        let finish = (at == last).then_some(FinishReason::EndToken);
        output(token, finish)
    });
    outputs
        .filter_map(|output| choice.handle_output(output).expect("no error"))
        .collect()
}

#[test]
fn each_token_leaves_at_once_with_its_log_probability_or_with_the_next_text() {
    // The three bytes of € are no text until the third, and `sto` may be the beginning of the stop string.
    let text = "a€b sto";
    let mut tokens = tokenizer().encode(text, false).expect("it encodes");
    tokens.push(0);
    let all = deltas(true, &tokens);
    assert_eq!(all.len(), tokens.len());
    for (delta, token) in all.iter().zip(&tokens) {
        assert_eq!(delta.tokens, [*token]);
        assert_eq!(delta.logprobs.len(), 1, "also of the end token");
        assert_eq!(delta.logprobs[0].0, *token);
    }
    let silent = all.iter().filter(|delta| delta.text.is_empty()).count();
    assert!(silent > 0, "some text lags behind its tokens");
    // Without the flag, silent tokens leave with the next text, and the end token has no log-probability.
    let few = deltas(false, &tokens);
    assert!(few.len() < all.len());
    let logprobs: usize = few.iter().map(|delta| delta.logprobs.len()).sum();
    assert_eq!(logprobs, tokens.len() - 1);
    for deltas in [&all, &few] {
        let whole: String = deltas.iter().map(|delta| &*delta.text).collect();
        assert_eq!(whole, text);
        let drawn: Vec<_> = deltas.iter().flat_map(|delta| &delta.tokens).collect();
        assert!(drawn.into_iter().eq(&tokens));
    }
}
