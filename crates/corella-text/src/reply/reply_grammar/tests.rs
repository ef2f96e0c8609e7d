//! Replies drawn at random from their grammars are read back by the parsers of their formats, as calls whose arguments
//! satisfy the schemas.

mod value;

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::{ReplyFormat, ReplyParser, ReplyPart, TagFormat, ToolSet};

/// The markers of all formats.
const MARKERS: [&str; 38] = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_call|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<seed:think>",
    "</seed:think>",
];

/// Whether markers are special tokens, ordinary tokens, or only bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Markers {
    Special,
    Plain,
    Bytes,
}

fn tokenizer(markers: Markers, more: &[&str]) -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    for byte in 0..=u8::MAX {
        let name = crate::tokenizer::byte_alphabet::char_of_byte(byte).to_string();
        vocab.insert(name, byte.into());
    }
    let mut merges = Vec::new();
    for (at, text) in ["{\"", "\":", "\"}", "}}", "</", "ĊĊ", "12"]
        .iter()
        .enumerate()
    {
        vocab.insert((*text).to_owned(), (256 + at).into());
        let mut chars = text.chars().map(String::from);
        merges.push(json!([chars.next(), chars.next()]));
    }
    let markers_added: &[&str] = match markers {
        Markers::Bytes => &[],
        _ => &MARKERS,
    };
    let added = markers_added
        .iter()
        .chain(more)
        .enumerate()
        .map(|(at, content)| {
            json!({
                "id": 263 + at, "content": content, "special": markers == Markers::Special,
                "normalized": false, "single_word": false, "lstrip": false, "rstrip": false,
            })
        });
    let file = json!({
        "version": "1.0",
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
        },
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    Tokenizer::from_bytes(file.to_string().as_bytes()).expect("a tokenizer")
}

fn tools() -> Arc<ToolSet> {
    let weather = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 4},
            "days": {"type": "integer", "minimum": 1, "maximum": 12},
            "unit": {"$ref": "#/$defs/Unit"},
            "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]$"},
            "place": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Place"}]},
        },
        "required": ["city", "days", "place"],
        "$defs": {
            "Unit": {"enum": ["c", "fahrenheit"]},
            "Place": {
                "type": "object", "properties": {"names": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 2}},
                "required": ["names"], "additionalProperties": false,
            },
        },
    });
    Arc::new(ToolSet::new([
        ("weather".to_owned(), weather),
        ("time".to_owned(), Value::Null),
    ]))
}

/// The conditions of the schemas, written by hand.
fn assert_arguments(name: &str, arguments: &str) {
    let value: Value =
        serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {arguments}"));
    let members = value.as_object().expect("an object");
    if name == "time" {
        assert!(members.is_empty(), "{arguments}");
        return;
    }
    assert_eq!(name, "weather");
    let known = ["city", "days", "unit", "code", "place"];
    assert!(
        members.keys().all(|key| known.contains(&key.as_str())),
        "{arguments}"
    );
    let city = members["city"].as_str().expect("a string");
    assert!((1..=4).contains(&city.chars().count()), "{arguments}");
    assert!(
        (1..=12).contains(&members["days"].as_i64().expect("a number")),
        "{arguments}"
    );
    if let Some(unit) = members.get("unit") {
        assert!(unit == "c" || unit == "fahrenheit", "{arguments}");
    }
    if let Some(code) = members.get("code") {
        let code = code.as_str().expect("a string").as_bytes();
        let [first, second, b'/', digit] = code else {
            panic!("{arguments}")
        };
        assert!(
            first.is_ascii_uppercase() && second.is_ascii_uppercase() && digit.is_ascii_digit()
        );
    }
    if let Some(place) = members["place"].as_object() {
        assert_eq!(place.len(), 1, "{arguments}");
        let names = place["names"].as_array().expect("an array");
        assert!(names.len() <= 2 && names.iter().all(|name| name == "a" || name == "é"));
    } else {
        assert!(members["place"].is_null());
    }
}

