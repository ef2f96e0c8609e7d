//! Bodies of requests, at the routes that read them, with the mock executor behind the whole server.

use std::sync::Arc;

use corella_core::{SchedulerConfig, TokenId};
use corella_engine::{Engine, EngineConfig};
use corella_fuzz::{Random, Target, Verdict};
use corella_model::{MockConfig, MockExecutor};
use corella_server::{
    Backend, LocalClient, OutputMetrics, ServeConfig, ServerConfig, ServerParts, ServerState,
    TextModel,
};
use corella_text::{ChatTemplate, TemplateFiles, Tokenizer};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::corpus;
use crate::model::mutate_json_bytes;

const MAX_MODEL_LEN: u32 = 256;

/// A request to a route.
#[derive(Clone)]
struct Input {
    path: &'static str,
    body: Vec<u8>,
}

impl Input {
    fn new(path: &'static str, body: Value) -> Self {
        Self {
            path,
            body: body.to_string().into_bytes(),
        }
    }
}

impl AsRef<[u8]> for Input {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

struct Server {
    runtime: Runtime,
    client: LocalClient,
}

impl Server {
    fn start() -> Self {
        let tokenizer = Tokenizer::from_bytes(&corpus::bytes("models/nano/tokenizer.json"));
        let tokenizer = tokenizer.expect("the built-in model's");
        let config = corpus::bytes("models/nano/tokenizer_config.json");
        let template = ChatTemplate::from_files(TemplateFiles {
            tokenizer_config_json: Some(&config),
            ..TemplateFiles::default()
        });
        let template = template.expect("it parses").expect("there is one");
        let vocab_size = tokenizer.vocab_size();
        let scheduler = SchedulerConfig::new(256, 16, MAX_MODEL_LEN);
        let mut mock = MockConfig::new(vocab_size, scheduler.num_pages, scheduler.page_size);
        let hidden_size = mock.hidden_size;
        // The mock draws no special tokens, because grammars allow only tokens of text.
        mock.drawable = (0..vocab_size as TokenId)
            .filter(|id| !tokenizer.is_special(*id))
            .collect();
        let engine = Engine::start(
            EngineConfig::new(scheduler),
            Box::new(MockExecutor::new(mock)),
        );
        let engine = engine.expect("it starts");
        let text = TextModel {
            reply_format: template.reply_format(),
            tokenizer,
            chat_template: Some(template),
        };
        let backend = Backend {
            generator: Arc::new(engine.clone()),
            kv_transfer: None,
            roles: None,
            adapters: None,
            outputs: OutputMetrics::default(),
            collectors: Vec::new(),
        };
        let parts = ServerParts::new(ServerConfig::default(), None, Some("mock"), Vec::new());
        let config = ServeConfig::new("mock", MAX_MODEL_LEN, vocab_size, hidden_size);
        let state = ServerState::with_backend(parts, config, text, engine, backend);
        Self {
            runtime: Runtime::new().expect("threads"),
            client: LocalClient::new(state),
        }
    }

