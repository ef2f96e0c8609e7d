//! `/v1/responses`, OpenAI's newer API.

use corella_core::StepId;
use corella_model::Fault;
use corella_server::ApiKey;
use serde_json::{Value, json};

use crate::client::{get, head, named_events, post, send};
use crate::fixture::{MODEL, Setup, TestServer};
use crate::tools::{CALLS, hermes};

const PATH: &str = "/v1/responses";

/// Codex offers tools of OpenAI's servers to every model. The model is not shown them.
#[tokio::test]
async fn tools_that_no_caller_runs_are_left_out() {
    let server = hermes(&[CALLS]).start().await;
    let function = json!({
        "type": "function", "name": "shell", "strict": false, "parameters": {"type": "object"},
    });
    let hosted = [
        json!({"type": "web_search", "external_web_access": false}),
        json!({"type": "namespace", "name": "mcp", "tools": []}),
        json!({"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}}),
        json!({"type": "image_generation"}),
    ];
    let num_tokens = async |tools: Value| {
        let body = json!({
            "input": "hi", "tools": tools, "max_output_tokens": 5, "store": false,
            "client_metadata": {"x-codex-installation-id": "7"}, "prompt_cache_key": "8",
        });
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()["usage"]["input_tokens"]
            .as_u64()
            .expect("a number")
    };
    let alone = num_tokens(json!([function])).await;
    let mut all = hosted.to_vec();
    all.insert(1, function);
    assert_eq!(num_tokens(Value::from(all)).await, alone);
    assert!(num_tokens(json!(hosted)).await < alone);
}

/// Codex sends its surroundings and the question as two messages of the user. Mistral's templates require alternating
/// turns.
#[tokio::test]
async fn messages_in_a_row_become_one_where_turns_alternate() {
    let mut setup = Setup::new().ending_at(5);
    setup.template = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
                      {{ raise_exception('alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}\
                      {% if add_generation_prompt %}<|assistant|>{% endif %}";
    let server = setup.start().await;
    let prompt = server.encode("<|user|>here\n\nhi<|end|><|assistant|>");
    let input = json!([{"role": "user", "content": "here"}, {"role": "user", "content": "hi"}]);
    let body = json!({"model": MODEL, "temperature": 0, "input": input});
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!(answer["usage"]["input_tokens"], prompt.len());
    let text = &answer["output"][0]["content"][0]["text"];
    assert_eq!(*text, server.greedy(&prompt, 4));
}

/// Tools that the server omits count in the place, too.
#[tokio::test]
async fn an_error_names_a_tool_by_its_place_in_the_request() {
    let server = hermes(&[CALLS]).start().await;
    let hosted = json!({"type": "web_search"});
    let function = |name: &str, city: Value| {
        let parameters = json!({"type": "object", "properties": {"city": city}});
        json!({"type": "function", "name": name, "parameters": parameters})
    };
    let good = || function("time", json!({"type": "string"}));
    let cases = [
        (
            json!([hosted, good(), function("two words", json!({}))]),
            "tools[2].name",
        ),
        (json!([hosted, good(), hosted, good()]), "tools[3].name"),
        (
            json!([hosted, hosted, function("weather", json!({"type": "text"}))]),
            "tools[2].parameters.properties.city",
        ),
    ];
    for (tools, param) in cases {
        let body = json!({"input": "hi", "tools": tools, "tool_choice": "required"});
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 400, "{}", reply.text());
        assert_eq!(reply.error()["param"], param);
        let message = reply.error()["message"].clone();
        let message = message.as_str().expect("a message");
        assert!(message.starts_with(&format!("{param}: ")), "{message}");
    }
}

/// In this API, a tool choice has no `function` around its name, as a tool has none.
#[tokio::test]
async fn an_error_names_the_choice_of_a_tool_as_this_api_does() {
    let server = hermes(&[CALLS]).start().await;
    let some = |mode: &str, name: &str| {
        let tools = json!([{"type": "function", "name": name}]);
        json!({"type": "allowed_tools", "mode": mode, "tools": tools})
    };
    for (choice, param) in [
        (
            json!({"type": "function", "name": "none_such"}),
            "tool_choice.name",
        ),
        (json!({"type": "function"}), "tool_choice.name"),
        (some("any", "time"), "tool_choice.mode"),
        (some("auto", "none_such"), "tool_choice.tools[0].name"),
        (json!({"type": "web_search"}), "tool_choice"),
        (json!("any"), "tool_choice"),
    ] {
        let tools = json!([{"type": "function", "name": "time", "parameters": {}}]);
        let body = json!({"input": "hi", "tools": tools, "tool_choice": choice});
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 400, "{choice}: {}", reply.text());
        assert_eq!(reply.error()["param"], param);
        let message = reply.error()["message"].to_string();
        assert!(!message.contains("function\\\": {"), "{message}");
    }
    let call = json!([{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}]);
    let reply = post(server.address, PATH, &json!({"input": call})).await;
    assert_eq!(reply.error()["param"], "input[0].name");
    let tools = json!([{"type": "function", "name": "time", "description": 3}]);
    let reply = post(
        server.address,
        PATH,
        &json!({"input": "hi", "tools": tools}),
    )
    .await;
    assert_eq!(reply.error()["param"], "tools[0].description");
}

/// A chat and a response ask for an effort by different fields.
#[tokio::test]
async fn an_effort_reaches_the_template_as_in_a_chat() {
    const EFFORT: &str = "{% if reasoning_effort %}effort {{ reasoning_effort }}{% endif %}";
    const SWITCH: &str =
        "{% if enable_thinking is defined %}{{ 'on' if enable_thinking else 'off' }}{% endif %}";
    const REST: &str =
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>";
    let cases = [
        ([EFFORT, SWITCH], "low", "effort low"),
        ([EFFORT, SWITCH], "none", "effort none"),
        (["", SWITCH], "none", "off"),
        (["", SWITCH], "high", "on"),
    ];
    for (parts, effort, head) in cases {
        let mut setup = Setup::new();
        setup.template = Box::leak(format!("{}{REST}", parts.concat()).into_boxed_str());
        let server = setup.start().await;
        let prompt = server.encode(&format!("{head}<|user|>hi<|end|><|assistant|>"));
        let body = json!({"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": effort}});
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(
            reply.json()["usage"]["input_tokens"],
            prompt.len(),
            "{effort}"
        );
        let messages = json!([{"role": "user", "content": "hi"}]);
        let body = json!({"messages": messages, "max_tokens": 1, "reasoning_effort": effort});
        let reply = post(server.address, "/v1/chat/completions", &body).await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(
            reply.json()["usage"]["prompt_tokens"],
            prompt.len(),
            "{effort}"
        );
    }
}

#[tokio::test]
async fn input_and_instructions_are_answered() {
    let server = Setup::new().ending_at(9).start().await;
    let prompt = server.encode("<|system|>be kind<|end|><|user|>hi<|end|><|assistant|>");
    let mut body = json!({
        "model": MODEL, "temperature": 0, "instructions": "be kind", "input": "hi",
        "metadata": {"a": "b"}, "store": true, "top_logprobs": 2,
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let answer = reply.json();
    assert_eq!(answer["object"], "response");
    assert_eq!(answer["status"], "completed");
    assert_eq!(answer["error"], Value::Null);
    assert_eq!(answer["metadata"], json!({"a": "b"}));
    assert_eq!(answer["store"], true);
    let [item] = &answer["output"].as_array().expect("items")[..] else {
        panic!("one item is expected: {answer}");
    };
    assert_eq!(item["type"], "message");
    assert_eq!(item["status"], "completed");
    let part = &item["content"][0];
    assert_eq!(part["type"], "output_text");
    assert_eq!(part["text"], server.greedy(&prompt, 8));
    assert_eq!(part["logprobs"].as_array().expect("rows").len(), 8);
    assert_eq!(answer["usage"]["input_tokens"], prompt.len());
    assert_eq!(answer["usage"]["output_tokens"], 9);
    // The same conversation as items with parts gives the same prompt.
    body["instructions"] = Value::Null;
    body["input"] = json!([
        {"role": "developer", "content": "be kind"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ]);
    let again = post(server.address, PATH, &body).await.json();
    assert_eq!(again["output"][0]["content"], item["content"]);
    // The output of one turn is part of the input of the next.
    body["input"] = json!([
        {"role": "user", "content": "hi"}, item, {"role": "user", "content": "more"},
    ]);
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let text = part["text"].as_str().expect("text");
    let prompt =
        format!("<|user|>hi<|end|><|assistant|>{text}<|end|><|user|>more<|end|><|assistant|>");
    let num_tokens = server.encode(&prompt).len();
    assert_eq!(reply.json()["usage"]["input_tokens"], num_tokens);
}

#[tokio::test]
async fn a_stream_has_numbered_events_up_to_the_whole_response() {
    let server = TestServer::start().await;
    let mut body = json!({
        "input": "hi", "seed": 5, "max_output_tokens": 12,
        "include": ["message.output_text.logprobs"],
    });
    let whole = post(server.address, PATH, &body).await.json();
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(
        whole["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, PATH, &body).await);
    for (number, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let (start, rest) = names.split_at(4);
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ];
    assert_eq!(start, expected);
    let (deltas, end) = rest.split_at(rest.len() - 4);
    assert!(
        deltas
            .iter()
            .all(|name| *name == "response.output_text.delta"),
        "{names:?}"
    );
    let expected = [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(end, expected);
    let text: String = events
        .iter()
        .filter_map(|(_, data)| data["delta"].as_str())
        .collect();
    let part = &whole["output"][0]["content"][0];
    assert_eq!(text, part["text"]);
    let rows: Vec<&Value> = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta")
        .flat_map(|(_, data)| data["logprobs"].as_array().expect("rows"))
        .collect();
    assert_eq!(json!(rows), part["logprobs"]);
    let last = &events[events.len() - 1].1["response"];
    assert_eq!(last["usage"]["output_tokens"], 12);
    assert_eq!(last["output"][0]["content"][0], *part);
    assert_eq!(events[0].1["response"]["id"], last["id"]);
    assert_eq!(events[0].1["response"]["status"], "in_progress");
}

#[tokio::test]
async fn a_response_is_there_once_its_stream_has_ended_and_not_before() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(20), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({"input": "hi", "temperature": 0, "max_output_tokens": 4, "stream": true});
    let events = named_events(&post(server.address, PATH, &body).await);
    let ended = &events[events.len() - 1].1["response"];
    let path = |id: &Value| format!("{PATH}/{}", id.as_str().expect("an id"));
    assert_eq!(
        get(server.address, &path(&ended["id"])).await.json(),
        *ended
    );
    let next = json!({
        "input": "ho", "temperature": 0, "max_output_tokens": 4, "previous_response_id": ended["id"],
    });
    let text = ended["output"][0]["content"][0]["text"]
        .as_str()
        .expect("text");
    let prompt =
        format!("<|user|>hi<|end|><|assistant|>{text}<|end|><|user|>ho<|end|><|assistant|>");
    let answer = post(server.address, PATH, &next).await.json();
    let prompt = server.encode(&prompt);
    assert_eq!(
        answer["output"][0]["content"][0]["text"],
        server.greedy(&prompt, 4)
    );
    assert_eq!(answer["usage"]["input_tokens"], prompt.len());
    // Responses that failed, or that were made with `store` off, are not kept.
    let body = json!({"input": "hi", "ignore_eos": true, "max_output_tokens": 90, "stream": true});
    let events = named_events(&post(server.address, PATH, &body).await);
    let failed = &events[events.len() - 1].1["response"];
    assert_eq!(failed["status"], "failed");
    let unkept = json!({"input": "hi", "max_output_tokens": 2, "store": false});
    let unkept = post(server.address, PATH, &unkept).await.json();
    for id in [&failed["id"], &unkept["id"]] {
        let missing = get(server.address, &path(id)).await;
        assert_eq!(missing.status, 404);
        assert_eq!(missing.error()["code"], "response_not_found");
    }
}

#[tokio::test]
async fn items_of_kept_answers_are_named_by_their_ids() {
    let mut setup = Setup::new().ending_at(5);
    setup.server.api_keys = ["a", "b"]
        .map(|name| ApiKey::unlimited(name, name))
        .to_vec();
    let server = setup.start().await;
    let send = async |key: &str, input: Value| {
        let body = json!({"input": input, "temperature": 0, "max_output_tokens": 4}).to_string();
        let bearer = format!("Bearer {key}");
        let headers = [
            ("content-type", "application/json"),
            ("authorization", &bearer),
        ];
        let head = head("POST", PATH, &headers, Some(body.len()));
        send(server.address, &head, body.as_bytes()).await
    };
    let first = send("a", json!("hi")).await.json();
    let item = &first["output"][0];
    let input_id = format!("item_{}_0", first["id"].as_str().expect("an id"));
    let next = json!({"role": "user", "content": "ho"});
    let whole = json!([{"role": "user", "content": "hi"}, item, next]);
    let whole = send("a", whole).await.json();
    let named = json!([
        {"type": "item_reference", "id": input_id},
        // The type may be left out.
        {"id": item["id"]},
        next,
    ]);
    let named = send("a", named).await.json();
    assert_eq!(named["output"][0]["content"], whole["output"][0]["content"]);
    assert_eq!(
        named["usage"]["input_tokens"],
        whole["usage"]["input_tokens"]
    );
    // The named items are kept with the new answer: a request can name them again by this answer's id.
    let again = format!("item_{}_0", named["id"].as_str().expect("an id"));
    let again = json!([{"type": "item_reference", "id": again}]);
    let alone = send("a", json!("hi")).await.json();
    let again = send("a", again).await.json();
    assert_eq!(again["output"][0]["content"], alone["output"][0]["content"]);
    let id = item["id"].as_str().expect("an id");
    for (key, wrong, status, param) in [
        ("b", json!({"id": id}), 404, "input[0].id"),
        (
            "a",
            json!({"id": id.replace("msg_", "fc_")}),
            404,
            "input[0].id",
        ),
        ("a", json!({"id": format!("{id}0")}), 404, "input[0].id"),
        ("a", json!({"id": "msg_resp_1_0"}), 404, "input[0].id"),
        ("a", json!({"id": "x"}), 404, "input[0].id"),
        ("a", json!({"type": "item_reference"}), 400, "input[0].id"),
        (
            "a",
            json!({"type": "item_reference", "id": 5}),
            400,
            "input[0].id",
        ),
        (
            "a",
            json!({"type": "item_reference", "id": id, "text": "x"}),
            400,
            "input[0].text",
        ),
    ] {
        let refused = send(key, json!([wrong])).await;
        assert_eq!(refused.status, status, "{wrong}: {}", refused.text());
        assert_eq!(refused.error()["param"], param, "{wrong}");
        if status == 404 {
            assert_eq!(refused.error()["code"], "item_not_found");
        }
    }
}

#[tokio::test]
async fn named_items_are_bounded_like_a_body() {
    let mut setup = Setup::new().ending_at(5);
    setup.server.max_body_bytes = 6000;
    let server = setup.start().await;
    let text = "x".repeat(100);
    let body = json!({"input": [{"role": "user", "content": text}], "max_output_tokens": 1});
    let first = post(server.address, PATH, &body).await.json();
    let id = format!("item_{}_0", first["id"].as_str().expect("an id"));
    let body = json!({"input": vec![json!({"id": id}); 100], "max_output_tokens": 1});
    let refused = post(server.address, PATH, &body).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let message = refused.error()["message"].to_string();
    assert!(message.contains("more than 6000 bytes"), "{message}");
}

/// The items of two responses are named in turn, so that a response is read again for each item.
#[tokio::test]
async fn the_responses_that_are_read_for_named_items_are_bounded() {
    let mut setup = Setup::new().ending_at(5);
    setup.serve.max_model_len = 1 << 20;
    let server = setup.start().await;
    let values = (0..16).map(|key| (key.to_string(), json!("x".repeat(512))));
    let metadata: Value = values.collect::<serde_json::Map<_, _>>().into();
    let mut ids = Vec::new();
    for _ in 0..2 {
        let body = json!({
            "input": [{"role": "user", "content": "a"}], "metadata": metadata, "max_output_tokens": 1,
        });
        let first = post(server.address, PATH, &body).await.json();
        ids.push(format!("item_{}_0", first["id"].as_str().expect("an id")));
    }
    let named: Vec<_> = (0..8000).map(|at| json!({"id": ids[at % 2]})).collect();
    let body = json!({"input": named, "max_output_tokens": 1});
    let refused = post(server.address, PATH, &body).await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    let message = refused.error()["message"].to_string();
    assert!(message.contains("more than 67108864 bytes"), "{message}");
}

#[tokio::test]
async fn members_of_calls_that_openai_makes_itself_may_be_asked_for() {
    let server = TestServer::start().await;
    let body = json!({
        "input": "hi", "max_output_tokens": 1,
        "include": ["web_search_call.action.sources", "reasoning.encrypted_content"],
    });
    assert_eq!(post(server.address, PATH, &body).await.status, 200);
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused_by_its_field() {
    let server = TestServer::start().await;
    let item = |item: Value| json!([item]);
    let cases = [
        ("previous_response_id", json!(1), "previous_response_id"),
        ("store", json!("yes"), "store"),
        ("conversation", json!("conv_1"), "conversation"),
        ("background", json!(true), "background"),
        ("truncation", json!("auto"), "truncation"),
        ("tools", json!([{"type": "functoin"}]), "tools[0].type"),
        (
            "text",
            json!({"format": {"type": "json"}}),
            "text.format.type",
        ),
        ("text", json!({"verbosity": "low"}), "text.verbosity"),
        ("reasoning", json!({"effort": "low"}), "reasoning.effort"),
        ("reasoning", json!({"effort": 3}), "reasoning.effort"),
        ("reasoning", json!({"mode": "pro"}), "reasoning.mode"),
        (
            "structured_outputs",
            json!({"regex": "a"}),
            "structured_outputs",
        ),
        (
            "reasoning",
            json!({"summary": "detailed"}),
            "reasoning.summary",
        ),
        ("include", json!(["file_search_call.rows"]), "include[0]"),
        ("max_output_tokens", json!(0), "max_output_tokens"),
        ("max_tokens", json!(5), "max_tokens"),
        ("input", json!([]), "input"),
        ("input", json!(5), "input"),
        ("input", json!("x".repeat(2000)), "input"),
        (
            "input",
            item(json!({"role": "robot", "content": "x"})),
            "input[0].role",
        ),
        ("input", item(json!({"role": "user"})), "input[0].content"),
        (
            "input",
            item(json!({"role": "user", "content": "a", "id": true})),
            "input[0].id",
        ),
        (
            "input",
            item(json!({"type": "computer_call", "id": "x"})),
            "input[0].type",
        ),
        (
            "input",
            item(json!({"role": "user", "content": [{"type": "input_image"}]})),
            "input[0].content[0].type",
        ),
        ("temprature", json!(1), "temprature"),
    ];
    for (field, value, param) in cases {
        let mut body = json!({"input": "hi"});
        body[field] = value;
        let reply = post(server.address, PATH, &body).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.text());
        assert_eq!(reply.error()["param"], param, "{}", reply.text());
    }
    let body = json!({
        "input": "hi", "truncation": "disabled", "tools": [], "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "reasoning": {"effort": null, "summary": "auto", "context": "auto", "mode": "standard"},
        "include": ["reasoning.encrypted_content"], "parallel_tool_calls": true,
        "max_output_tokens": 3,
    });
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[tokio::test]
async fn a_stream_that_fails_says_so() {
    let mut setup = Setup::new();
    setup.mock.faults = vec![(StepId(5), Fault::Fail)];
    let server = setup.start().await;
    let body = json!({"input": "hi", "max_output_tokens": 50, "stream": true});
    let events = named_events(&post(server.address, PATH, &body).await);
    let [.., (error, _), (failed, data)] = &events[..] else {
        panic!("two events are expected: {events:?}");
    };
    assert_eq!(
        (error.as_str(), failed.as_str()),
        ("error", "response.failed")
    );
    assert_eq!(data["response"]["status"], "failed");
    assert!(data["response"]["error"]["message"].is_string());
    assert!(!events.iter().any(|(name, _)| name == "response.completed"));
}

fn body_with_tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!({
        "input": "hi", "max_output_tokens": 500, "temperature": 0, "seed": 0,
        "tools": [
            {"type": "function", "name": "weather", "description": "d", "parameters": schema, "strict": true},
            {"type": "function", "name": "time"},
        ],
    })
}

#[tokio::test]
async fn calls_and_thoughts_are_items_whole_and_streamed() {
    let server = hermes(&[CALLS]).start().await;
    let mut body = body_with_tools();
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let whole = reply.json();
    let items = |output: &Value| -> Vec<Value> {
        output
            .as_array()
            .expect("items")
            .iter()
            .map(|item| match item["type"].as_str().expect("a type") {
                "function_call" => json!([item["name"], item["arguments"]]),
                kind => json!([kind, item["content"][0]["text"]]),
            })
            .collect()
    };
    let expected = [
        json!(["reasoning", "É, hm."]),
        json!(["message", "I look."]),
        json!(["weather", "{\"city\": \"Orléans\", \"days\": 3}"]),
        json!(["time", "{}"]),
    ];
    assert_eq!(items(&whole["output"]), expected);
    assert_ne!(whole["output"][2]["call_id"], whole["output"][3]["call_id"]);
    assert_eq!(whole["tools"], body["tools"]);
    body["stream"] = json!(true);
    let events = named_events(&post(server.address, PATH, &body).await);
    let last = &events[events.len() - 1].1["response"];
    assert_eq!(items(&last["output"]), expected);
    // The events of each item agree with the whole response.
    let done: Vec<Value> = events
        .iter()
        .filter(|(name, _)| name == "response.output_item.done")
        .map(|(_, data)| data["item"].clone())
        .collect();
    assert_eq!(json!(done), last["output"]);
    for (index, item) in done.iter().enumerate() {
        let of_item = |(_, data): &&(String, Value)| data["item_id"] == item["id"];
        let deltas = events.iter().filter(of_item);
        let joined: String = deltas
            .filter_map(|(_, data)| data["delta"].as_str())
            .collect();
        assert_eq!(joined, expected[index][1], "{item}");
    }
}

#[tokio::test]
async fn a_history_with_tools_is_the_same_prompt_as_a_chat() {
    let server = hermes(&[CALLS]).start().await;
    let mut body = body_with_tools();
    body["input"] = json!([
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{\"city\": \"Paris\"}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "user", "content": "And?"},
    ]);
    body["max_output_tokens"] = json!(1);
    let call = json!({
        "id": "c1", "type": "function",
        "function": {"name": "weather", "arguments": "{\"city\": \"Paris\"}"},
    });
    let schema = &body["tools"][0]["parameters"];
    let chat = json!({
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant", "content": "I look.", "reasoning_content": "hm",
                "tool_calls": [call],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {"role": "user", "content": "And?"},
        ],
        "tools": [
            {"type": "function", "function": {
                "name": "weather", "description": "d", "parameters": schema,
            }},
            {"type": "function", "function": {"name": "time"}},
        ],
    });
    let chat = post(server.address, "/tokenize", &chat).await;
    assert_eq!(chat.status, 200, "{}", chat.text());
    let reply = post(server.address, PATH, &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.json()["usage"]["input_tokens"], chat.json()["count"]);
}