/// Draws from a grammar: all tokens of more than one byte together are as likely as all single bytes together, and
/// where a reply may end, it ends in half of the cases.
fn drawn(grammar: &Grammar, tokenizer: &Tokenizer, seed: u64) -> String {
    let mut state = grammar.start();
    let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut below = |limit: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 11) as usize % limit
    };
    let mut tokens = Vec::new();
    loop {
        assert!(tokens.len() < 20_000, "it has no end");
        let words = state.allowed().expect("a mask");
        let allowed = (0..32 * words.len() as u32)
            .filter(|&id| words[id as usize / 32] >> (id % 32) & 1 == 1);
        let (bytes, longer): (Vec<_>, Vec<_>) = allowed.partition(|&id| id < 256);
        let may_end = state.may_end().expect("it has not failed");
        if may_end && (bytes.is_empty() && longer.is_empty() || below(2) == 0) {
            return tokenizer.decode(&tokens, false).expect("it decodes");
        }
        let choices = match bytes.is_empty() || !longer.is_empty() && below(2) == 0 {
            true => longer,
            false => bytes,
        };
        assert!(
            !choices.is_empty(),
            "a dead end behind {:?}",
            tokenizer.decode(&tokens, false)
        );
        let token = choices[below(choices.len())];
        state.push(token).expect("it is allowed");
        tokens.push(token);
    }
}

/// A reply's text, and its calls, read in pieces.
fn read(context: &ReplyContext, text: &str, piece_chars: usize) -> (String, Vec<(String, String)>) {
    let mut parser = ReplyParser::new(context);
    let chars: Vec<_> = text.chars().collect();
    let mut parts = Vec::new();
    for piece in chars.chunks(piece_chars) {
        parts.extend(parser.push(&piece.iter().collect::<String>()));
    }
    parts.extend(parser.finish(false));
    let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for part in parts {
        match part {
            ReplyPart::Reasoning(_) => {}
            ReplyPart::Text(more) => text += &more,
            ReplyPart::CallStart { name, .. } => calls.push((name, String::new())),
            ReplyPart::CallArguments { call, json } => calls[call].1 += &json,
        }
    }
    (text, calls)
}

fn contexts() -> Vec<ReplyContext> {
    use ReasoningFormat::{Gemma4, Granite, Harmony, MistralThink, SeedOss, Think};
    let mut contexts = Vec::new();
    for calls in CallFormat::ALL {
        let reasonings = match calls {
            CallFormat::Harmony => vec![None, Some(Harmony)],
            CallFormat::Mistral => vec![None, Some(MistralThink)],
            CallFormat::Gemma4 => vec![None, Some(Gemma4)],
            CallFormat::Granite => vec![None, Some(Granite)],
            CallFormat::Tagged(TagFormat::SeedOss) => vec![None, Some(SeedOss)],
            _ => vec![None, Some(Think)],
        };
        for reasoning in reasonings {
            let format = ReplyFormat {
                calls: Some(calls),
                reasoning,
            };
            let context = ReplyContext {
                format,
                tools: Some(tools()),
                ..ReplyContext::default()
            };
            if reasoning.is_some() && calls != CallFormat::Harmony {
                contexts.push(ReplyContext {
                    within_reasoning: true,
                    ..context.clone()
                });
            }
            contexts.push(ReplyContext {
                past_reasoning: true,
                one_call: true,
                ..context.clone()
            });
            contexts.push(context);
        }
    }
    contexts
}

