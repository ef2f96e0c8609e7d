//! Answers that follow a schema or a grammar, and fields with impossible demands.

use corella_core::Speculation;
use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Setup, TestServer};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A model that writes any bytes in any order, so that any order comes from the grammar.
fn setup() -> Setup {
    let mut setup = Setup::new();
    setup.mock.drawable = (0..256).collect();
    setup
}

fn chat(more: &Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 200,
    });
    for (field, value) in more.as_object().expect("fields") {
        body[field] = value.clone();
    }
    body
}

/// Text and reason of each choice.
async fn answers(server: &TestServer, body: &Value) -> Vec<(String, String)> {
    let reply = post(server.address, CHAT, body).await;
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    let reply = reply.json();
    let choices = reply["choices"].as_array().expect("choices").iter();
    let answer = |choice: &Value| {
        let text = choice["message"]["content"].as_str().expect("text");
        let reason = choice["finish_reason"].as_str().expect("a reason");
        (text.to_owned(), reason.to_owned())
    };
    choices.map(answer).collect()
}

async fn answer(server: &TestServer, body: &Value) -> (String, String) {
    answers(server, body).await.remove(0)
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    })
}

/// Checks by hand, without the code that made the masks.
fn assert_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let fields = value.as_object().expect("an object");
    assert_eq!(fields.len(), 3, "{text}");
    assert!(fields["name"].as_str().expect("a string").chars().count() <= 6);
    assert!(fields["age"].as_u64().expect("a number") <= 150);
    let tags = fields["tags"].as_array().expect("an array");
    assert!((1..=3).contains(&tags.len()));
    assert!(tags.iter().all(|tag| tag == "x" || tag == "y"));
}

#[tokio::test]
async fn json_may_be_asked_for_without_whitespace() {
    let server = setup().start().await;
    let schema = json!({
        "type": "object",
        "properties": {
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "minItems": 2, "maxItems": 3},
        },
        "required": ["age", "tags"],
        "additionalProperties": false,
    });
    let texts = async |is_compact: bool| {
        let form = json!({"json": schema, "disable_any_whitespace": is_compact});
        let more = json!({"structured_outputs": form, "temperature": 1.5, "seed": 7, "n": 4});
        let answers = answers(&server, &chat(&more)).await.into_iter();
        answers.map(|(text, _)| text).collect::<Vec<_>>()
    };
    for text in texts(true).await {
        assert!(!text.contains(char::is_whitespace), "{text}");
        let value: Value = serde_json::from_str(&text).expect("it is JSON");
        assert_eq!(
            value.as_object().map(|fields| fields.len()),
            Some(2),
            "{text}"
        );
    }
    let free = texts(false).await;
    assert!(
        free.iter().any(|text| text.contains(char::is_whitespace)),
        "{free:?}"
    );
}

#[tokio::test]
async fn answers_follow_their_schema() {
    let server = setup().start().await;
    let format = json!({"type": "json_schema", "json_schema": {
        "name": "person", "strict": true, "description": "somebody", "schema": person(),
    }});
    for more in [
        json!({"response_format": format}),
        json!({"structured_outputs": {"json": person()}}),
        json!({"structured_outputs": {"json": person().to_string(), "regex": null}}),
        json!({"guided_json": person()}),
        // An answer ends where it completes its schema, even if `ignore_eos` or `min_tokens` excludes the end token.
        json!({"guided_json": person(), "ignore_eos": true}),
        json!({"guided_json": person(), "min_tokens": 190}),
        json!({"guided_json": person(), "temperature": 1.5, "seed": 7, "n": 4}),
    ] {
        for (text, reason) in answers(&server, &chat(&more)).await {
            assert_eq!(reason, "stop", "{more}: {text}");
            assert_person(&text);
        }
    }
    server.assert_at_rest().await;
}

