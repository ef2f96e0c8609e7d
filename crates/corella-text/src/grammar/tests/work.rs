//! Grammars that ask for much work: for their compilation, or for each token of an answer.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

fn reason(source: &GrammarSource) -> String {
    let error = compiler().compile(source).map(|_| ());
    error.expect_err("it is too large").to_string()
}

/// Follows an answer of up to `num_tokens` letters. Returns the number of accepted letters and, if the grammar fails,
/// the reason.
fn follow(lark: &str, num_tokens: usize) -> (usize, Option<String>) {
    let source = GrammarSource::Lark(lark.to_owned());
    let grammar = compiler().compile(&source).expect("it compiles");
    let mut state = grammar.start();
    for at in 0..num_tokens {
        let next = state.allowed().and_then(|_| state.push(b'a'.into()));
        if let Err(reason) = next {
            return (at, Some(reason));
        }
    }
    (num_tokens, None)
}

/// The work for a row grows with the third power of the answer's length.
#[test]
fn an_ambiguous_grammar_fails_before_its_masks_take_long() {
    for lark in [
        "start: e\ne: e e | e e e | \"a\" | ",
        "start: e\ne: e e | \"a\"",
        "start: e\ne: e e e e e | \"a\" | e e",
    ] {
        let (num_tokens, reason) = follow(lark, 1900);
        assert!(num_tokens < 300, "{lark}: {num_tokens}");
        let reason = reason.expect("it fails");
        assert!(reason.contains("less ambiguous"), "{reason}");
    }
    for lark in [
        "start: /[a-z]/*",
        "start: item*\nitem: /[a-z]/ | \"<\" item* \">\"",
        "start: a\na: \"a\" | a \"a\"",
    ] {
        assert_eq!(follow(lark, 1900), (1900, None), "{lark}");
    }
}

#[test]
fn the_work_of_all_masks_of_an_answer_is_bounded() {
    let words: Vec<_> = (0..120).map(|at| format!("(\"a\" \"b{at}\")")).collect();
    let lark = format!("start: (\"a\" | {})*", words.join(" | "));
    let grammar = compiler()
        .compile(&GrammarSource::Lark(lark))
        .expect("it compiles");
    let mut state = grammar.start();
    state.allowed().expect("a mask");
    assert!(state.work() > 0, "a mask costs nothing");
    // Any of the objects may be the answer.
    let objects: Vec<_> = (0..1000)
        .map(|at| json!({"type": "object", "properties": {"p": {"const": at}}, "required": ["p"]}))
        .collect();
    let schema = GrammarSource::JsonSchema(json!({"anyOf": objects}));
    let mut state = compiler().compile(&schema).expect("it compiles").start();
    let ends = b"{\"p".iter().any(|&byte| {
        state.push(byte.into()).expect("it is allowed");
        state.max_work = state.work;
        state
            .allowed()
            .is_err_and(|reason| reason.contains("too much work"))
    });
    assert!(ends, "an answer whose work is spent goes on");
}

#[test]
fn schemas_of_too_much_work_are_refused() {
    let many = |count: usize, value: Value| -> Value {
        (0..count)
            .map(|at| (format!("p{at}"), value.clone()))
            .collect::<serde_json::Map<_, _>>()
            .into()
    };
    let texts = |count: usize| -> Value {
        (0..count)
            .map(|at| json!({"pattern": format!("a{at}")}))
            .collect()
    };
    let cases = |count: usize| -> Value { (0..count).map(|at| json!({"minimum": at})).collect() };
    let crossed: Value = (0..12).map(|_| json!({"anyOf": cases(10)})).collect();
    let chain: Value = (0..3000)
        .map(|at| {
            let next = json!({"$ref": format!("#/$defs/a{}", at + 1)});
            (
                format!("a{at}"),
                json!({"allOf": [next, {"properties": {format!("p{at}"): {}}}]}),
            )
        })
        .collect::<serde_json::Map<_, _>>()
        .into();
    let long_text = json!({"type": "string", "maxLength": 100_000});
    let shared = json!({"type": "object", "properties": many(500, long_text)});
    for (schema, keyword) in [
        (
            json!({"type": "object", "properties": many(501, json!({}))}),
            "`properties`",
        ),
        (
            json!({"properties": many(65, json!({})), "minProperties": 1}),
            "`minProperties`",
        ),
        (
            json!({"patternProperties": many(100, json!({}))}),
            "`patternProperties` has too many",
        ),
        (
            json!({"required": (0..201).map(|at| format!("p{at}")).collect::<Value>()}),
            "`required`",
        ),
        (json!({"type": "string", "allOf": texts(30)}), "`pattern`"),
        // Whether a text can have both patterns takes long to tell.
        (
            json!({"type": "string", "pattern": "a", "anyOf": texts(200)}),
            "too many combinations",
        ),
        (json!({"allOf": crossed}), "`allOf`"),
        (
            json!({"anyOf": (0..4000).map(|at| json!({"minimum": at * 7919})).collect::<Value>()}),
            "`minimum`",
        ),
        (json!({"$ref": "#/$defs/a0", "$defs": chain}), "`allOf`"),
        (
            json!({"allOf": [{"additionalProperties": shared}, {"properties": many(400, json!({}))}]}),
            "`allOf`",
        ),
    ] {
        let reason = reason(&GrammarSource::JsonSchema(schema));
        assert!(reason.contains(keyword), "{keyword}: {reason}");
    }
}

#[test]
fn texts_of_too_much_work_are_refused() {
    let classes: String = (0x4e00..0x5e00u32)
        .map(|c| format!("[\\w&&[^\\x{{{c:x}}}]]"))
        .collect();
    let reason_of = |source| reason(&source);
    assert!(reason_of(GrammarSource::Regex(classes)).contains("classes"));
    let words: Vec<_> = (0..9000).map(|at| format!("\"{at}\"")).collect();
    let lark = format!("start: {}", words.join(" | "));
    assert!(reason_of(GrammarSource::Lark(lark)).contains("too large"));
    // Any number of choices is one terminal.
    let texts: Vec<_> = (0..5000).map(|at| format!("choice {at}")).collect();
    assert!(accepts(&GrammarSource::Choice(texts), "choice 4711"));
    let texts = ["", "ab"].map(str::to_owned).to_vec();
    assert!(accepts(&GrammarSource::Choice(texts.clone()), ""));
    assert!(accepts(&GrammarSource::Choice(texts), "ab"));
}

/// The search for the place of an error compiles parts by themselves.
#[test]
fn compiling_ends_with_its_client() {
    let parts: Value = (0..40)
        .map(|at| json!({"type": "array", "minItems": at}))
        .collect();
    let bad = json!({"prefixItems": parts, "properties": {"z": {"uniqueItems": true}}});
    let source = GrammarSource::JsonSchema(bad);
    let num_questions = |num_wanted: usize| {
        let asked = AtomicUsize::new(0);
        let is_wanted = || asked.fetch_add(1, Ordering::Relaxed) < num_wanted;
        let compiled = compiler().compile_while(&source, &is_wanted);
        assert!(compiled.is_err());
        asked.into_inner()
    };
    let all = num_questions(usize::MAX);
    assert!(all > 10, "{all}");
    assert_eq!(num_questions(0), 1, "nothing is compiled");
    let grammar = GrammarSource::JsonObject;
    assert!(compiler().compile_while(&grammar, &|| false).is_err());
}
