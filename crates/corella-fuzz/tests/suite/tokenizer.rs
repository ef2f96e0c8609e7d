//! tokenizer.json, as folders bring it.

use corella_fuzz::{Target, Verdict};
use corella_text::{EncodeLimit, Tokenizer};

use crate::corpus;
use crate::model::mutate_json_bytes;

const TEXT: &str = "A fox — Füchse 😀 \u{200b}\n\n  in <|end|> the   snow.\tx\0y";

/// Tokenises and decodes, whatever comes of it.
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
