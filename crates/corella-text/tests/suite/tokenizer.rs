//! Tokenising gives the same tokens as the `tokenizers` crate for the whole text, within its cost limits.

use std::cell::Cell;
use std::sync::LazyLock;

use corella_text::{EncodeLimit, TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Map, Value};

const FILES: [&str; 7] = [
    "tests/golden/byte_level_tokenizer.json",
    "tests/golden/byte_fallback_tokenizer.json",
    "tests/golden/metaspace_tokenizer.json",
    "../../tests/gguf/llama3-f16/tokenizer.json",
    "../../tests/gguf/qwen3-f16/tokenizer.json",
    "../../tests/gguf/llama-f32/tokenizer.json",
    "../../models/nano/tokenizer.json",
];

struct Both {
    file: &'static str,
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
}

impl Both {
    fn expected(&self, text: &str, add_special_tokens: bool) -> Vec<u32> {
        let encoding = self.reference.encode_fast(text, add_special_tokens);
        encoding.unwrap().get_ids().to_vec()
    }
}

static READ: LazyLock<Vec<Both>> = LazyLock::new(|| {
    let read = |file: &'static str| {
        let path = format!("{}/{file}", env!("CARGO_MANIFEST_DIR"));
        let json = std::fs::read(path).unwrap();
        both(file, &json)
    };
    let mut all: Vec<_> = FILES.into_iter().map(read).collect();
    all.extend(made_up());
    all
});

fn both(file: &'static str, json: &[u8]) -> Both {
    Both {
        file,
        ours: Tokenizer::from_bytes(json).unwrap(),
        reference: tokenizers::Tokenizer::from_bytes(json).unwrap(),
    }
}

/// Kinds of tokenizers for which there is no file in `FILES`: each is made from a file with some members changed.
fn made_up() -> [Both; 4] {
    let change = |name: &'static str, from: usize, changes: &[(&str, &str)]| {
        let path = format!("{}/{}", env!("CARGO_MANIFEST_DIR"), FILES[from]);
        let mut json: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for (member, value) in changes {
            *json.pointer_mut(member).unwrap() = serde_json::from_str(value).unwrap();
        }
        both(name, json.to_string().as_bytes())
    };
    // Seven bytes of text become two by composition, and the two bytes are one token.
    let bytes = (0..=255u8).map(|byte| (byte_character(byte).to_string(), Value::from(byte)));
    let vocab: Map<_, _> = bytes.chain([("ÎĲ".to_owned(), 256.into())]).collect();
    [
        change(
            "one word, its spaces marked, the first marked too",
            1,
            &[
                ("/normalizer", "null"),
                (
                    "/pre_tokenizer",
                    r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
                        "split": false}"#,
                ),
            ],
        ),
        change(
            "three patterns, one within the other",
            0,
            &[(
                "/pre_tokenizer",
                r#"{"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}"}, "behavior": "Isolated",
                     "invert": false},
                    {"type": "Split", "pattern": {"String": "an"}, "behavior": "Isolated",
                     "invert": false},
                    {"type": "ByteLevel", "add_prefix_space": false, "use_regex": true,
                     "trim_offsets": true}]}"#,
            )],
        ),
        change(
            "bytes that compose",
            0,
            &[
                ("/added_tokens", "[]"),
                ("/normalizer", r#"{"type": "NFC"}"#),
                ("/model/vocab", &Value::Object(vocab).to_string()),
                ("/model/merges", r#"[["Î", "Ĳ"]]"#),
            ],
        ),
        change(
            "in lower case",
            0,
            &[("/normalizer", r#"{"type": "Lowercase"}"#)],
        ),
    ]
}

/// The character that stands for a byte in GPT-2's alphabet.
fn byte_character(byte: u8) -> char {
    match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0x00..=0x20 => char::from_u32(0x100 + u32::from(byte)).unwrap(),
        0x7F..=0xA0 => char::from_u32(0x121 + u32::from(byte) - 0x7F).unwrap(),
        0xAD => '\u{143}',
    }
}

const PIECES: [&str; 33] = [
    "\u{1FBE}\u{308}\u{301}",
    "the",
    " lantern",
    " fox",
    "  ",
    "    ",
    "\n",
    "\n\n",
    "\t",
    " \n ",
    "'s",
    "'ll",
    "don't",
    "é",
    "e\u{301}",
    "\u{1112}\u{1161}\u{11AB}",
    "漢字",
    "🦜",
    "123",
    "4567",
    "...",
    "<|im_start|>",
    "<|im_end|>",
    "<s>",
    "</s>",
    "<unk>",
    "<tool_call>",
    "añadido ok",
    "▁",
    "<0x0A>",
    "ANAnan",
    "\u{0}",
    "x",
];

fn texts(max_pieces: usize) -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => prop::sample::select(&PIECES[..]).prop_map(str::to_owned),
        1 => any::<char>().prop_map(String::from),
        1 => "[a-z]{1,9} ",
    ];
    prop::collection::vec(piece, 0..max_pieces).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn texts_have_the_tokens_of_the_reference(text in texts(60), add_special_tokens: bool) {
        for both in READ.iter() {
            let ids = both.ours.encode(&text, add_special_tokens).unwrap();
            prop_assert_eq!(ids, both.expected(&text, add_special_tokens), "{}", both.file);
        }
    }

    /// The beginning of a text may have other tokens than the same text after a special token.
    #[test]
    fn long_sections_have_the_same_tokens_when_they_come_again(
        section in texts(60), rest in texts(9), add_special_tokens: bool,
    ) {
        let section = section.repeat(1 + 300 / (section.len() + 1));
        let marks = ["<s>", "<|im_start|>", "<|endoftext|>", ""];
        let texts = marks.map(|mark| format!("{section}{mark}{section}{mark}{rest}"));
        for both in READ.iter() {
            for text in texts.iter().chain(&texts) {
                let ids = both.ours.encode(text, add_special_tokens).unwrap();
                prop_assert_eq!(ids, both.expected(text, add_special_tokens), "{}", both.file);
            }
        }
    }

    /// Otherwise a text that fits would be refused by its length alone.
    #[test]
    fn no_text_has_fewer_tokens_than_its_bytes_say(text in texts(40)) {
        for both in READ.iter() {
            if let Some(max_bytes) = both.ours.max_bytes_per_token() {
                let num_tokens = both.expected(&text, false).len();
                prop_assert!(text.len() <= num_tokens * max_bytes, "{}", both.file);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3))]

    /// The texts are long enough for words to be cut and for normalising in chunks.
    #[test]
    fn long_texts_have_the_tokens_of_the_reference(text in texts(60), spaces in 1usize..40_000) {
        let text = format!("{}{}{}", text.repeat(1 + 60_000 / (text.len() + 1)), " ".repeat(spaces), text);
        for both in READ.iter() {
            let ids = both.ours.encode(&text, true).unwrap();
            prop_assert!(ids == both.expected(&text, true), "{}: {}", both.file, text.len());
        }
    }
}

