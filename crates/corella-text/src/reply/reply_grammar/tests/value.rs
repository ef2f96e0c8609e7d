//! Values of tools' arguments in formats' own notations.

use super::*;

/// Gemma 4's values in its own notation, and in JSON.
#[test]
fn values_without_json_quotes_follow_their_schemas() {
    let tree = json!({
        "type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/Tree"}, "maxItems": 1}},
        "additionalProperties": false,
    });
    let cases: [(Value, IsValid); 12] = [
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
            json!({"type": ["string", "null"], "maxLength": 2}),
            |value| value.is_null() || value.as_str().is_some_and(|text| text.chars().count() <= 2),
        ),
        (json!({"type": "string", "maxLength": 0}), |value| {
            value == ""
        }),
        (
            json!({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
            |value| {
                let items = value.as_array().expect("an array");
                (2..=3).contains(&items.len()) && items.iter().all(Value::is_boolean)
            },
        ),
        (
            json!({"type": "array", "items": {"enum": ["a"]}, "minItems": 1}),
            |value| {
                let items = value.as_array().expect("an array");
                !items.is_empty() && items.iter().all(|item| item == "a")
            },
        ),
        (
            json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"const": "x"}, "c": {"type": "null"}}, "required": ["b"]}),
            |value| {
                let members = value.as_object().expect("an object");
                members["b"] == "x"
                    && members.get("a").is_none_or(Value::is_number)
                    && members.get("c").is_none_or(Value::is_null)
            },
        ),
        (json!({"$ref": "#/$defs/Tree"}), |value| {
            value
                .as_object()
                .expect("an object")
                .keys()
                .all(|key| key == "of")
        }),
        (json!({"type": "object", "maxProperties": 1}), |value| {
            value.as_object().expect("an object").len() <= 1
        }),
        (json!({"type": "object"}), Value::is_object),
        (json!({"type": "array", "maxItems": 0}), |value| {
            value.as_array().is_some_and(Vec::is_empty)
        }),
    ];
    let tokenizer = tokenizer(Markers::Special, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    for calls in [CallFormat::Gemma4, CallFormat::Lfm2, CallFormat::Olmo3] {
        for (schema, is_valid) in &cases {
            let object = json!({
                "type": "object", "properties": {"p": schema}, "required": ["p"], "$defs": {"Tree": tree},
            });
            let context = ReplyContext {
                format: ReplyFormat {
                    calls: Some(calls),
                    reasoning: None,
                },
                tools: Some(Arc::new(ToolSet::new([("f".to_owned(), object)]))),
                ..ReplyContext::default()
            };
            let wanted = WantedReply {
                calls: Some(WantedCalls::Any),
                text: None,
            };
            let grammar = compiler.compile_reply(&tokenizer, &context, wanted, &|| true);
            let grammar = grammar.unwrap_or_else(|error| panic!("{schema}: {error:?}"));
            for seed in 1..=10 {
                let reply = drawn(&grammar, &tokenizer, seed);
                let (_, calls) = read(&context, &reply, 1);
                let arguments: Value = serde_json::from_str(&calls[0].1)
                    .unwrap_or_else(|error| panic!("{schema}: {error}: {reply:?}"));
                assert!(is_valid(&arguments["p"]), "{schema}: {reply:?}");
            }
        }
    }
}

/// Gemma 4's template sorts keys in this order, and LFM2's template keeps the given order.
#[test]
fn arguments_have_the_order_of_the_template() {
    let schema = json!({
        "type": "object", "properties": {"b": {"const": 1}, "A": {"const": 2}, "c": {"const": 3}},
        "required": ["b", "A", "c"],
    });
    let tokenizer = tokenizer(Markers::Special, &[]);
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size()).expect("a vocabulary");
    for (calls, expected) in [
        (
            CallFormat::Gemma4,
            "<|tool_call>call:f{A:2,b:1,c:3}<tool_call|>",
        ),
        (
            CallFormat::Lfm2,
            "<|tool_call_start|>[f(b=1, A=2, c=3)]<|tool_call_end|>",
        ),
        (
            CallFormat::Olmo3,
            "<function_calls>f(b=1, A=2, c=3)</function_calls>",
        ),
    ] {
        let context = ReplyContext {
            format: ReplyFormat {
                calls: Some(calls),
                reasoning: None,
            },
            tools: Some(Arc::new(ToolSet::new([("f".to_owned(), schema.clone())]))),
            ..ReplyContext::default()
        };
        let wanted = WantedReply {
            calls: Some(WantedCalls::One("f".to_owned())),
            text: None,
        };
        let grammar = compiler.compile_reply(&tokenizer, &context, wanted, &|| true);
        let reply = drawn(&grammar.expect("it compiles"), &tokenizer, 1);
        assert_eq!(reply, expected);
    }
}
