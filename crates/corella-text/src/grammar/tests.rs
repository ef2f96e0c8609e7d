//! Grammars of each kind over a small vocabulary, bad ones, and hostile ones.

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::*;

mod gbnf;
mod work;

/// Tokens 0 to 255 are bytes. Some longer tokens and a special token follow.
fn tokenizer() -> Tokenizer {
    let mut vocab = serde_json::Map::new();
    let mut merges = Vec::new();
    for byte in 0..=u8::MAX {
        let name = crate::tokenizer::byte_alphabet::char_of_byte(byte).to_string();
        vocab.insert(name, byte.into());
    }
    for (at, text) in ["{\"", "\":", "tr", "tru", "true", "\"}", "ab", "12"]
        .iter()
        .enumerate()
    {
        vocab.insert((*text).to_owned(), (256 + at).into());
        let (left, right) = text.split_at(text.len() - 1);
        merges.push(json!([left, right]));
    }
    let file = json!({
        "version": "1.0",
        "added_tokens": [{
            "id": 264, "content": "<|end|>", "special": true, "normalized": false,
            "single_word": false, "lstrip": false, "rstrip": false,
        }],
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

pub(crate) fn compiler() -> GrammarCompiler {
    GrammarCompiler::new(&tokenizer(), 265).expect("a vocabulary")
}

/// Draws an answer of at most `max_tokens` tokens. `None` if the answer does not end by then.
pub(crate) fn draw(grammar: &Grammar, seed: u64, max_tokens: usize) -> Option<String> {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(tokenizer);
    let mut state = grammar.start();
    let mut text = Vec::new();
    // A linear congruential generator, by Knuth's constants.
    let mut random = seed.wrapping_mul(2_862_933_555_777_941_757);
    let mut next = |bound: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % bound
    };
    for _ in 0..max_tokens {
        let words = state.allowed().expect("a mask");
        let allowed: Vec<u32> = (0..words.len() as u32 * 32)
            .filter(|token| words[*token as usize / 32] >> (token % 32) & 1 == 1)
            .collect();
        if state.may_end().expect("it has not failed") && (allowed.is_empty() || next(4) == 0) {
            return Some(String::from_utf8(text).expect("it is text"));
        }
        assert!(
            !allowed.is_empty(),
            "nothing may follow {:?}",
            String::from_utf8_lossy(&text)
        );
        let token = allowed[next(allowed.len())];
        text.extend(TOKENIZER.token_bytes(token).expect("it has bytes"));
        state.push(token).expect("it is allowed");
    }
    None
}

fn is_allowed(state: &mut GrammarState, token: u32) -> bool {
    let words = state.allowed().expect("a mask");
    words[token as usize / 32] >> (token % 32) & 1 == 1
}

/// The number of leading bytes of `text` that the grammar accepts, and whether it may end there.
fn take(grammar: &Grammar, text: &str) -> (usize, bool) {
    let mut state = grammar.start();
    for (at, byte) in text.bytes().enumerate() {
        if !is_allowed(&mut state, byte.into()) {
            return (at, false);
        }
        state.push(byte.into()).expect("it is allowed");
    }
    (text.len(), state.may_end().expect("it has not failed"))
}

fn accepts(source: &GrammarSource, text: &str) -> bool {
    let grammar = compiler().compile(source).expect("it compiles");
    take(&grammar, text) == (text.len(), true)
}

#[test]
fn each_kind_of_grammar_takes_its_texts_and_no_others() {
    let schema = json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let person = GrammarSource::JsonSchema(schema);
    assert!(accepts(&person, r#"{"name": "Ada", "age": 36}"#));
    assert!(!accepts(&person, r#"{"name": "Ada", "age": -1}"#));
    assert!(!accepts(&person, r#"{"name": "Ada"}"#));
    assert!(!accepts(&person, r#"{"name": "Ada", "age": 36"#));
    assert!(accepts(
        &GrammarSource::JsonObject,
        r#"{"a": [1, {"b": null}]}"#
    ));
    assert!(!accepts(&GrammarSource::JsonObject, "[1]"));
    let regex = GrammarSource::Regex("[a-c]{2,3}\\d".to_owned());
    assert!(accepts(&regex, "abc7"));
    assert!(!accepts(&regex, "a7"));
    let texts = ["yes", "no", "say \"\\no\"\n", "/x/"].map(str::to_owned);
    let choice = GrammarSource::Choice(texts.to_vec());
    for text in &texts {
        assert!(accepts(&choice, text), "{text}");
    }
    assert!(!accepts(&choice, "ye"));
    assert!(!accepts(&choice, "yesno"));
    let lark = "start: greeting \" \" NAME\ngreeting: \"hi\" | \"bye\"\nNAME: /[A-Z][a-z]+/";
    let lark = GrammarSource::Lark(lark.to_owned());
    assert!(accepts(&lark, "bye Ada"));
    assert!(!accepts(&lark, "hi ada"));
}

/// Schemas of Pydantic and Ollama's clients have no `additionalProperties`.
#[test]
fn members_that_a_schema_does_not_name_are_not_drawn() {
    let base =
        json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let schema = GrammarSource::JsonSchema(base.clone());
    assert!(accepts(&schema, r#"{"a": 1}"#));
    assert!(!accepts(&schema, r#"{"a": 1, "b": 2}"#));
    let derived = GrammarSource::JsonSchema(json!({
        "type": "object",
        "properties": {
            "plain": {"$ref": "#/$defs/base"},
            "derived": {"allOf": [
                {"$ref": "#/$defs/base"},
                {"type": "object", "properties": {"c": {"type": "integer"}}, "required": ["c"]},
            ]},
        },
        "required": ["plain", "derived"],
        "$defs": {"base": base},
    }));
    assert!(accepts(
        &derived,
        r#"{"plain": {"a": 1}, "derived": {"a": 1, "c": 2}}"#
    ));
    assert!(!accepts(
        &derived,
        r#"{"plain": {"a": 1, "c": 2}, "derived": {"a": 1, "c": 2}}"#
    ));
    assert!(!accepts(
        &derived,
        r#"{"plain": {"a": 1}, "derived": {"a": 1, "c": 2, "d": 3}}"#
    ));
    let open = GrammarSource::JsonSchema(json!({
        "type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "integer"},
    }));
    assert!(accepts(&open, r#"{"a": 1, "b": 2}"#));
    assert!(accepts(
        &GrammarSource::JsonSchema(json!({"type": "object"})),
        r#"{"b": 2}"#
    ));
}

#[test]
fn longer_tokens_are_allowed_where_their_bytes_are() {
    let source = GrammarSource::JsonSchema(json!({
        "type": "object", "properties": {"ab": {"type": "boolean"}}, "required": ["ab"],
        "additionalProperties": false,
    }));
    let grammar = compiler().compile(&source).expect("it compiles");
    let mut state = grammar.start();
    // `{"`, `ab`, `":`, `true`, `}`.
    for token in [256, 262, 257, 260, u32::from(b'}')] {
        assert!(is_allowed(&mut state, token), "{token}");
        assert!(!state.may_end().expect("it has not failed"));
        // Only a grammar that names a special token allows it.
        assert!(!is_allowed(&mut state, 264));
        state.push(token).expect("it is allowed");
    }
    assert!(state.may_end().expect("it has not failed"));
    assert!(
        state
            .allowed()
            .expect("a mask")
            .iter()
            .all(|&word| word == 0)
    );
}

#[test]
fn tokens_that_the_model_does_not_have_are_not_allowed() {
    let compiler = GrammarCompiler::new(&tokenizer(), 100).expect("a vocabulary");
    let grammar = compiler.compile(&GrammarSource::Regex("[A-z]+".to_owned()));
    let words = grammar
        .expect("it compiles")
        .start()
        .allowed()
        .expect("a mask");
    assert_eq!(words.len(), 4);
    let allowed: Vec<_> = (0..128)
        .filter(|at| words[at / 32] >> (at % 32) & 1 == 1)
        .collect();
    assert_eq!(allowed, (usize::from(b'A')..100).collect::<Vec<_>>());
}

#[test]
fn an_answer_that_fails_leaves_others_alone() {
    let grammar = compiler()
        .compile(&GrammarSource::Regex("ab*".to_owned()))
        .expect("it compiles");
    let (mut failing, mut other) = (grammar.start(), grammar.start());
    failing.push(b'b'.into()).expect_err("it is not allowed");
    failing.allowed().expect_err("it has failed");
    other.push(b'a'.into()).expect("it is allowed");
    assert_eq!(take(&grammar, "abbb"), (4, true));
    assert!(is_allowed(&mut other, b'b'.into()));
}

#[test]
fn a_bad_schema_is_told_with_its_place() {
    let compiler = compiler();
    let cases = [
        (json!({"type": "text"}), "", "text"),
        (
            json!({"properties": {"a": {"type": "text"}}}),
            "properties.a",
            "text",
        ),
        (
            json!({"properties": {"a": {"items": {"if": true, "type": "string"}}}}),
            "properties.a.items",
            "if",
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "(("}]}),
            "anyOf[1]",
            "",
        ),
        (
            json!({
                "properties": {"a": {"$ref": "#/$defs/b"}},
                "$defs": {"b": {"properties": {"c": {"minimum": "x"}}}},
            }),
            "$defs.b.properties.c",
            "minimum",
        ),
        (
            json!({"properties": {"a": {"$ref": "#/$defs/b"}}}),
            "properties.a",
            "b",
        ),
        (json!(3), "", "object"),
    ];
    for (schema, place, word) in cases {
        let error = compiler.compile(&GrammarSource::JsonSchema(schema.clone()));
        let error = error.expect_err(&schema.to_string());
        assert!(error.reason.contains(word), "{schema}: {error}");
        assert_eq!(error.place, place, "{schema}: {error}");
        assert!(
            error.reason.len() < 300 && !error.reason.contains("backtrace"),
            "{error}"
        );
    }
}

#[test]
fn bad_grammars_of_other_kinds_are_told() {
    let compiler = compiler();
    let lark = |text: &str| GrammarSource::Lark(text.to_owned());
    let regex = |text: &str| GrammarSource::Regex(text.to_owned());
    for source in [
        lark(""),
        lark("start: missing"),
        lark("start: \"a"),
        regex("a("),
        regex("(?=a)b"),
        regex(&"(".repeat(100_000)),
        lark(&format!("start: {}", "(".repeat(50_000))),
        lark(&"a".repeat(MAX_SOURCE_BYTES + 1)),
    ] {
        let error = compiler
            .compile(&source)
            .expect_err(&format!("{source:.100?}"));
        assert!(
            !error.reason.is_empty() && error.reason.len() < 500,
            "{error}"
        );
    }
}

/// A large repetition is expanded only while an answer follows it.
#[test]
fn a_large_repetition_is_followed_within_the_limits() {
    let source = GrammarSource::Regex("((a{1000}){1000}){1000}".to_owned());
    if let Ok(grammar) = compiler().compile(&source) {
        let mut state = grammar.start();
        for _ in 0..50 {
            let Ok(words) = state.allowed() else { return };
            assert_eq!(words[3] >> 1 & 1, 1, "an `a` may follow");
            state.push(b'a'.into()).expect("it is allowed");
        }
        assert!(!state.may_end().expect("it has not failed"));
    }
}

/// Chains of definitions make a compiler recurse.
#[test]
fn long_chains_of_definitions_do_no_harm() {
    let compiler = compiler();
    let rules = (0..8000).map(|at| format!("T{at}: T{}\n", at + 1));
    let lark = format!("start: T0\n{}T8000: \"x\"", rules.collect::<String>());
    let _ = compiler.compile(&GrammarSource::Lark(lark));
    let mut definitions = serde_json::Map::new();
    for at in 0..4000 {
        let next = json!({"allOf": [{"$ref": format!("#/$defs/d{}", at + 1)}]});
        definitions.insert(format!("d{at}"), next);
    }
    definitions.insert("d4000".to_owned(), json!({"type": "null"}));
    let schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
    let _ = compiler.compile(&GrammarSource::JsonSchema(schema));
    assert!(accepts(&GrammarSource::Regex("x".to_owned()), "x"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any source of a caller is compiled or refused.
    #[test]
    fn no_source_makes_it_panic(text in "\\PC{0,80}", lark in "(start: |[a-z]+: |\"[a-z]*\"|/[a-z(\\[*]*/|\\||\\n| ){0,20}") {
        let compiler = compiler();
        let _ = compiler.compile(&GrammarSource::Regex(text.clone()));
        let _ = compiler.compile(&GrammarSource::Lark(lark));
        let _ = compiler.compile(&GrammarSource::JsonSchema(json!({"pattern": text, "type": "string"})));
        if !text.is_empty() {
            prop_assert!(accepts(&GrammarSource::Choice(vec![text.clone()]), &text));
        }
    }
}

#[test]
fn a_grammar_is_compiled_once() {
    let compiler = compiler();
    let is_same = |a: &Grammar, b: &Grammar| Arc::ptr_eq(&a.start, &b.start);
    let compile = |source: &GrammarSource| compiler.compile(source).expect("it compiles");
    let regex = GrammarSource::Regex("ab".to_owned());
    let lark = GrammarSource::Lark("start: \"ab\"".to_owned());
    let first = compile(&regex);
    assert!(!is_same(&compile(&lark), &first));
    assert!(is_same(&compile(&regex), &first));
    // The same text as another kind of grammar is another grammar.
    assert!(!is_same(
        &compile(&GrammarSource::Choice(vec!["ab".to_owned()])),
        &first
    ));
}

/// JSON objects are equal in any order of their members.
#[test]
fn the_order_of_properties_counts() {
    let compiler = compiler();
    let schema = |text| GrammarSource::JsonSchema(serde_json::from_str(text).expect("JSON"));
    let texts = [
        r#"{"properties": {"a": {"const": 1}, "b": {"const": 2}}, "required": ["a", "b"]}"#,
        r#"{"properties": {"b": {"const": 2}, "a": {"const": 1}}, "required": ["a", "b"]}"#,
    ];
    let answers = [r#"{"a":1,"b":2}"#, r#"{"b":2,"a":1}"#];
    for (own, text) in texts.iter().enumerate() {
        let grammar = compiler.compile(&schema(text)).expect("it compiles");
        for (at, answer) in answers.iter().enumerate() {
            let mut state = grammar.start();
            let mut pushed = answer.bytes().map(|byte| state.push(byte.into()));
            assert_eq!(
                pushed.all(|pushed| pushed.is_ok()),
                at == own,
                "{text} {answer}"
            );
        }
    }
}

/// Texts that Zod's pattern accepts and llguidance's format refuses.
const STRICTER: [(&str, &str); 3] = [
    ("duration", "\"PT2H3M4.5S\""),
    ("duration", "\"PT0,5S\""),
    ("hostname", "\"a.org.\""),
];

/// Compares with Zod's own verdicts on values of its schemas (`tests/schemas/make_zod.mjs`).
#[test]
fn schemas_of_zod_are_followed() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/schemas/zod.jsonl");
    let lines = std::fs::read_to_string(path).expect("schemas");
    let compiler = compiler();
    for line in lines.lines() {
        let case: Value = serde_json::from_str(line).expect("JSON");
        let schema = GrammarSource::JsonSchema(case["schema"].clone());
        let grammar = compiler.compile(&schema);
        let grammar = grammar.unwrap_or_else(|error| panic!("{}: {error}", case["name"]));
        for (list, is_taken) in [("taken", true), ("refused", false)] {
            for value in case[list].as_array().expect("values") {
                let text = value.to_string();
                let name = case["name"].as_str().expect("a name");
                let found = take(&grammar, &text) == (text.len(), true);
                let expected = is_taken && !STRICTER.contains(&(name, &*text));
                assert_eq!(found, expected, "{name}: {text}");
            }
        }
    }
}

/// Errors name parts of the schema, which a caller can change, and no options of llguidance.
#[test]
fn reasons_speak_of_the_schema() {
    let compiler = compiler();
    let schema = |schema: Value| GrammarSource::JsonSchema(schema);
    let lark = |text: &str| GrammarSource::Lark(text.to_owned());
    let two = json!({"type": "object", "properties": {"a": {"type": "string"}}});
    let long = "x".repeat(300);
    let cases = [
        (schema(json!({"oneOf": [two, two]})), "`anyOf`"),
        (
            schema(json!({"if": true, "not": {"type": "null"}})),
            "`if` and `not`",
        ),
        (schema(json!({"type": "text"})), "`text` is no type"),
        (schema(json!({"type": 3})), "type"),
        (
            schema(json!({"type": "string", "format": "regex"})),
            "format `regex`",
        ),
        (
            schema(json!({"type": "string", "pattern": 3})),
            "`pattern` must be a string, not 3",
        ),
        (
            schema(json!({"type": "string", "pattern": "(("})),
            "unclosed group",
        ),
        (
            schema(json!({"type": "string", "pattern": "(a)\\1"})),
            "backreferences",
        ),
        (
            schema(json!({"type": "string", "pattern": "a(?=b)"})),
            "`(?=`",
        ),
        (
            schema(json!({"type": "string", "pattern": "a\\bc"})),
            "anchors",
        ),
        (
            schema(json!({"patternProperties": {"^(?=a)": true}})),
            "`(?=`",
        ),
        (
            schema(json!({"type": "string", "minLength": -1})),
            "`minLength` must be an integer from 0 up, not -1",
        ),
        (
            schema(json!({"type": "string", "minLength": 3, "maxLength": 2})),
            "maxLength",
        ),
        (
            schema(json!({"type": "string", "minLength": 4, "pattern": "^ab?$"})),
            "`pattern`",
        ),
        (
            schema(json!({"type": "number", "minimum": "1"})),
            "`minimum` must be a number",
        ),
        (
            schema(json!({"type": "number", "minimum": 3, "maximum": 2})),
            "minimum",
        ),
        (
            schema(json!({"type": "number", "multipleOf": 0.1234567890123})),
            "`multipleOf`",
        ),
        (schema(json!({"type": "number", "minimum": 1e300})), ""),
        (schema(json!({"type": "integer", "minimum": 1e300})), ""),
        (
            schema(json!({"type": "array", "minItems": 3, "maxItems": 2})),
            "minItems",
        ),
        (
            schema(json!({"properties": 3})),
            "properties must be an object",
        ),
        (schema(json!({"properties": {"a": 3}})), ""),
        (
            schema(json!({"required": "a"})),
            "`required` must be an array",
        ),
        (
            schema(json!({"required": [1]})),
            "`required` must be a string",
        ),
        (
            schema(json!({"properties": {"a": true}, "minProperties": 2})),
            "`minProperties`",
        ),
        (
            schema(json!({"patternProperties": {"^a": true, "b$": true}})),
            "exclude each other",
        ),
        (schema(json!({"$ref": 3})), "$ref must be a string"),
        (
            schema(json!({"$ref": "#/$defs/x"})),
            "`$ref` leads nowhere: #/$defs/x",
        ),
        (schema(json!({"$ref": "other.json"})), "\"#/$defs/NAME\""),
        (schema(json!({"$ref": "#/anyOf/x", "anyOf": [true]})), ""),
        (schema(json!({"enum": 3})), "enum must be an array"),
        (
            schema(json!({"type": "object", "properties": {"a": false}, "required": ["a"]})),
            "'a'",
        ),
        (
            schema(json!({"type": "string", "format": format!("{long}ü")})),
            "",
        ),
        (
            schema(
                json!({"type": "string", "pattern": format!("{}ü", "x".repeat(99)), "minLength": "ü".repeat(200)}),
            ),
            "",
        ),
        (
            schema(json!({"type": "string", "pattern": "(?:(?:a{1000}){1000}){1000}"})),
            "",
        ),
        (lark("start: a\na: b"), "b"),
        (lark("start: \"a"), ""),
        (lark("start: /(?=a)b/"), "`(?=`"),
        (lark("start: /((/"), "unclosed group"),
        (
            lark("start: %json {\"type\": \"text\"}"),
            "`text` is no type",
        ),
        (lark("start: <|no such token|>"), ""),
        (lark("start: A\nA: A \"x\""), ""),
        (lark(""), ""),
        (GrammarSource::Regex("a(".to_owned()), "unclosed group"),
        (GrammarSource::Regex("(?=a)b".to_owned()), "`(?=`"),
    ];
    let internal = [
        "llguidance",
        "coerce",
        "lenient",
        "json-schema:",
        "f64",
        "fuel",
        "limits.",
        "(?P<",
        "panic",
        "ExprRef",
        "while processing",
        "Unimplemented",
        "referencing",
        "NoExtension",
        "lark_grammar",
        "RegexAst",
        "usize",
        "supported without",
        "\n",
    ];
    let mut wrong = Vec::new();
    for (source, word) in cases {
        let Err(error) = compiler.compile(&source) else {
            continue;
        };
        let is_internal = internal.iter().any(|word| error.reason.contains(word));
        if is_internal || !error.reason.contains(word) || error.reason.len() > 500 {
            wrong.push(format!("{source:.120?}: {error}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
