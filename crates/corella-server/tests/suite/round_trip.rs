//! Every API accepts its own answers as history, in every format, whole and cut anywhere. The next prompt contains the
//! text of such an answer.

use serde_json::{Value, json};

use crate::client::post;
use crate::fixture::{Setup, TestServer};

/// Writes every member of a message. The marks in the comment show the model's format.
const TEMPLATE: &str = "{% if tools %}tools{% endif %}{% for m in messages %}<|{{ m.role }}|>\
    {% if m.reasoning_content %}[thought {{ m.reasoning_content }}]{% endif %}{{ m.content }}\
    {% for c in m.tool_calls %}[call {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}<|over|>\
    {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}";

const CITY: &str = r#"{"city": "Zürich", "days": 3}"#;

async fn server(marks: &str, reply: &str) -> TestServer {
    let mut setup = Setup::new().ending_at(1000);
    setup.template = format!("{{# {marks} #}}{TEMPLATE}").leak();
    setup.serve.max_model_len = 2048;
    setup.scheduler.max_model_len = 2048;
    setup.replies = vec![reply.to_owned()];
    setup.start().await
}

fn schema() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
}

fn tools(tool: fn(&str) -> Value) -> [Value; 2] {
    ["weather", "time"].map(tool)
}

fn chat_tools() -> [Value; 2] {
    tools(|name| json!({"type": "function", "function": {"name": name, "parameters": schema()}}))
}

/// The body of a request to an API with this history and a limit of tokens.
struct Api {
    path: &'static str,
    body: fn(Vec<Value>, usize) -> Value,
    /// Returns the messages or items of an answer for the next request, with the results of its tools.
    history: fn(&Value) -> Vec<Value>,
    num_prompt_tokens: fn(&Value) -> Value,
}

const CHAT: Api = Api {
    path: "/v1/chat/completions",
    body: |messages, num_tokens| {
        json!({
            "messages": messages, "max_tokens": num_tokens, "temperature": 0, "seed": 0,
            "tools": chat_tools(),
        })
    },
    history: |answer| {
        let message = answer["choices"][0]["message"].clone();
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let results = calls
            .into_iter()
            .map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "done"}));
        [message].into_iter().chain(results).collect()
    },
    num_prompt_tokens: |answer| answer["usage"]["prompt_tokens"].clone(),
};

const MESSAGES: Api = Api {
    path: "/v1/messages",
    body: |messages, num_tokens| {
        json!({
            "messages": messages, "max_tokens": num_tokens, "temperature": 0, "seed": 0,
            "tools": tools(|name| json!({"name": name, "input_schema": schema()})),
        })
    },
    history: |answer| {
        let content = answer["content"].as_array().expect("blocks");
        let calls = content.iter().filter(|block| block["type"] == "tool_use");
        let results: Vec<_> = calls
            .map(
                |call| json!({"type": "tool_result", "tool_use_id": call["id"], "content": "done"}),
            )
            .collect();
        let mut history = vec![json!({"role": "assistant", "content": content})];
        if !results.is_empty() {
            history.push(json!({"role": "user", "content": results}));
        }
        history
    },
    num_prompt_tokens: |answer| {
        let usage = &answer["usage"];
        let num = |name: &str| usage[name].as_u64().unwrap_or(0);
        json!(
            num("input_tokens")
                + num("cache_read_input_tokens")
                + num("cache_creation_input_tokens")
        )
    },
};

const RESPONSES: Api = Api {
    path: "/v1/responses",
    body: |items, num_tokens| {
        json!({
            "input": items, "max_output_tokens": num_tokens, "temperature": 0, "seed": 0,
            "tools": tools(|name| json!({"type": "function", "name": name, "parameters": schema()})),
        })
    },
    history: |answer| {
        let items = answer["output"].as_array().expect("items").clone();
        let calls: Vec<_> = items.iter()
            .filter(|item| item["type"] == "function_call")
            .map(|call| {
                json!({"type": "function_call_output", "call_id": call["call_id"], "output": "done"})
            })
            .collect();
        items.into_iter().chain(calls).collect()
    },
    num_prompt_tokens: |answer| answer["usage"]["input_tokens"].clone(),
};

