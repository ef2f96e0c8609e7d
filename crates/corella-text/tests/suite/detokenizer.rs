//! The text decoded token by token equals the text decoded at once.

use std::sync::LazyLock;

use corella_text::{Detokenizer, TextError, TextStream, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

const NAMES: [&str; 3] = ["byte_level", "byte_fallback", "metaspace"];

fn golden(file: &str) -> Vec<u8> {
    std::fs::read(format!(
        "{}/tests/golden/{file}",
        env!("CARGO_MANIFEST_DIR")
    ))
    .unwrap()
}

/// A tokenizer, read from its file by this crate and by the `tokenizers` crate alone.
struct Both {
    ours: Tokenizer,
    reference: tokenizers::Tokenizer,
}

static READ: LazyLock<[Both; 3]> = LazyLock::new(|| {
    NAMES.map(|name| {
        let json = golden(&format!("{name}_tokenizer.json"));
        Both {
            ours: Tokenizer::from_bytes(&json).unwrap(),
            reference: tokenizers::Tokenizer::from_bytes(&json).unwrap(),
        }
    })
});

fn both(name: &str) -> &'static Both {
    &READ[NAMES.iter().position(|known| *known == name).unwrap()]
}

fn tokenizer(name: &str) -> Tokenizer {
    both(name).ours.clone()
}

fn reference(name: &str) -> &'static tokenizers::Tokenizer {
    &both(name).reference
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip: bool, tail: &[u32]) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), skip, tail);
    let mut text: String = ids.iter().map(|&id| detokenizer.push(id)).collect();
    text.push_str(&detokenizer.finish());
    text
}

fn ids_of(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

#[test]
fn texts_read_as_in_python() {
    for name in NAMES {
        let tokenizer = tokenizer(name);
        let cases: Vec<Value> =
            serde_json::from_slice(&golden(&format!("{name}_case.json"))).unwrap();
        for case in &cases {
            let text = case["text"].as_str().unwrap();
            let ids = ids_of(&case["ids"]);
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                ids,
                "{name}: {text:?}"
            );
            assert_eq!(
                tokenizer.encode(text, false).unwrap(),
                ids_of(&case["bare_ids"]),
                "{name}: {text:?}"
            );
            for (skip, key) in [(true, "decoded"), (false, "decoded_with_special")] {
                assert_eq!(
                    tokenizer.decode(&ids, skip).unwrap(),
                    case[key],
                    "{name}: {text:?}"
                );
                assert_eq!(
                    streamed(&tokenizer, &ids, skip, &[]),
                    case[key],
                    "{name}: {text:?}"
                );
            }
        }
    }
}

