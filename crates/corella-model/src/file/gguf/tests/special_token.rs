//! The tokens that end an answer.

use super::*;

/// In a model with these control tokens, the text of each token that ends an answer, and the place that names the
/// token.
fn ends(tokens: [&str; 4], eos: u32) -> Vec<(&str, String)> {
    const CONTROL: u32 = 3;
    let kinds = [CONTROL; 4].map(u32::to_le_bytes).concat();
    let kinds = [&U32.to_le_bytes()[..], &4u64.to_le_bytes(), &kinds].concat();
    let file = TestFile::new()
        .with_key("tokenizer.ggml.tokens", ARRAY, &texts(&tokens))
        .with_key("tokenizer.ggml.token_type", ARRAY, &kinds)
        .with_key("tokenizer.ggml.eos_token_id", U32, &eos.to_le_bytes());
    let config = model_config(&open(&file.bytes()).unwrap()).unwrap();
    let ends = config.end_tokens.iter();
    ends.map(|end| (tokens[end.id as usize], end.named_by.clone()))
        .collect()
}

#[test]
fn a_token_ends_an_answer_by_a_key_or_by_its_text() {
    const EOS: &str = "tokenizer.ggml.eos_token_id";
    let named = |token, place: &str| (token, place.to_owned());
    assert_eq!(
        ends(["<|endoftext|>", "<|end|>", "<|user|>", "a"], 0),
        [named("<|endoftext|>", EOS), named("<|end|>", "its text")]
    );
    // In gpt-oss's format `<|end|>` ends a message, and other tokens end the answer, even if a converter says
    // otherwise.
    let harmony = ["<|return|>", "<|end|>", "<|call|>", "a"];
    assert_eq!(
        ends(harmony, 0),
        [named("<|return|>", EOS), named("<|call|>", "its text")]
    );
    assert_eq!(
        ends(harmony, 1),
        [
            named("<|return|>", "its text"),
            named("<|call|>", "its text")
        ]
    );
}