/// Names the items of an answer instead of repeating them, as Vercel's AI SDK does.
const REFERENCES: Api = Api {
    history: |answer| {
        let items = (RESPONSES.history)(answer).into_iter();
        items
            .map(|item| match item.get("output") {
                None => json!({"type": "item_reference", "id": item["id"]}),
                Some(_) => item,
            })
            .collect()
    },
    ..RESPONSES
};

const OLLAMA: Api = Api {
    path: "/api/chat",
    body: |messages, num_tokens| {
        json!({
            "messages": messages, "stream": false,
            "options": {"num_predict": num_tokens, "temperature": 0, "seed": 0},
            "tools": chat_tools(),
        })
    },
    history: |answer| {
        let message = answer["message"].clone();
        let calls = message["tool_calls"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let results = calls.into_iter().map(|call| {
            json!({"role": "tool", "tool_name": call["function"]["name"], "content": "done"})
        });
        [message].into_iter().chain(results).collect()
    },
    num_prompt_tokens: |answer| answer["prompt_eval_count"].clone(),
};

impl Api {
    async fn ask(&self, server: &TestServer, messages: Vec<Value>, num_tokens: usize) -> Value {
        let body = (self.body)(messages, num_tokens);
        let reply = post(server.address, self.path, &body).await;
        assert_eq!(reply.status, 200, "{}: {}\n{body}", self.path, reply.text());
        reply.json()
    }

    /// Asks, sends the answer back, and returns the history and the number of its tokens.
    async fn round_trip(&self, server: &TestServer, num_tokens: usize) -> (Vec<Value>, Value) {
        let user = |text: &str| json!({"role": "user", "content": text});
        let mut history = vec![user("hi")];
        let answer = self.ask(server, history.clone(), num_tokens).await;
        history.extend((self.history)(&answer));
        history.push(user("go on"));
        let next = self.ask(server, history.clone(), 1).await;
        (history, (self.num_prompt_tokens)(&next))
    }
}

/// Checks a reply with thoughts, text and `num_calls` calls. The first call asks for the weather of `CITY`.
async fn check(marks: &str, reply: &str, num_calls: usize) {
    let server = server(marks, reply).await;
    let num_tokens = server.encode(reply).len();
    for cut in 1..=num_tokens {
        let (chat, messages, responses, references, ollama) = tokio::join!(
            CHAT.round_trip(&server, cut),
            MESSAGES.round_trip(&server, cut),
            RESPONSES.round_trip(&server, cut),
            REFERENCES.round_trip(&server, cut),
            OLLAMA.round_trip(&server, cut),
        );
        let (history, num_prompt_tokens) = chat;
        let message = &history[1];
        let prompt = prompt_of(&server, &history).await;
        assert_says(&prompt, message);
        let calls = message["tool_calls"].as_array().map_or(0, Vec::len);
        let is_empty = message["content"].as_str().is_none_or(str::is_empty)
            && message["reasoning_content"]
                .as_str()
                .is_none_or(str::is_empty)
            && calls == 0;
        // The beginning of markup after a call counts as text after a call. Only a chat joins this text with the text
        // before the call.
        let said = message["content"].as_str().unwrap_or_default();
        let has_text_behind = calls > 0 && !["", "I look."].contains(&said.trim());
        // The other APIs have no empty turns.
        if !is_empty && !has_text_behind {
            for (path, (history, num_tokens)) in [
                (MESSAGES.path, messages),
                (RESPONSES.path, responses),
                (REFERENCES.path, references),
                (OLLAMA.path, ollama),
            ] {
                let history = json!(history);
                assert_eq!(
                    num_tokens, num_prompt_tokens,
                    "{path}: {history:#}\n{prompt}"
                );
            }
        }
        if cut == num_tokens {
            assert_eq!(calls, num_calls, "{message}");
            assert!(
                prompt.contains(&format!("[call weather {CITY}]")),
                "{prompt}"
            );
        }
    }
}

async fn prompt_of(server: &TestServer, messages: &[Value]) -> String {
    let body = (CHAT.body)(messages.to_vec(), 1);
    let reply = post(server.address, "/tokenize", &body).await;
    assert_eq!(reply.status, 200, "{}", reply.text());
    let tokens = reply.json()["tokens"].clone();
    let tokens: Vec<u32> = serde_json::from_value(tokens).expect("ids");
    server.tokenizer.decode(&tokens, false).expect("it decodes")
}

fn assert_says(prompt: &str, message: &Value) {
    for name in ["content", "reasoning_content"] {
        let text = message[name].as_str().unwrap_or_default();
        assert!(prompt.contains(text), "{text}\n{prompt}");
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let name = call["function"]["name"].as_str().expect("a name");
        assert!(
            prompt.contains(&format!("[call {name} ")),
            "{name}\n{prompt}"
        );
        let arguments = call["function"]["arguments"].as_str().expect("text");
        // The prompt has the beginning of the city, and the days once their number is complete.
        let city = "Zürich";
        let ends = city.char_indices().map(|(at, c)| at + c.len_utf8());
        for end in ends {
            let begun = format!("\"city\": \"{}", &city[..end]);
            assert!(
                !arguments.contains(&begun) || prompt.contains(&begun),
                "{arguments}\n{prompt}"
            );
        }
        let is_whole = arguments.contains("\"days\": 3");
        assert!(
            !is_whole || prompt.contains("\"days\": 3"),
            "{arguments}\n{prompt}"
        );
    }
}

#[tokio::test]
async fn hermes() {
    let calls = format!(
        "<think>\nHm.\n</think>\nI look.\n<tool_call>\n{{\"name\": \"weather\", \"arguments\": {CITY}}}\n</tool_call>\n\
         <tool_call>\n{{\"name\": \"time\", \"arguments\": {{}}}}\n</tool_call>"
    );
    check("<tool_call> <think>", &calls, 2).await;
}

#[tokio::test]
async fn qwen3_coder() {
    let calls = "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=days>\n3\n\
                 </parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>";
    check("<tool_call> <function= <parameter=", calls, 2).await;
}

#[tokio::test]
async fn llama() {
    let calls = format!(
        "{{\"name\": \"weather\", \"parameters\": {CITY}}}; {{\"name\": \"time\", \"parameters\": {{}}}}"
    );
    check("<|python_tag|>", &calls, 2).await;
}

#[tokio::test]
async fn mistral() {
    let calls = format!(
        "[THINK]Hm.[/THINK]I look.[TOOL_CALLS][{{\"name\": \"weather\", \"arguments\": {CITY}}}, \
         {{\"name\": \"time\", \"arguments\": {{}}}}]"
    );
    check("[TOOL_CALLS] [THINK]", &calls, 2).await;
    let named = format!("[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]time[ARGS]{{}}");
    check("[TOOL_CALLS]", &named, 2).await;
}

#[tokio::test]
async fn harmony() {
    // The thought ends with `<|start|>`, because its usual end, `<|end|>`, is the end token of the fixture's model.
    let call = format!(
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>commentary to=functions.weather \
         <|constrain|>json<|message|>{CITY}"
    );
    check("<|channel|> <|message|>", &call, 1).await;
}

#[tokio::test]
async fn deepseek() {
    let v3 = format!(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{CITY}\n```\
         <｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    check("<｜tool▁call▁begin｜> ```json", &v3, 1).await;
    let v31 = format!(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>\
         <｜tool▁calls▁end｜>"
    );
    check("<｜tool▁call▁begin｜>", &v31, 1).await;
}

#[tokio::test]
async fn granite() {
    let calls = format!(
        "I look.<|tool_call|>[{{\"name\": \"weather\", \"arguments\": {CITY}}}, {{\"name\": \"time\", \"arguments\": {{}}}}]"
    );
    check("<|tool_call|>", &calls, 2).await;
}

#[tokio::test]
async fn gemma4() {
    let calls = "<|channel>thought\nHm.\n<channel|>I look.<|tool_call>call:weather{city:<|\"|>Zürich<|\"|>,days:3}<tool_call|>\
                 <|tool_call>call:time{}<tool_call|>";
    check("<|tool_call> <|channel> <channel|>", calls, 2).await;
}

#[tokio::test]
async fn lfm2() {
    let calls = "<think>\nHm.\n</think>\nI look.<|tool_call_start|>[weather(city='Zürich', days=3), time()]<|tool_call_end|>";
    check("<|tool_call_start|> <think>", calls, 2).await;
}

#[tokio::test]
async fn olmo3() {
    let calls = "I look.<function_calls>weather(city=\"Zürich\", days=3)\ntime()</function_calls>";
    check("<function_calls> </function_calls>", calls, 2).await;
}