/// A text of mostly multi-token characters.
fn text() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        Just("🦜"),
        Just("👨‍👩‍👧‍👦"),
        Just("é"),
        Just("日本"),
        Just(" "),
        Just("  "),
        Just("the"),
        Just(" parrot"),
        Just("\n"),
        Just("▁"),
        Just("<|im_end|>"),
        Just("</s>"),
        Just("<tool_call>"),
        Just("añadido ok"),
        Just("\u{fffd}"),
        Just("\u{10ffff}"),
        Just("x"),
        Just("<0x41>"),
    ];
    prop::collection::vec(word, 0..40).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn random_ids_of_a_byte_level_vocabulary(ids in prop::collection::vec(0u32..430, 0..200), skip: bool) {
        let expected = reference("byte_level").decode(&ids, skip).unwrap();
        prop_assert_eq!(&streamed(&tokenizer("byte_level"), &ids, skip, &[]), &expected);
        prop_assert_eq!(tokenizer("byte_level").decode(&ids, skip).unwrap(), expected);
    }

    #[test]
    fn random_ids_of_a_unigram_vocabulary(ids in prop::collection::vec(0u32..210, 0..200), skip: bool) {
        let expected = reference("metaspace").decode(&ids, skip).unwrap();
        prop_assert_eq!(streamed(&tokenizer("metaspace"), &ids, skip, &[]), expected);
    }

    /// The reference differs in one way: it replaces a whole run of byte tokens that is not UTF-8,
    /// while here only the broken characters are lost, each to one U+FFFD.
    #[test]
    fn random_ids_of_a_vocabulary_with_byte_tokens(ids in prop::collection::vec(0u32..430, 0..60), skip: bool) {
        let reference = reference("byte_fallback");
        let mut bytes = Vec::new();
        for &id in &ids {
            let Some(token) = reference.id_to_token(id) else { continue };
            if skip && (token == "<s>" || token == "</s>" || token == "<unk>") {
                continue;
            }
            match token.strip_prefix("<0x") {
                Some(hex) => bytes.push(u8::from_str_radix(&hex[..2], 16).unwrap()),
                None => bytes.extend_from_slice(token.replace('▁', " ").as_bytes()),
            }
        }
        let whole = String::from_utf8_lossy(&bytes);
        let expected = whole.strip_prefix(' ').unwrap_or(&whole);
        prop_assert_eq!(streamed(&tokenizer("byte_fallback"), &ids, skip, &[]), expected);
        if std::str::from_utf8(&bytes).is_ok() {
            prop_assert_eq!(reference.decode(&ids, skip).unwrap(), expected);
        }
    }

    #[test]
    fn real_texts_stream_as_the_reference_decodes_them(text in text(), skip: bool) {
        for name in NAMES {
            let reference = reference(name);
            let ids = reference.encode(text.as_str(), true).unwrap().get_ids().to_vec();
            let expected = reference.decode(&ids, skip).unwrap();
            prop_assert_eq!(streamed(&tokenizer(name), &ids, skip, &[]), expected, "{}", name);
        }
    }

    /// A U+FFFD appears only when its bytes can no longer become a character.
    #[test]
    fn every_prefix_is_a_prefix_of_the_text(text in text()) {
        for name in NAMES {
            let tokenizer = tokenizer(name);
            let ids = tokenizer.encode(&text, false).unwrap();
            let whole = tokenizer.decode(&ids, false).unwrap();
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), false, &[]);
            let mut so_far = String::new();
            for id in ids {
                so_far.push_str(&detokenizer.push(id));
                prop_assert!(whole.starts_with(&so_far), "{:?} does not begin {:?}", so_far, whole);
            }
        }
    }

    /// Prompt and answer join to the whole text for any cut, even within a character.
    #[test]
    fn an_answer_continues_its_prompt(text in text(), cut in 0usize..100) {
        for name in NAMES {
            let tokenizer = tokenizer(name);
            let ids = tokenizer.encode(&text, false).unwrap();
            let (prompt, answer) = ids.split_at(cut.min(ids.len()));
            let mut detokenizer = Detokenizer::new(tokenizer.clone(), true, &[]);
            let before: String = prompt.iter().map(|&id| detokenizer.push(id)).collect();
            let joined = before + &streamed(&tokenizer, answer, true, prompt);
            prop_assert_eq!(joined, tokenizer.decode(&ids, true).unwrap(), "{}", name);
        }
    }

    #[test]
    fn a_text_ends_where_its_first_stop_string_does(
        text in "[abé🦜]{0,24}",
        stop in prop::collection::vec("[abé🦜]{0,4}", 0..4),
        include_stop: bool,
    ) {
        let tokenizer = tokenizer("byte_level");
        let ids = tokenizer.encode(&text, false).unwrap();

        // By brute force: the first end of any match, and the first listed of the stop strings that
        // end there.
        let ends = (1..=text.len()).filter(|&end| text.is_char_boundary(end));
        let found = ends
            .filter_map(|end| {
                let first = stop.iter().find(|stop| !stop.is_empty() && text[..end].ends_with(*stop));
                first.map(|stop| (end, stop.len()))
            })
            .next();
        let expected = match found {
            None => &text[..],
            Some((end, _)) if include_stop => &text[..end],
            Some((end, len)) => &text[..end - len],
        };

        let mut stream = TextStream::new(tokenizer.clone(), stop.clone(), include_stop, &[]);
        let mut plain = Detokenizer::new(tokenizer, true, &[]);
        let (mut streamed, mut known) = (String::new(), String::new());
        for id in ids {
            let delta = stream.push(id);
            streamed.push_str(&delta.text);
            prop_assert_eq!(delta.stopped, stream.stopped());
            if delta.stopped.is_some() {
                continue;
            }
            known.push_str(&plain.push(id));
            // The held-back text is the longest suffix of the text that begins some stop string.
            let held = known.strip_prefix(&streamed);
            prop_assert!(held.is_some());
            let longest = (0..=known.len())
                .filter(|&start| known.is_char_boundary(start))
                .map(|start| &known[start..])
                .find(|end| end.is_empty() || stop.iter().any(|stop| stop.starts_with(end) && stop != end));
            prop_assert_eq!(held, longest);
        }
        streamed.push_str(&stream.finish());
        prop_assert_eq!(streamed, expected);
        prop_assert_eq!(stream.stopped().is_some(), found.is_some());
        if let (Some(index), Some((end, len))) = (stream.stopped(), found) {
            prop_assert_eq!(&stop[index], &text[end - len..end]);
        }
    }
}