/// Repeating the longest token of each vocabulary comes closest to the limit.
#[test]
fn the_densest_text_is_tokenised_and_a_byte_more_than_can_fit_is_not() {
    let mut num_bounded = 0;
    for both in READ.iter() {
        let Some(max_bytes) = both.ours.max_bytes_per_token() else {
            continue;
        };
        num_bounded += 1;
        let limit = EncodeLimit {
            max_tokens: 200,
            is_abandoned: &|| false,
        };
        let encode = |text: &str| both.ours.encode_within(text, false, limit);
        for token in [
            "<|im_start|>",
            "<|endoftext|>",
            "supermarket",
            "\u{1FBE}\u{308}\u{301}",
            "</s>",
            " lantern",
            "a",
        ] {
            let num_tokens = both.expected(token, false).len();
            let text = token.repeat(200 / num_tokens.max(1));
            let expected = both.expected(&text, false);
            if expected.len() <= 200 {
                assert_eq!(encode(&text), Ok(expected), "{}", both.file);
            }
        }
        let never = EncodeLimit {
            max_tokens: 200,
            is_abandoned: &|| panic!("a text that cannot fit is looked at"),
        };
        let text = " ".repeat(200 * max_bytes + 1);
        assert_eq!(
            both.ours.encode_within(&text, false, never),
            Err(TextError::TooManyTokens { at_least: 201 }),
            "{}",
            both.file
        );
    }
    // All except two are bounded: one has an open vocabulary, and the normalizer of the other may drop text.
    assert_eq!(num_bounded, READ.len() - 2);
}

