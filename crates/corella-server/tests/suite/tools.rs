//! Tools, calls and reasoning in `/v1/chat/completions`.

use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Setup, TestServer};

const PATH: &str = "/v1/chat/completions";

/// Writes tools, earlier calls and reasoning like Qwen3's template, in few words.
const HERMES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>\
    {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}\
    {{ m.content if m.content is string else '' }}\
    {% for c in m.tool_calls %}<tool_call>{\"name\": \"{{ c.function.name }}\", \"arguments\": \
    {{ c.function.arguments | tojson }}}</tool_call>\
    {% endfor %}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% if thinks %}<think>\n{% endif %}{% endif %}";

pub const CALLS: &str = "<think>\nÉ, hm.\n</think>\n\nI look.\n\
    <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Orléans\", \"days\": 3}}\n</tool_call>\n\
    <tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

pub fn hermes(replies: &[&str]) -> Setup {
    let mut setup = Setup::new()
        .with_tokens(&["<tool_call>", "</tool_call>", "<think>", "</think>"])
        .ending_at(1000);
    setup.template = HERMES;
    setup.serve.max_model_len = 2048;
    setup.scheduler.max_model_len = 2048;
    setup.replies = replies.iter().map(|&reply| reply.into()).collect();
    setup
}

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([
        {"type": "function", "function": {"name": "weather", "description": "d", "parameters": schema}},
        {"type": "function", "function": {"name": "time", "strict": true}},
    ])
}

pub fn body(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "hi"}], "tools": tools(), "seed": seed,
        "temperature": 0,
    })
}