#[test]
fn calls_that_are_drawn_are_read_back_in_every_format() {
    for markers in [Markers::Special, Markers::Plain, Markers::Bytes] {
        for more in [&[][..], &["[ARGS]"]] {
            let tokenizer = tokenizer(markers, more);
            let vocab_size = tokenizer.vocab_size();
            let compiler = GrammarCompiler::new(&tokenizer, vocab_size).expect("a vocabulary");
            for context in contexts() {
                let is_mistral = context.format.calls == Some(CallFormat::Mistral);
                // Random thoughts do not end by chance if their end has many bytes. The markers of gpt-oss and Gemma 4,
                // some of which end thoughts, are special tokens.
                let thinks = context.format.reasoning.is_some() && !context.past_reasoning;
                let ends_thoughts = [CallFormat::Harmony, CallFormat::Gemma4].map(Some);
                let is_marked = ends_thoughts.contains(&context.format.calls);
                let is_unusual = match markers {
                    Markers::Special => false,
                    Markers::Plain => thinks && is_marked,
                    Markers::Bytes => thinks,
                };
                if is_unusual || !more.is_empty() && !is_mistral {
                    continue;
                }
                check_calls(
                    &compiler,
                    &tokenizer,
                    &context,
                    &format!("{markers:?} {more:?} {context:?}"),
                );
            }
        }
    }
}

fn check_calls(
    compiler: &GrammarCompiler,
    tokenizer: &Tokenizer,
    context: &ReplyContext,
    what: &str,
) {
    // A call by name has the same grammar as calls of any tool. A few draws show whether the name is fixed, and drawing
    // takes most of the test's time.
    const FEW: u64 = 3;
    const MANY: u64 = 20;
    let has_several = !context.one_call && context.format.calls != Some(CallFormat::Harmony);
    let mut most_calls = 0;
    let mut names = std::collections::BTreeSet::new();
    for one in [None, Some("weather"), Some("time")] {
        let calls = one.map_or(WantedCalls::Any, |one| WantedCalls::One(one.to_owned()));
        let wanted = WantedReply {
            calls: Some(calls),
            text: None,
        };
        let grammar = compiler.compile_reply(tokenizer, context, wanted, &|| true);
        let grammar = grammar.unwrap_or_else(|error| panic!("{what}: {error:?}"));
        for seed in 1..=MANY {
            let is_varied = names.len() == 2 && (most_calls > 1) == has_several;
            if seed > FEW && (one.is_some() || is_varied) {
                break;
            }
            let reply = drawn(&grammar, tokenizer, seed);
            let (text, calls) = read(context, &reply, usize::MAX);
            assert_eq!(text, "", "{what}: {reply:?}");
            assert_eq!(
                (text, calls.clone()),
                read(context, &reply, 1),
                "{what}: {reply:?}"
            );
            assert!(!calls.is_empty(), "{what}: {reply:?}");
            if one.is_some() || context.one_call {
                assert_eq!(calls.len(), 1, "{what}: {reply:?}");
            }
            for (name, arguments) in &calls {
                assert!(one.is_none_or(|one| one == name), "{what}: {reply:?}");
                assert_arguments(name, arguments);
            }
            if one.is_none() {
                most_calls = most_calls.max(calls.len());
                names.extend(calls.into_iter().map(|(name, _)| name));
            }
        }
    }
    assert_eq!(names.len(), 2, "{what}");
    assert_eq!(most_calls > 1, has_several, "{what}");
}