    /// # Panics
    /// When the answer is a server error, or an error without a message.
    fn ask(&self, input: &Input) -> Verdict {
        let (status, body) = self.runtime.block_on(async {
            let response = self.client.post(input.path, input.body.clone()).await;
            let mut response = response.expect("it is a path");
            (
                response.status,
                response.bytes().await.expect("a whole body"),
            )
        });
        let body = String::from_utf8(body.to_vec()).expect("answers are UTF-8");
        assert!(status < 500, "{status} {body}");
        match status {
            200 => {
                assert!(!body.contains("server_error"), "{body}");
                assert!(!body.contains("api_error"), "{body}");
                Verdict::Accepted
            }
            _ => {
                let error: Value = serde_json::from_str(&body).expect("errors are JSON");
                let message = error["error"]["message"].as_str();
                assert!(
                    message.is_some_and(|message| !message.is_empty()),
                    "{status} {body}"
                );
                Verdict::Refused
            }
        }
    }
}

fn corpus() -> Vec<Input> {
    let text = "A fox.";
    let messages = json!([{"role": "user", "content": text}]);
    let weather = json!({"name": "weather", "description": "of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}});
    let schema =
        json!({"type": "object", "properties": {"a": {"enum": ["x", 1, null]}}, "required": ["a"]});
    let chat = "/v1/chat/completions";
    vec![
        Input::new(
            chat,
            json!({"model": "mock", "messages": messages, "max_tokens": 4, "temperature": 0.5, "seed": 1,
            "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["x", "yz"], "n": 2, "logprobs": true, "top_logprobs": 2}),
        ),
        Input::new(
            chat,
            json!({"messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"x\"}"}}]},
            {"role": "tool", "tool_call_id": "a", "content": "sunny"}],
            "max_completion_tokens": 4, "stream": true, "stream_options": {"include_usage": true},
            "logit_bias": {"5": 1.5}, "frequency_penalty": 0.1, "presence_penalty": 0.1, "repetition_penalty": 1.1}),
        ),
        Input::new(
            chat,
            json!({"messages": messages, "max_tokens": 8,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": true}}}),
        ),
        Input::new(
            chat,
            json!({"messages": messages, "max_tokens": 4, "min_tokens": 2, "ignore_eos": true,
            "structured_outputs": {"regex": "[a-z]{1,4}"}, "chat_template_kwargs": {"a": 1}, "priority": 1,
            "stop_token_ids": [3], "skip_special_tokens": false, "cache_salt": "s"}),
        ),
        Input::new(
            "/v1/completions",
            json!({"prompt": text, "max_tokens": 4, "echo": true, "logprobs": 2, "suffix": null,
            "prompt_logprobs": 1, "best_of": 2, "n": 1}),
        ),
        Input::new(
            "/v1/completions",
            json!({"prompt": [[1, 2, 3], [4]], "max_tokens": 3, "stream": true, "stop": "x",
            "structured_outputs": {"choice": ["yes", "no"]}, "user": "me"}),
        ),
        Input::new(
            "/v1/responses",
            json!({"input": text, "max_output_tokens": 4, "instructions": "Be kind.",
            "metadata": {"a": "b"}, "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}),
        ),
        Input::new(
            "/v1/responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": text}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "sunny"}], "stream": true, "store": false,
            "max_output_tokens": 4}),
        ),
        Input::new(
            "/v1/messages",
            json!({"model": "mock", "messages": messages, "max_tokens": 4, "system": "Be kind.",
            "stop_sequences": ["x"], "metadata": {"user_id": "a"}}),
        ),
        Input::new(
            "/v1/messages",
            json!({"model": "mock", "max_tokens": 4, "stream": true, "messages": [
            {"role": "user", "content": [{"type": "text", "text": text}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "sunny"}]}]}),
        ),
        Input::new(
            "/v1/messages/count_tokens",
            json!({"model": "mock", "messages": messages}),
        ),
        Input::new(
            "/v1/embeddings",
            json!({"input": [text, "A lantern."], "dimensions": 4, "pooling": "mean",
            "encoding_format": "float", "user": "me"}),
        ),
        Input::new(
            "/v1/embeddings",
            json!({"input": [[1, 2], [3]], "encoding_format": "base64"}),
        ),
        Input::new(
            "/score",
            json!({"text_1": text, "text_2": ["A lantern.", "Snow."]}),
        ),
        Input::new(
            "/rerank",
            json!({"query": text, "documents": ["A lantern.", "Snow."], "top_n": 1,
            "return_documents": true}),
        ),
        Input::new(
            "/tokenize",
            json!({"prompt": text, "add_special_tokens": true, "return_token_strs": true}),
        ),
        Input::new(
            "/tokenize",
            json!({"messages": messages, "add_generation_prompt": true}),
        ),
        Input::new("/detokenize", json!({"tokens": [1, 2, 3]})),
        // The built-in model's template reads no tools, so that this body is refused. Changed bodies may be accepted.
        Input::new(
            "/tokenize",
            json!({"messages": messages, "tools": null, "x": weather}),
        ),
    ]
}