#[tokio::test]
async fn each_kind_of_grammar_is_followed() {
    let server = setup().start().await;
    let (text, reason) = answer(
        &server,
        &chat(&json!({"guided_regex": "[a-c]{3}-[0-9]{2,4}"})),
    )
    .await;
    let (left, right) = text.split_once('-').expect("a hyphen");
    assert!(
        left.len() == 3 && left.bytes().all(|byte| (b'a'..=b'c').contains(&byte)),
        "{text}"
    );
    assert!((2..=4).contains(&right.len()) && right.bytes().all(|byte| byte.is_ascii_digit()));
    assert_eq!(reason, "stop");
    for field in [
        json!({"structured_outputs": {
            "choice": ["yes", "no", "\"\n"], "_backend": "xgrammar", "disable_fallback": true,
        }}),
        json!({"guided_choice": ["yes", "no", "\"\n"]}),
    ] {
        let (text, reason) = answer(&server, &chat(&field)).await;
        assert!(["yes", "no", "\"\n"].contains(&text.as_str()), "{text}");
        assert_eq!(reason, "stop");
    }
    let lark = "start: (\"ab\" | \"c\")~4 END\nEND: /[!?]/";
    let (text, _) = answer(&server, &chat(&json!({"guided_grammar": lark}))).await;
    let words = text.trim_end_matches(['!', '?']);
    assert_eq!(words.len() + 1, text.len());
    assert_eq!(words.replace("ab", "c"), "cccc");
    let gbnf = "root ::= word{4} [!?] # in llama.cpp's notation\nword ::= \"ab\" | \"c\"";
    for field in [
        json!({"guided_grammar": gbnf}),
        json!({"structured_outputs": {"grammar": gbnf}}),
    ] {
        let (same, _) = answer(&server, &chat(&field)).await;
        assert_eq!(same, text, "{field}");
    }
    let object = json!({"response_format": {"type": "json_object"}, "max_tokens": 30});
    let (text, reason) = answer(&server, &chat(&object)).await;
    assert!(text.trim_start().starts_with('{'), "{text}");
    assert!(reason == "length" || serde_json::from_str::<Value>(&text).is_ok());
    server.assert_at_rest().await;
}

#[tokio::test]
async fn what_a_stream_says_is_the_same_and_so_are_guesses_and_steps_in_flight() {
    let body = chat(&json!({"guided_json": person(), "temperature": 1.0, "seed": 3}));
    let server = setup().start().await;
    let (whole, _) = answer(&server, &body).await;
    assert_person(&whole);
    let mut streamed = String::new();
    let mut stream = body.clone();
    stream["stream"] = json!(true);
    for chunk in post(server.address, CHAT, &stream).await.chunks() {
        for choice in chunk["choices"].as_array().expect("choices") {
            streamed += choice["delta"]["content"].as_str().unwrap_or_default();
        }
    }
    assert_eq!(streamed, whole);
    let mut other = setup();
    other.scheduler.max_inflight_steps = 2;
    assert_eq!(answer(&other.start().await, &body).await.0, whole);
    let mut other = setup();
    other.scheduler.speculation = Speculation::Ngram;
    other.scheduler.max_draft_tokens = 4;
    assert_eq!(answer(&other.start().await, &body).await.0, whole);
}