/// A format that a request asks for applies only to the text after the reasoning.
#[test]
fn a_text_that_is_wanted_comes_behind_the_reasoning() {
    let tokenizer = tokenizer(Markers::Special, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    let schema = json!({"enum": ["yes", "no"]});
    for mut context in contexts() {
        context.tools = None;
        let wanted = WantedReply {
            calls: None,
            text: Some(GrammarSource::JsonSchema(schema.clone())),
        };
        let grammar = compiler
            .compile_reply(&tokenizer, &context, wanted, &|| true)
            .expect("it compiles");
        let mut num_thoughtful = 0;
        for seed in 1..=20 {
            let reply = drawn(&grammar, &tokenizer, seed);
            let (text, calls) = read(&context, &reply, 1);
            assert!(
                text == "\"yes\"" || text == "\"no\"",
                "{context:?}: {reply:?}"
            );
            assert!(calls.is_empty());
            num_thoughtful += usize::from(reply.len() > text.len() + 30);
        }
        let thinks = context.format.reasoning.is_some() && !context.past_reasoning;
        assert_eq!(num_thoughtful > 0, thinks, "{context:?}");
    }
}

/// If a request has tools and a format, the model chooses between calls and text.
#[test]
fn a_reply_may_be_calls_or_text() {
    let tokenizer = tokenizer(Markers::Special, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    for context in contexts() {
        let text = GrammarSource::Choice(vec!["{}".to_owned(), "x y".to_owned()]);
        let wanted = WantedReply {
            calls: Some(WantedCalls::Any),
            text: Some(text),
        };
        let grammar = compiler
            .compile_reply(&tokenizer, &context, wanted, &|| true)
            .expect("it compiles");
        let (mut num_texts, mut num_calls) = (0, 0);
        for seed in 1..=40 {
            let reply = drawn(&grammar, &tokenizer, seed);
            let (text, calls) = read(&context, &reply, 1);
            assert_eq!(text.is_empty(), !calls.is_empty(), "{context:?}: {reply:?}");
            assert!(
                ["", "{}", "x y"].contains(&text.as_str()),
                "{context:?}: {reply:?}"
            );
            num_texts += usize::from(!text.is_empty());
            num_calls += calls.len();
        }
        assert!(num_texts > 0 && num_calls > 0, "{context:?}");
    }
}

#[test]
fn what_cannot_be_followed_is_told_with_its_tool_and_place() {
    let tokenizer = tokenizer(Markers::Special, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    let good = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let bad = json!({"type": "object", "properties": {"b": {"type": "integer", "uniqueItems": 1, "if": {}}}});
    for context in contexts() {
        let schemas = [
            ("good".to_owned(), good.clone()),
            ("ill".to_owned(), bad.clone()),
        ];
        let context = ReplyContext {
            tools: Some(Arc::new(ToolSet::new(schemas))),
            ..context
        };
        let wanted = WantedReply {
            calls: Some(WantedCalls::Any),
            text: None,
        };
        let error = compiler
            .compile_reply(&tokenizer, &context, wanted, &|| true)
            .expect_err("it is bad");
        assert_eq!(
            error.origin,
            GrammarOrigin::Tool("ill".to_owned()),
            "{error:?}"
        );
        assert_eq!(error.error.place, "properties.b", "{error:?}");
        let one = WantedReply {
            calls: Some(WantedCalls::One("good".to_owned())),
            text: None,
        };
        assert!(
            compiler
                .compile_reply(&tokenizer, &context, one, &|| true)
                .is_ok()
        );
    }
    let wanted = WantedReply {
        calls: Some(WantedCalls::Any),
        text: None,
    };
    let nothing = ReplyContext::default();
    let error = compiler
        .compile_reply(&tokenizer, &nothing, wanted, &|| true)
        .expect_err("no format");
    assert_eq!(error.origin, GrammarOrigin::Whole);
}

/// With the arguments `5`, Gemma 4's `call:f5` would be the call of another tool.
#[test]
fn arguments_are_an_object_in_every_format() {
    let tokenizer = tokenizer(Markers::Special, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    for context in contexts() {
        let compile = |kind: Value| {
            let schema =
                json!({"type": kind, "properties": {"a": {"const": "x"}}, "required": ["a"]});
            let context = ReplyContext {
                tools: Some(Arc::new(ToolSet::new([("f".to_owned(), schema)]))),
                ..context.clone()
            };
            let wanted = WantedReply {
                calls: Some(WantedCalls::One("f".to_owned())),
                text: None,
            };
            let grammar = compiler.compile_reply(&tokenizer, &context, wanted, &|| true);
            grammar.map(|grammar| read(&context, &drawn(&grammar, &tokenizer, 1), 1).1)
        };
        let error = compile(json!("integer")).expect_err("no object");
        assert_eq!(error.origin, GrammarOrigin::Tool("f".to_owned()));
        assert_eq!(error.error.place, "type");
        let calls = compile(json!(["object", "null"])).expect("an object");
        let [(name, arguments)] = calls.as_slice() else {
            panic!("{context:?}: {calls:?}")
        };
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert_eq!((name.as_str(), arguments), ("f", json!({"a": "x"})));
    }
}

type IsValid = fn(&Value) -> bool;

/// The value of a tag has no quotes.
#[test]
fn strings_in_tags_follow_their_schemas_or_are_refused() {
    for markers in [Markers::Special, Markers::Plain] {
        for format in CallFormat::ALL {
            if let CallFormat::Tagged(_) = format {
                check_strings_in_tags(markers, format);
            }
        }
    }
}

fn check_strings_in_tags(markers: Markers, format: CallFormat) {
    let tokenizer = tokenizer(markers, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    let format = ReplyFormat {
        calls: Some(format),
        reasoning: None,
    };
    let compile = |schema: Value| {
        let object = json!({"type": "object", "properties": {"p": schema}, "required": ["p"]});
        let tools = Some(Arc::new(ToolSet::new([("f".to_owned(), object)])));
        let context = ReplyContext {
            format,
            tools,
            ..ReplyContext::default()
        };
        let wanted = WantedReply {
            calls: Some(WantedCalls::Any),
            text: None,
        };
        let grammar = compiler.compile_reply(&tokenizer, &context, wanted, &|| true);
        grammar.map(|grammar| (context, grammar))
    };
    let cases: [(Value, IsValid); 6] = [
        (
            json!({"type": "string", "enum": ["", "a\nb", "x"]}),
            |value| ["", "a\nb", "x"].contains(&value.as_str().expect("text")),
        ),
        (json!({"enum": [1, "two", null]}), |value| {
            *value == json!(1) || value == "two" || value.is_null()
        }),
        (
            json!({"type": "string", "pattern": "b/c", "maxLength": 5}),
            |value| {
                let text = value.as_str().expect("text");
                text.contains("b/c") && text.chars().count() <= 5
            },
        ),
        (
            json!({"type": ["string", "null"], "maxLength": 3}),
            |value| value.is_null() || value.as_str().is_some_and(|text| text.chars().count() <= 3),
        ),
        (
            json!({"type": ["integer", "boolean"], "maximum": 9, "minimum": 0}),
            |value| value.is_i64() || value.is_boolean(),
        ),
        (json!({"const": "só"}), |value| value == "só"),
    ];
    for (schema, is_valid) in cases {
        let (context, grammar) =
            compile(schema.clone()).unwrap_or_else(|error| panic!("{schema}: {error:?}"));
        for seed in 1..=30 {
            let reply = drawn(&grammar, &tokenizer, seed);
            let (_, calls) = read(&context, &reply, 1);
            let arguments: Value = serde_json::from_str(&calls[0].1).expect("JSON");
            assert!(is_valid(&arguments["p"]), "{schema}: {reply:?}");
        }
    }
    for schema in [
        json!({"type": "string", "pattern": "(?=a)b"}),
        json!({"type": "string", "not": {"const": "x"}}),
        json!({"anyOf": [{"type": "string"}], "minLength": 2}),
        json!({"type": "string", "pattern": "(".repeat(1000)}),
        json!({"$ref": "#/properties/p"}),
        json!({"anyOf": [{"$ref": "#/properties/p"}]}),
    ] {
        let error = compile(schema.clone()).expect_err(&schema.to_string());
        assert_eq!(
            error.origin,
            GrammarOrigin::Tool("f".to_owned()),
            "{error:?}"
        );
        assert_eq!(error.error.place, "properties.p", "{schema}: {error:?}");
    }
}