#[test]
fn body() {
    let server = Server::start();
    let words = [
        "role",
        "content",
        "messages",
        "prompt",
        "stream",
        "n",
        "max_tokens",
        "logprobs",
        "tools",
        "tool_choice",
        "auto",
        "required",
        "response_format",
        "json_object",
        "structured_outputs",
        "grammar",
        "choice",
        "regex",
        "stop",
        "seed",
        "suffix",
        "echo",
        "user",
        "system",
        "assistant",
        "tool",
        "text",
        "input_text",
        "image_url",
        "<|im_end|>",
    ];
    let mut inputs = corpus();
    inputs.retain(|input| server.ask(input) == Verdict::Accepted);
    assert!(
        inputs.len() >= corpus().len() - 3,
        "{} of the corpus are taken",
        inputs.len()
    );
    let mutate = |random: &mut Random, input: &mut Input| {
        mutate_json_bytes(random, &mut input.body, &words);
        if random.once_in(20) {
            input.path = random.pick(&corpus()).path;
        }
    };
    Target::new("body", 128 << 20, 4000).run(&inputs, mutate, |input| server.ask(input));
}

/// Constraints on answers from callers: none may cause a server error.
#[test]
fn constrained_body() {
    let server = Server::start();
    let messages = json!([{"role": "user", "content": "A fox."}]);
    let constrained = |field: &str, value: Value| {
        let mut body = json!({"messages": messages, "max_tokens": 24, "seed": 1});
        body[field] = value;
        Input::new("/v1/chat/completions", body)
    };
    let schemas = corpus::text("tests/schemas/schemas.jsonl");
    let schemas = schemas.lines().step_by(7).map(|line| {
        let schema: Value = serde_json::from_str(line).expect("a schema");
        constrained("structured_outputs", json!({"json": schema}))
    });
    let mut inputs: Vec<_> = schemas.collect();
    for (kind, text) in [
        ("regex", "[a-c]{2,3}\\d|(a|b(c|d)*)+"),
        (
            "grammar",
            "start: \"{\" pair (\",\" pair)* \"}\"\npair: /[a-z]+/ \":\" value\nvalue: start | /[0-9]+/\n",
        ),
    ] {
        inputs.push(constrained("structured_outputs", json!({kind: text})));
    }
    for more in [
        json!({"allowed_token_ids": [70, 71, 72], "structured_outputs": {"regex": "[a-z]*"}}),
        json!({"bad_words": ["yes"], "structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 2}),
        json!({"logit_bias": {"70": -100}, "stop": ["a"], "response_format": {"type": "json_object"}}),
    ] {
        let mut input = json!({"messages": messages, "max_tokens": 24});
        for (field, value) in more.as_object().expect("fields") {
            input[field] = value.clone();
        }
        inputs.push(Input::new("/v1/chat/completions", input));
    }
    inputs.retain(|input| server.ask(input) == Verdict::Accepted);
    assert!(
        inputs.len() > 20,
        "{} of the corpus are taken",
        inputs.len()
    );
    let words = [
        "enum",
        "const",
        "not",
        "anyOf",
        "allOf",
        "oneOf",
        "$ref",
        "#",
        "properties",
        "required",
        "pattern",
        "^(a|a)*$",
        "[]",
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minimum",
        "maximum",
        "multipleOf",
        "format",
        "false",
        "additionalProperties",
        "start: ",
        "/a*/",
        "%json {}",
        "{0,65535}",
        "(",
        "[a-z]",
        "min_tokens",
        "bad_words",
    ];
    let mutate =
        |random: &mut Random, input: &mut Input| mutate_json_bytes(random, &mut input.body, &words);
    Target::new("constrained_body", 128 << 20, 4000)
        .run(&inputs, mutate, |input| server.ask(input));
}