#[tokio::test]
async fn what_cannot_be_followed_is_refused_with_its_place() {
    let server = setup().start().await;
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"schema": schema}});
    let bad = json!({"type": "object", "properties": {"a": {"type": "text"}}});
    let cases = [
        ("response_format", json!("json"), ""),
        ("response_format.type", json!({}), ""),
        ("response_format.type", json!({"type": "xml"}), ""),
        (
            "response_format.more",
            json!({"type": "text", "more": 1}),
            "more",
        ),
        (
            "response_format.json_schema",
            json!({"type": "json_schema"}),
            "",
        ),
        (
            "response_format.json_schema.schema",
            schema(json!(null)),
            "required",
        ),
        ("response_format.json_schema.schema", schema(json!(7)), ""),
        (
            "response_format.json_schema.schema.properties.a",
            schema(bad.clone()),
            "text",
        ),
        ("structured_outputs", json!({}), "one of"),
        (
            "structured_outputs",
            json!({"disable_any_whitespace": true}),
            "one of",
        ),
        (
            "structured_outputs.disable_any_whitespace",
            json!({"json": {}, "disable_any_whitespace": 1}),
            "true or false",
        ),
        (
            "structured_outputs",
            json!({"choice": ["a"], "regex": "a"}),
            "and has choice and regex",
        ),
        (
            "structured_outputs.whitespace_pattern",
            json!({"json": {}, "whitespace_pattern": " "}),
            "",
        ),
        (
            "structured_outputs.json.properties.a",
            json!({"json": bad}),
            "text",
        ),
        ("structured_outputs.json", json!({"json": "{"}), "not JSON"),
        ("structured_outputs.regex", json!({"regex": "a("}), ""),
        ("structured_outputs.regex", json!({"regex": 7}), "string"),
        ("structured_outputs.choice", json!({"choice": []}), ""),
        ("structured_outputs.choice", json!({"choice": [""]}), ""),
        (
            "structured_outputs.grammar",
            json!({"grammar": "root ::= \"a\" other"}),
            "no rule `other`",
        ),
        (
            "structured_outputs.structural_tag",
            json!({"structural_tag": "x"}),
            "use one of json, ",
        ),
        (
            "structured_outputs.regexp",
            json!({"regexp": "a"}),
            "did you mean `regex`?",
        ),
        ("guided_regex", json!("(?=a)b"), ""),
        ("guided_choice[1]", json!(["a", 1]), ""),
    ];
    for (param, value, word) in cases {
        let field = param.split(['[', '.']).next().expect("a name");
        for (path, mut body) in [
            (COMPLETIONS, json!({"prompt": "hi"})),
            (CHAT, chat(&json!({}))),
        ] {
            body[field] = value.clone();
            let reply = post(server.address, path, &body).await;
            assert_eq!(reply.status, 400, "{body}: {}", reply.text());
            let error = reply.json()["error"].clone();
            assert_eq!(error["param"], param, "{error}");
            let message = error["message"].as_str().expect("a message");
            assert!(
                message.contains(word) && !message.contains("panic"),
                "{message}"
            );
        }
    }
    let both = json!({"guided_regex": "a", "response_format": {"type": "json_object"}});
    let reply = post(server.address, CHAT, &chat(&both)).await;
    assert_eq!(reply.status, 400);
    assert_eq!(reply.json()["error"]["param"], "response_format");
    // The server continues.
    let (text, _) = answer(&server, &chat(&json!({"guided_choice": ["yes"]}))).await;
    assert_eq!(text, "yes");
    server.assert_at_rest().await;
}

/// A parser would follow such a reference forever. Unless refused, the request would begin and fail with an error of
/// the server.
#[tokio::test]
async fn a_reference_that_leads_back_to_itself_is_refused() {
    let server = setup().start().await;
    let schema = json!({
        "type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"],
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
    });
    let body = chat(&json!({"guided_json": schema}));
    let reply = post(server.address, CHAT, &body).await;
    assert_eq!(reply.status, 400, "{}", reply.text());
    let error = reply.json()["error"].clone();
    assert_eq!(error["param"], "guided_json.$defs.a");
    let message = error["message"].as_str().expect("a message");
    assert!(
        message.contains("`#/$defs/b`, then `#/$defs/a`"),
        "{message}"
    );
    // A tree may refer to its own schema from a member.
    let tree = json!({
        "$defs": {"node": {
            "type": "object", "additionalProperties": false, "required": ["leaf"],
            "properties": {"leaf": {"type": "boolean"}, "child": {"$ref": "#/$defs/node"}},
        }},
        "$ref": "#/$defs/node",
    });
    for (text, reason) in answers(&server, &chat(&json!({"guided_json": tree}))).await {
        let node: Result<Value, _> = serde_json::from_str(&text);
        assert!(
            reason == "length" || node.is_ok_and(|node| node["leaf"].is_boolean()),
            "{text}"
        );
    }
    server.assert_at_rest().await;
}