#[test]
fn the_last_token_that_fits_counts() {
    for both in READ.iter() {
        let text = "the fox and the lantern<s> again";
        let expected = both.expected(text, true);
        for missing in 0..2 {
            let limit = EncodeLimit {
                max_tokens: expected.len() - missing,
                is_abandoned: &|| false,
            };
            match both.ours.encode_within(text, true, limit) {
                Ok(ids) => assert_eq!((missing, &ids), (0, &expected)),
                Err(TextError::TooManyTokens { at_least }) => {
                    assert!(missing == 1 && at_least <= expected.len(), "{}", both.file);
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Tokenising stops long before the end of the text.
#[test]
fn tokenising_stops_when_the_caller_has_left() {
    let both = &READ[6];
    let num_asked = Cell::new(0);
    let text = "a lantern ".repeat(500_000);
    let limit = EncodeLimit {
        max_tokens: 10_000_000,
        is_abandoned: &|| {
            num_asked.set(num_asked.get() + 1);
            num_asked.get() == 3
        },
    };
    let result = both.ours.encode_within(&text, false, limit);
    assert_eq!(result, Err(TextError::Abandoned));
    assert_eq!(num_asked.get(), 3);
}

#[test]
fn a_word_without_end_is_refused() {
    let both = &READ[0];
    let limit = EncodeLimit {
        max_tokens: 10_000_000,
        is_abandoned: &|| false,
    };
    let text = format!("the {}", "e".repeat(2 << 20));
    let result = both.ours.encode_within(&text, false, limit);
    assert!(
        matches!(result, Err(TextError::WordTooLong { .. })),
        "{result:?}"
    );
}

#[test]
fn the_kind_of_a_tokenizer_is_known() {
    let kinds = READ.iter().filter(|both| FILES.contains(&both.file));
    let kinds: Vec<_> = kinds.map(|both| both.ours.kind()).collect();
    let (bytes, merges) = ("byte-level BPE", "SentencePiece BPE with bytes");
    let best_sum = "SentencePiece unigram";
    assert_eq!(
        kinds,
        [bytes, merges, best_sum, bytes, bytes, merges, bytes]
    );
    let nano = READ.iter().find(|both| both.file == FILES[6]).unwrap();
    assert_eq!(nano.ours.num_tokens(), (2048, 3));
}

#[test]
fn a_damaged_file_is_an_error_and_no_panic() {
    let whole = std::fs::read_to_string(FILES[0]).unwrap();
    let whole: Value = serde_json::from_str(&whole).unwrap();
    let with = |field: &str, text: &str| {
        let mut damaged = whole.clone();
        damaged[field] = Value::from("DAMAGE");
        damaged.to_string().replace("\"DAMAGE\"", text)
    };
    for damaged in [
        with("decoder", r#"{"type": "ByteLevel", "x": "\ud800"}"#),
        with(
            "normalizer",
            r#"{"type": "Precompiled", "precompiled_charsmap": "!"}"#,
        ),
        with(
            "post_processor",
            r#"{"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [], "special_tokens": {}}"#,
        ),
        with("model", "{}"),
        with("version", "[[["),
    ] {
        let read = Tokenizer::from_bytes(damaged.as_bytes());
        assert!(
            matches!(read, Err(TextError::TokenizerFile(_))),
            "{damaged}"
        );
    }
}

/// BERT's tokens join to words, and lose the spaces before punctuation.
#[test]
fn word_pieces_are_decoded_as_the_package_does() {
    let folder = format!(
        "{}/../../tests/encoder/bert-pair",
        env!("CARGO_MANIFEST_DIR")
    );
    let json = std::fs::read(format!("{folder}/tokenizer.json")).unwrap();
    let Both {
        ours, reference, ..
    } = both("bert-pair", &json);
    for text in [
        "The quick fox runs, sleeps and reads.",
        "Who, who? Nobody! don't a ' b 's it's 12 , .",
        "##lan lan ##tern do not",
        "",
    ] {
        let ids = ours.encode(text, true).unwrap();
        for ids in [&ids[..], &ids[1..], &ids[1..ids.len() - 1]] {
            let expected = reference.decode(ids, false).unwrap();
            assert_eq!(ours.decode(ids, false).unwrap(), expected, "{text}");
        }
    }
}

/// The tokenizers are WordPiece, byte-level BPE and unigram.
#[test]
fn a_pair_has_special_tokens_between_its_texts() {
    // The last prompt of each folder's golden is the pair below, with the ids of Transformers.
    for name in [
        "bert-pair",
        "modernbert-pair",
        "roberta-classes",
        "xlm-roberta-pair",
    ] {
        let folder = format!("{}/../../tests/encoder/{name}", env!("CARGO_MANIFEST_DIR"));
        let read = |file: &str| std::fs::read(format!("{folder}/{file}")).unwrap();
        let tokenizer = Tokenizer::from_bytes(&read("tokenizer.json")).unwrap();
        let golden: Value = serde_json::from_slice(&read("golden.json")).unwrap();
        let expected = golden["prompts"].as_array().unwrap().last().unwrap();
        let second = "Nobody but a tokenizer, ".repeat(4);
        let pair = ("Who reads this text?", &*second);
        let encoded = tokenizer
            .encode_pair(pair, true, EncodeLimit::NONE)
            .unwrap();
        assert_eq!(
            serde_json::json!(encoded.tokens),
            expected["tokens"],
            "{name}"
        );
        assert_eq!(
            serde_json::json!(encoded.second_text),
            expected["second_text"],
            "{name}"
        );

        let limit = |max_tokens| EncodeLimit {
            max_tokens,
            is_abandoned: &|| false,
        };
        let num_tokens = encoded.tokens.len();
        assert_eq!(
            tokenizer.encode_pair(pair, true, limit(num_tokens)),
            Ok(encoded)
        );
        let refused = tokenizer.encode_pair(pair, true, limit(num_tokens - 1));
        assert!(
            matches!(refused, Err(TextError::TooManyTokens { .. })),
            "{name}"
        );
    }
}