#[test]
fn a_text_that_ends_within_a_character_says_so_once() {
    let tokenizer = tokenizer("byte_level");
    let mut ids = tokenizer.encode("x🦜", false).unwrap();
    ids.pop();
    let mut detokenizer = Detokenizer::new(tokenizer, true, &[]);
    let deltas: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    assert_eq!(deltas.concat(), "x");
    assert_eq!(detokenizer.finish(), "\u{fffd}");
    assert_eq!(detokenizer.finish(), "");
}

#[test]
fn a_stop_string_can_end_in_the_middle_of_a_token() {
    let tokenizer = tokenizer("byte_level");
    let ids = tokenizer.encode(" parrot flies", false).unwrap();
    let mut stream = TextStream::new(tokenizer, vec!["never".into(), "rot fl".into()], false, &[]);
    let deltas: Vec<_> = ids.iter().map(|&id| stream.push(id)).collect();
    let text: String = deltas.iter().map(|delta| delta.text.as_str()).collect();
    assert_eq!(text + &stream.finish(), " par");
    assert_eq!(stream.stopped(), Some(1));
    assert_eq!(deltas.last().unwrap().stopped, Some(1));
}

#[test]
fn what_a_tokenizer_knows_about_its_tokens() {
    let tokenizer = tokenizer("byte_level");
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    assert!(tokenizer.is_special(end));
    assert_eq!(tokenizer.id_to_token(end).as_deref(), Some("<|im_end|>"));
    let call = tokenizer.token_to_id("<tool_call>").unwrap();
    assert!(!tokenizer.is_special(call));
    assert_eq!(
        tokenizer.vocab_size() as u32,
        tokenizer.token_to_id("añadido ok").unwrap() + 1
    );
    assert_eq!(tokenizer.token_to_id("no such token"), None);
    assert_eq!(tokenizer.id_to_token(1_000_000), None);
    assert!(!tokenizer.is_special(u32::MAX));
    assert_eq!(
        tokenizer
            .decode(&[u32::MAX, end, 1_000_000], false)
            .unwrap(),
        "<|im_end|>"
    );
    let space = tokenizer.token_to_id("Ġ").unwrap();
    assert_eq!(tokenizer.token_bytes(space), Some(&b" "[..]));
}

#[test]
fn a_long_prompt_is_not_cut_by_the_file() {
    let mut json: Value = serde_json::from_slice(&golden("byte_level_tokenizer.json")).unwrap();
    json["truncation"] = serde_json::json!({
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    });
    let tokenizer = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let text = "The quick brown parrot ".repeat(10);
    let ids = tokenizer.encode(&text, false).unwrap();
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
}

#[test]
fn broken_files_are_refused_in_one_line() {
    let whole = golden("byte_level_tokenizer.json");
    for wrong in [&b""[..], b"{}", b"\xff\xfe", &whole[..whole.len() / 2]] {
        let error = Tokenizer::from_bytes(wrong).err().unwrap();
        assert!(matches!(error, TextError::TokenizerFile(_)), "{error}");
        assert!(!error.to_string().contains('\n'));
    }

    let mut json: Value = serde_json::from_slice(&whole).unwrap();
    json["decoder"] = serde_json::json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": true});
    let error = Tokenizer::from_bytes(json.to_string().as_bytes())
        .err()
        .unwrap();
    assert_eq!(
        error.to_string(),
        "tokenizer.json: decoder: CTC is not supported in this place"
    );
}

/// "flies", "rrot flies" and "ies" all end together.
#[test]
fn of_stop_strings_that_end_together_the_first_listed_wins() {
    let tokenizer = tokenizer("byte_level");
    let ids = tokenizer.encode(" parrot flies", false).unwrap();
    for (stop, expected) in [
        (["flies", "rrot flies", "ies"], " parrot "),
        (["rrot flies", "ies", "flies"], " pa"),
        (["ies", "flies", "rrot flies"], " parrot fl"),
    ] {
        let stop = stop.map(String::from).to_vec();
        let mut stream = TextStream::new(tokenizer.clone(), stop, false, &[]);
        let text: String = ids.iter().map(|&id| stream.push(id).text).collect();
        assert_eq!(text + &stream.finish(), expected);
        assert_eq!(stream.stopped(), Some(0));
    }
}