/// Returns the message that a client assembles from a stream's chunks, and its finish reason.
pub fn assembled(chunks: &[Value]) -> (Value, Value) {
    let mut message = json!({"role": null, "content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []});
    let mut finish = Value::Null;
    for chunk in chunks {
        let choice = &chunk["choices"][0];
        let delta = choice["delta"].as_object().expect("a delta");
        for (name, value) in delta {
            match name.as_str() {
                "role" => message["role"] = value.clone(),
                "tool_calls" => {
                    let call = &value[0];
                    let calls = message["tool_calls"].as_array_mut().expect("calls");
                    let index = call["index"].as_u64().expect("an index") as usize;
                    if index == calls.len() {
                        assert!(
                            !call["function"]["name"]
                                .as_str()
                                .expect("a name")
                                .is_empty()
                        );
                        assert_eq!(call["type"], "function");
                        assert!(!call["id"].as_str().expect("an id").is_empty());
                        calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
                    } else {
                        assert!(call.get("id").is_none() && call["function"].get("name").is_none());
                    }
                    append(
                        &mut calls[index]["arguments"],
                        &call["function"]["arguments"],
                    );
                }
                name => append(&mut message[name], value),
            }
        }
        if !choice["finish_reason"].is_null() {
            finish = choice["finish_reason"].clone();
        }
    }
    (message, finish)
}

fn append(text: &mut Value, more: &Value) {
    let more = more.as_str().expect("text");
    *text = Value::from(text.as_str().expect("text").to_owned() + more);
}

#[tokio::test]
async fn calls_and_reasoning_are_told_from_text_whole_and_streamed() {
    let server = hermes(&[CALLS, "Just text."]).start().await;
    let answer = post(server.address, PATH, &body(0)).await.json();
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(message["reasoning_content"], "É, hm.");
    assert_eq!(message["reasoning"], "É, hm.");
    assert_eq!(message["content"], "I look.");
    let calls = message["tool_calls"].as_array().expect("calls");
    assert_eq!(calls.len(), 2);
    assert_eq!(
        calls[0]["function"],
        json!({"name": "weather", "arguments": "{\"city\": \"Orléans\", \"days\": 3}"})
    );
    assert_eq!(
        calls[1]["function"],
        json!({"name": "time", "arguments": "{}"})
    );
    assert_ne!(calls[0]["id"], calls[1]["id"]);

    let mut streamed = body(0);
    streamed["stream"] = json!(true);
    streamed["logprobs"] = json!(true);
    let chunks = post(server.address, PATH, &streamed).await.chunks();
    let (assembled, finish) = assembled(&chunks);
    assert_eq!(finish, "tool_calls");
    assert_eq!(assembled["role"], "assistant");
    for name in ["content", "reasoning", "reasoning_content"] {
        assert_eq!(assembled[name], message[name]);
    }
    for (index, call) in calls.iter().enumerate() {
        assert_eq!(assembled["tool_calls"][index], call["function"]);
    }
    let num_logprobs: usize = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .map(Vec::len)
        .sum();
    // Every token but the end token has a log-probability in one of the chunks.
    assert_eq!(num_logprobs, server.encode(CALLS).len());

    let answer = post(server.address, PATH, &body(1)).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    assert_eq!(message["content"], "Just text.");
    assert_eq!(
        (message.get("tool_calls"), message.get("reasoning_content")),
        (None, None)
    );
    server.assert_at_rest().await;
}

/// The model may end a reply anywhere, and the client gets the same reply with and without a stream.
#[tokio::test]
async fn a_reply_that_is_cut_off_is_the_same_whole_and_streamed() {
    let server = hermes(&[CALLS]).start().await;
    let num_tokens = server.encode(CALLS).len();
    for max_tokens in 1..=num_tokens {
        let mut body = body(0);
        body["max_tokens"] = json!(max_tokens);
        let answer = post(server.address, PATH, &body).await.json();
        let message = &answer["choices"][0]["message"];
        body["stream"] = json!(true);
        let chunks = post(server.address, PATH, &body).await.chunks();
        let (assembled, finish) = assembled(&chunks);
        assert_eq!(finish, "length");
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        for name in ["content", "reasoning_content"] {
            assert_eq!(text(&assembled[name]), text(&message[name]), "{max_tokens}");
            assert!(!text(&message[name]).contains(['<', '>']), "{message}");
        }
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let calls: Vec<_> = calls.iter().map(|call| call["function"].clone()).collect();
        assert_eq!(assembled["tool_calls"], json!(calls), "{max_tokens}");
    }
}

#[tokio::test]
async fn tools_are_part_of_the_prompt_unless_none_may_be_called() {
    let server = hermes(&["<tool_call>{\"name\": \"time\"}</tool_call>"])
        .start()
        .await;
    let prompt_tokens = async |body: &Value| {
        let reply = post(server.address, PATH, body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        (
            reply.json()["usage"]["prompt_tokens"].clone(),
            reply.json()["choices"][0].clone(),
        )
    };
    let listed = serde_json::to_string(&tools()).expect("JSON");
    // Python's `tojson` puts a space after each comma and colon, outside of strings.
    let with_tools = listed
        .replace(",\"", ", \"")
        .replace("\":", "\": ")
        .replace("},{", "}, {");
    let conversation = "<|user|>hi<|end|><|assistant|>";
    let (num_tokens, choice) = prompt_tokens(&body(0)).await;
    assert_eq!(
        num_tokens,
        server.encode(&(with_tools + conversation)).len()
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], Value::Null);
    let mut none = body(0);
    none["tool_choice"] = json!("none");
    let (num_tokens, choice) = prompt_tokens(&none).await;
    assert_eq!(num_tokens, server.encode(conversation).len());
    assert_eq!(choice["finish_reason"], "stop");
    let mut one = body(0);
    one["parallel_tool_calls"] = json!(false);
    assert_eq!(
        prompt_tokens(&one).await.1["message"]["tool_calls"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
}

#[tokio::test]
async fn a_conversation_may_hold_calls_and_what_tools_said() {
    let server = hermes(&["Fine."]).start().await;
    let call = |arguments: Value| json!({"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": arguments}});
    let conversation = |arguments: Value| {
        json!({"messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "reasoning": "so", "tool_calls": [call(arguments)]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sun"}]},
        ], "tools": tools()})
    };
    let tokens = async |arguments: Value| {
        let mut body = conversation(arguments);
        body["tool_choice"] = json!("none");
        post(server.address, "/tokenize", &body).await.json()["tokens"].clone()
    };
    let expected = "<|user|>hi<|end|><|assistant|><think>so</think><tool_call>{\"name\": \"weather\", \
        \"arguments\": {\"city\": \"Paris\"}}</tool_call><|end|><|tool|>sun<|end|><|assistant|>";
    assert_eq!(
        tokens(json!("{\"city\":\"Paris\"}")).await,
        json!(server.encode(expected))
    );
    assert_eq!(
        tokens(json!({"city": "Paris"})).await,
        json!(server.encode(expected))
    );
    let empty = expected.replace("{\"city\": \"Paris\"}", "{}");
    assert_eq!(tokens(json!("")).await, json!(server.encode(&empty)));
    // A call that was cut off is sent up to its cut.
    let cut = expected.replace("Paris", "Par");
    assert_eq!(
        tokens(json!("{\"city\": \"Par")).await,
        json!(server.encode(&cut))
    );
    let reply = post(server.address, PATH, &conversation(json!(5))).await;
    assert_eq!(reply.status, 400);
    assert_eq!(
        reply.json()["error"]["param"],
        "messages[1].tool_calls[0].function.arguments"
    );
}

