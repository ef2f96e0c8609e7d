//! tokenizer.json from folders.

use corella_fuzz::{CountingAllocator, Random, Target, Verdict};
use corella_text::{EncodeLimit, Tokenizer};

use crate::corpus;
use crate::model::mutate_json_bytes;

const TEXT: &str = "A fox — Füchse 😀 \u{200b}\n\n  in <|end|> the   snow.\tx\0y";

/// Tokenises and decodes, ignoring the results.
pub fn use_tokenizer(tokenizer: &Tokenizer) {
    let limit = EncodeLimit {
        max_tokens: 1000,
        ..EncodeLimit::NONE
    };
    let _ = tokenizer.encode_within(TEXT, true, limit);
    let ids: Vec<u32> = (0..300).chain([u32::MAX]).collect();
    let _ = tokenizer.decode(&ids, false);
    let _ = tokenizer.num_tokens();
    let _ = tokenizer.kind();
}

#[test]
fn tokenizer_json() {
    let corpus = ["byte_fallback", "byte_level", "metaspace"].map(|name| {
        corpus::bytes(&format!(
            "crates/corella-text/tests/golden/{name}_tokenizer.json"
        ))
    });
    let words = [
        "type",
        "BPE",
        "Unigram",
        "WordPiece",
        "WordLevel",
        "ByteLevel",
        "Metaspace",
        "Sequence",
        "Split",
        "Regex",
        "(a+)+$",
        "Replace",
        "Prepend",
        "Precompiled",
        "Strip",
        "TemplateProcessing",
        "byte_fallback",
        "<0x00>",
        "added_tokens",
        "special",
        "id",
        "unk_id",
        "continuing_subword_prefix",
    ];
    Target::new("tokenizer_json", 16 << 20, 2000).run(
        &corpus,
        |random, bytes| mutate_json_bytes(random, bytes, &words),
        |bytes| {
            let tokenizer = Tokenizer::from_bytes(bytes);
            if let Ok(tokenizer) = &tokenizer {
                use_tokenizer(tokenizer);
            }
            Verdict::from(&tokenizer)
        },
    );
}

/// A text of random words that never repeat. When the tokenizer is dropped, no thread may still have its words in a
/// cache.
#[test]
fn words_without_end() {
    let json = corpus::bytes("crates/corella-text/tests/golden/byte_level_tokenizer.json");
    let make = |random: &mut Random, text: &mut String| {
        text.clear();
        for _ in 0..2000 {
            text.push(' ');
            text.extend((0..250).map(|_| char::from(b'a' + random.below(26) as u8)));
        }
    };
    Target::new("words_without_end", 64 << 20, 0).run(&["a".to_owned()], make, |text| {
        let before = CountingAllocator::held();
        let tokenizer = Tokenizer::from_bytes(&json).expect("it is valid");
        let verdict = Verdict::from(&tokenizer.encode(text, false));
        drop(tokenizer);
        let kept = CountingAllocator::held().saturating_sub(before);
        assert!(kept < 1 << 20, "{kept} bytes are kept");
        verdict
    });
}