#[tokio::test]
async fn a_prompt_that_opens_the_reasoning_is_known() {
    let server = hermes(&["Hm.</think>Yes.", "<think>A"]).start().await;
    let mut body = json!({
        "messages": [{"role": "user", "content": "hi"}], "seed": 0,
        "chat_template_kwargs": {"thinks": true},
    });
    let message = async |body: &Value| {
        post(server.address, PATH, body).await.json()["choices"][0]["message"].clone()
    };
    let answer = message(&body).await;
    assert_eq!(
        (&answer["reasoning_content"], &answer["content"]),
        (&json!("Hm."), &json!("Yes."))
    );
    body["messages"] = json!([
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>\nWell,"},
    ]);
    body["continue_final_message"] = json!(true);
    let answer = message(&body).await;
    assert_eq!(
        (&answer["reasoning_content"], &answer["content"]),
        (&json!("Hm."), &json!("Yes."))
    );
}

/// Calls are markup only where tools were offered.
#[tokio::test]
async fn without_tools_a_reply_keeps_its_tags() {
    let server = hermes(&["<tool_call>x"]).start().await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}], "seed": 0, "skip_special_tokens": false});
    let answer = post(server.address, PATH, &body).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "<tool_call>x");
}

#[tokio::test]
async fn what_is_wrong_with_tools_is_named() {
    let server = hermes(&["x"]).start().await;
    let tool = |function: Value| json!([{"type": "function", "function": function}]);
    let weather = || tool(json!({"name": "weather"}));
    let cases = [
        (json!({"tools": {}}), "tools"),
        (json!({"tools": ["x"]}), "tools[0]"),
        (
            json!({"tools": [{"function": {"name": "x"}}]}),
            "tools[0].type",
        ),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (
            json!({"tools": [{"type": "function"}]}),
            "tools[0].function",
        ),
        (json!({"tools": tool(json!({}))}), "tools[0].function.name"),
        (
            json!({"tools": tool(json!({"name": ""}))}),
            "tools[0].function.name",
        ),
        (
            json!({"tools": tool(json!({"name": "a b"}))}),
            "tools[0].function.name",
        ),
        (
            json!({"tools": tool(json!({"name": "x".repeat(129)}))}),
            "tools[0].function.name",
        ),
        (
            json!({"tools": tool(json!({"name": "x", "description": 1}))}),
            "tools[0].function.description",
        ),
        (
            json!({"tools": tool(json!({"name": "x", "parameters": []}))}),
            "tools[0].function.parameters",
        ),
        (
            json!({"tools": tool(json!({"name": "x", "params": {}}))}),
            "tools[0].function.params",
        ),
        (
            json!({"tools": [weather()[0], weather()[0]]}),
            "tools[1].function.name",
        ),
        (
            json!({"tools": weather(), "tool_choice": "any"}),
            "tool_choice",
        ),
        (
            json!({"tools": weather(), "tool_choice": {"type": "function"}}),
            "tool_choice",
        ),
        (
            json!({"tools": weather(), "tool_choice": {"type": "function", "function": {"name": "x"}}}),
            "tool_choice.function.name",
        ),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"parallel_tool_calls": "yes"}), "parallel_tool_calls"),
        (json!({"reasoning_effort": "low"}), "reasoning_effort"),
    ];
    for (fields, param) in cases {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1});
        for (name, value) in fields.as_object().expect("fields") {
            body[name] = value.clone();
        }
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(
            (reply.status, &reply.json()["error"]["param"]),
            (400, &json!(param)),
            "{body}"
        );
    }
    // This template does not read tools.
    let server = TestServer::start().await;
    let reply = post(server.address, PATH, &body(0)).await;
    assert_eq!(
        (reply.status, &reply.json()["error"]["param"]),
        (400, &json!("tools"))
    );
}

/// Templates like gpt-oss's fail without a description.
#[tokio::test]
async fn tools_are_fitted_to_their_template() {
    let mut setup = hermes(&["Hi."]);
    setup.template = "{# <tool_call> #}{% for t in tools %}{{ t.function.name + t.function.description }}{% endfor %}<|assistant|>";
    let server = setup.start().await;
    let body = json!({
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1,
        "tools": [{"type": "function", "function": {"name": "time"}}],
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}
