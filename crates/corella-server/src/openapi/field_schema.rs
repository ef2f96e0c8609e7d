//! The JSON schema of each field that is read. `null` is the same as leaving a field out.

use serde_json::{Map, Value, json};

use super::{reference, table_schema};
use crate::batches::ENDPOINTS;
use crate::field_table::{self, Endpoint, Treatment, messages, ollama, responses};
use crate::files::DEFAULT_LIFE_S;
use crate::output_format::MAX_CHOICES;
use crate::pooled_call::MAX_NUM_PROMPTS;
use crate::sampling_fields::{
    F32_BOUND, MAX_CACHE_SALT_BYTES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS,
};
use crate::serve_config::ServeConfig;
use crate::token_rule::{MAX_ALLOWED_TOKEN_IDS, MAX_BAD_WORD_BYTES, MAX_BAD_WORDS};
use crate::tool_fields::MAX_NAME_BYTES as MAX_TOOL_NAME_BYTES;

/// Schemas with the limits of one server.
pub struct FieldSchemas<'a> {
    pub config: &'a ServeConfig,
}

impl FieldSchemas<'_> {
    /// The schema of a field of an endpoint's body, if the field is known here.
    pub fn of_field(&self, endpoint: Endpoint, name: &str) -> Option<Value> {
        let own = match endpoint {
            Endpoint::Completions => self.of_completion(name),
            Endpoint::Tokenize if name == "prompt" => Some(string()),
            Endpoint::Responses => self.of_response(name),
            Endpoint::Messages | Endpoint::CountTokens => self.of_messages(name),
            Endpoint::Embeddings | Endpoint::Score | Endpoint::Rerank => self.of_pooling(name),
            Endpoint::Batches => self.of_batch(name),
            Endpoint::OllamaChat
            | Endpoint::OllamaGenerate
            | Endpoint::OllamaEmbed
            | Endpoint::OllamaEmbeddings
            | Endpoint::OllamaShow => self.of_ollama(name),
            _ => None,
        };
        own.or_else(|| self.of_any(endpoint, name))
    }

    fn of_any(&self, endpoint: Endpoint, name: &str) -> Option<Value> {
        let config = self.config;
        Some(match name {
            "model" => self.model(),
            // Only a prompt that is a text of its own can be repeated.
            "echo" if endpoint == Endpoint::Chat => json!({"enum": [false, null]}),
            "messages" if endpoint == Endpoint::Tokenize => {
                array(reference("ChatMessage"), 1, config.max_model_len as usize)
            }
            "messages" => required_array(reference("ChatMessage"), config.max_model_len as usize),
            "stream"
            | "echo"
            | "include_stop_str_in_output"
            | "skip_special_tokens"
            | "ignore_eos"
            | "add_special_tokens"
            | "logprobs"
            | "add_generation_prompt"
            | "continue_final_message"
            | "return_token_strs"
            | "return_token_ids"
            | "return_tokens_as_token_ids" => boolean(),
            "stream_options" => json!({"anyOf": [reference("StreamOptions"), {"type": "null"}]}),
            "n" | "best_of" => integer(1, config.max_num_choices.into()),
            "temperature" => json!({
                "type": ["number", "null"], "minimum": 0, "exclusiveMaximum": F32_BOUND,
            }),
            "top_p" => json!({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1}),
            "top_k" => integer(-1, u32::MAX.into()),
            "min_p" => number(0.0, 1.0),
            "presence_penalty" | "frequency_penalty" => number(-2.0, 2.0),
            "repetition_penalty" => json!({
                "type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": F32_BOUND,
            }),
            "logit_bias" => json!({
                "type": ["object", "null"],
                "propertyNames": {"pattern": "^[0-9]+$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                "description": "The keys are token ids.",
            }),
            "allowed_token_ids" => array(self.token_id(), 1, MAX_ALLOWED_TOKEN_IDS),
            "bad_words" => array(
                json!({"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_BYTES}),
                0,
                MAX_BAD_WORDS,
            ),
            "seed" => integer(i64::MIN, i64::MAX),
            "max_tokens" | "max_completion_tokens" => integer(1, u32::MAX.into()),
            "min_tokens" => integer(0, u32::MAX.into()),
            "stop" => {
                let one = json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES});
                json!({"anyOf": [
                    one, {"type": "array", "items": one, "maxItems": MAX_STOP_STRINGS}, {"type": "null"},
                ]})
            }
            "stop_token_ids" => array(self.token_id(), 0, MAX_STOP_TOKEN_IDS),
            "priority" => integer(i32::MIN.into(), i32::MAX.into()),
            "ttft_slo_ms" | "tpot_slo_ms" => integer(1, u32::MAX.into()),
            "cache_salt" => json!({
                "type": ["string", "null"], "minLength": 1, "maxLength": MAX_CACHE_SALT_BYTES,
            }),
            "prompt_logprobs" | "top_logprobs" => integer(0, config.max_logprobs.into()),
            "response_format" => json!({"anyOf": [
                {"type": "object", "required": ["type"], "additionalProperties": false,
                    "properties": {"type": {"enum": ["text", "json_object"]}}},
                {"type": "object", "required": ["type", "json_schema"], "additionalProperties": false,
                    "properties": {"type": {"const": "json_schema"}, "json_schema": {
                        "type": "object", "required": ["schema"], "additionalProperties": false,
                        "properties": {"schema": {"type": "object"}, "name": {}, "description": {},
                            "strict": {}}}}},
                {"type": "null"},
            ]}),
            "structured_outputs" => json!({
                "type": ["object", "null"], "minProperties": 1, "maxProperties": 1,
                "additionalProperties": false,
                "properties": {
                    "json": {"type": ["object", "string"]}, "json_object": {"const": true},
                    "regex": {"type": "string"}, "grammar": {"type": "string"},
                    "choice": {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                },
            }),
            "guided_json" => json!({"type": ["object", "string", "null"]}),
            "guided_json_object" => boolean(),
            "guided_regex" | "guided_grammar" => string(),
            "guided_choice" => array(json!({"type": "string", "minLength": 1}), 1, MAX_CHOICES),
            "suffix" => string(),
            "prompt" => self.prompt(1, config.max_num_choices as usize),
            "chat_template_kwargs" => object(),
            "reasoning_effort" => string(),
            "tools" => array(reference("Tool"), 0, u32::MAX as usize),
            "tool_choice" => {
                let tool = json!({
                    "type": "object", "required": ["type", "function"],
                    "properties": {"type": {"const": "function"}, "function": {
                        "type": "object", "required": ["name"], "properties": {"name": tool_name()},
                    }},
                });
                tool_choice(&tool, |some| {
                    json!({
                        "type": "object", "required": ["type", "allowed_tools"],
                        "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": {
                            "type": "object", "required": ["mode", "tools"], "properties": some,
                        }},
                    })
                })
            }
            "parallel_tool_calls" => boolean(),
            "tokens" => json!({
                "type": "array", "items": self.token_id(), "maxItems": config.max_model_len,
            }),
            _ => return None,
        })
    }

    fn of_completion(&self, name: &str) -> Option<Value> {
        match name {
            "logprobs" => Some(integer(0, self.config.max_logprobs.into())),
            _ => None,
        }
    }

    fn of_response(&self, name: &str) -> Option<Value> {
        let max_items = self.config.max_model_len;
        Some(match name {
            "input" => json!({"anyOf": [
                {"type": "string"},
                {"type": "array", "items": reference("InputItem"), "minItems": 1, "maxItems": max_items},
            ]}),
            "instructions" => string(),
            "max_output_tokens" => integer(1, u32::MAX.into()),
            "include" => array(
                json!({"enum": ["message.output_text.logprobs", "reasoning.encrypted_content"]}),
                0,
                16,
            ),
            "reasoning" => json!({"anyOf": [reference("Reasoning"), {"type": "null"}]}),
            "text" => json!({"anyOf": [reference("TextOptions"), {"type": "null"}]}),
            "metadata" => object(),
            "previous_response_id" => string(),
            "store" => boolean(),
            "tools" => tool_array("ResponseTool"),
            "tool_choice" => {
                let tool = json!({
                    "type": "object", "required": ["type", "name"],
                    "properties": {"type": {"const": "function"}, "name": tool_name()},
                });
                tool_choice(&tool, |mut some| {
                    some["type"] = json!({"const": "allowed_tools"});
                    json!({
                        "type": "object", "required": ["type", "mode", "tools"], "properties": some,
                    })
                })
            }
            _ => return None,
        })
    }

    fn of_messages(&self, name: &str) -> Option<Value> {
        let blocks = json!({"type": "array", "items": reference("TextBlock")});
        Some(match name {
            "messages" => {
                required_array(reference("InputTurn"), self.config.max_model_len as usize)
            }
            "max_tokens" => json!({"type": "integer", "minimum": 1, "maximum": u32::MAX}),
            "system" => json!({"anyOf": [{"type": "string"}, blocks, {"type": "null"}]}),
            "stop_sequences" => array(
                json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES}),
                0,
                MAX_STOP_STRINGS,
            ),
            "thinking" => json!({"anyOf": [reference("Thinking"), {"type": "null"}]}),
            "tools" => tool_array("MessageTool"),
            "tool_choice" => json!({"anyOf": [reference("MessageToolChoice"), {"type": "null"}]}),
            "output_config" => json!({
                "type": ["object", "null"], "additionalProperties": false,
                "properties": {"format": {"anyOf": [
                    {"type": "object", "required": ["type", "schema"], "additionalProperties": false,
                        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"},
                            "name": {}, "description": {}, "strict": {}}},
                    {"type": "null"},
                ]}},
            }),
            _ => return None,
        })
    }

    fn of_pooling(&self, name: &str) -> Option<Value> {
        let texts = json!({"type": "string"});
        Some(match name {
            "input" | "text_1" | "text_2" => self.prompt(1, MAX_NUM_PROMPTS),
            "encoding_format" => json!({"enum": ["float", "base64", null]}),
            "dimensions" => integer(1, self.config.hidden_size as i64),
            "pooling" => json!({"enum": ["last", "mean", null]}),
            "normalize" | "return_documents" => boolean(),
            "query" => texts,
            "documents" => required_array(texts, MAX_NUM_PROMPTS),
            "top_n" => integer(0, u32::MAX.into()),
            _ => return None,
        })
    }

    fn of_batch(&self, name: &str) -> Option<Value> {
        Some(match name {
            "input_file_id" => json!({"type": "string"}),
            "endpoint" => json!({"enum": ENDPOINTS}),
            "completion_window" => json!({
                "type": "string", "description": "A time such as 24h or 90m, up to 30 days.",
            }),
            "metadata" => json!({
                "type": ["object", "null"], "maxProperties": 16,
                "propertyNames": {"maxLength": 64},
                "additionalProperties": {"type": "string", "maxLength": 512},
            }),
            "output_expires_after" => json!({"anyOf": [
                {"type": "object", "required": ["anchor", "seconds"], "additionalProperties": false,
                    "properties": {"anchor": {"const": "created_at"},
                        "seconds": {"type": "integer", "minimum": 3600, "maximum": DEFAULT_LIFE_S}}},
                {"type": "null"},
            ]}),
            _ => return None,
        })
    }

    fn of_ollama(&self, name: &str) -> Option<Value> {
        let max_messages = self.config.max_model_len as usize;
        Some(match name {
            "messages" => array(reference("OllamaMessage"), 0, max_messages),
            "prompt" | "system" | "suffix" | "name" => string(),
            "raw" => boolean(),
            // No text at all asks for the model to be loaded.
            "input" => json!({"anyOf": [self.prompt(0, MAX_NUM_PROMPTS), {"type": "null"}]}),
            "dimensions" => integer(1, self.config.hidden_size as i64),
            "think" => json!({
                "type": ["boolean", "string", "null"], "description": "Or an effort such as \"high\".",
            }),
            "format" => json!({"anyOf": [{"enum": ["", "json", null]}, {"type": "object"}]}),
            "options" => {
                let is_shown =
                    |_: &str, treatment: &Treatment| !matches!(treatment, Treatment::Refused(_));
                let options = table_schema(&ollama::OPTIONS, is_shown, |name| self.of_option(name));
                json!({"anyOf": [options, {"type": "null"}]})
            }
            _ => return None,
        })
    }

    /// The schema of a member of Ollama's `options`.
    pub fn of_option(&self, name: &str) -> Option<Value> {
        Some(match name {
            "num_predict" => json!({
                "type": ["integer", "null"], "minimum": i64::MIN, "maximum": i64::MAX,
                "description": "0 and negative numbers are no limit.",
            }),
            "num_ctx" => integer(i64::MIN, self.config.max_model_len.into()),
            "repeat_penalty" => return self.of_any(Endpoint::OllamaChat, "repetition_penalty"),
            name => return self.of_any(Endpoint::OllamaChat, name),
        })
    }

    fn model(&self) -> Value {
        let mut names: Vec<Value> = { self.config.served_model_names.iter() }
            .map(|name| json!(name))
            .collect();
        names.push(Value::Null);
        json!({"enum": names})
    }

    fn token_id(&self) -> Value {
        json!({"type": "integer", "minimum": 0, "maximum": self.config.vocab_size.saturating_sub(1)})
    }

    /// `min_items` is for the tokens of a prompt and for the prompts of a call.
    fn prompt(&self, min_items: usize, max_num_prompts: usize) -> Value {
        let tokens = json!({
            "type": "array", "items": self.token_id(),
            "minItems": min_items, "maxItems": self.config.max_model_len,
        });
        let text = json!({"type": "string"});
        json!({"anyOf": [text, tokens, {
            "type": "array", "items": {"anyOf": [text, tokens]},
            "minItems": min_items, "maxItems": max_num_prompts,
        }]})
    }
}

/// The objects within bodies.
pub fn object_schemas() -> Map<String, Value> {
    let is_shown = |_: &str, treatment: &Treatment| !matches!(treatment, Treatment::Refused(_));
    let object = |table, required: Value, of_member: fn(&str) -> Option<Value>| {
        let mut object = table_schema(table, is_shown, of_member);
        object["required"] = required;
        object
    };
    let mut message = object(&field_table::MESSAGE, json!(["role"]), of_member);
    message["properties"]["content"] = content("ChatText");
    let mut turn = object(&messages::MESSAGE, json!(["role", "content"]), of_member);
    turn["properties"]["role"] = json!({"enum": ["user", "assistant", "system"]});
    turn["properties"]["content"] = content("ContentBlock");
    let mut thinking = object(&messages::THINKING, json!(["type"]), of_member);
    thinking["properties"]["type"] = json!({"enum": ["enabled", "adaptive", "disabled"]});
    let mut result = object(
        &messages::TOOL_RESULT,
        json!(["type", "tool_use_id"]),
        of_member,
    );
    result["properties"]["type"] = json!({"const": "tool_result"});
    result["properties"]["content"] = json!({"anyOf": [content("TextBlock"), {"type": "null"}]});
    let mut tool_use = object(
        &messages::TOOL_USE,
        json!(["type", "id", "name", "input"]),
        of_member,
    );
    tool_use["properties"]["type"] = json!({"const": "tool_use"});
    tool_use["properties"]["id"] = json!({"type": "string"});
    tool_use["properties"]["name"] = json!({"type": "string", "minLength": 1});
    let mut thought = object(
        &messages::THINKING_BLOCK,
        json!(["type", "thinking"]),
        of_member,
    );
    thought["properties"]["type"] = json!({"const": "thinking"});
    thought["properties"]["thinking"] = json!({"type": "string"});
    let mut message_tool = object(&messages::TOOL, json!(["name", "input_schema"]), of_member);
    message_tool["properties"]["type"] = json!({"const": "custom"});
    message_tool["properties"]["name"] = tool_name();
    let mut choice = object(&messages::TOOL_CHOICE, json!(["type"]), of_member);
    choice["properties"]["type"] = json!({"enum": ["auto", "none"]});
    let mut response_tool = object(&responses::TOOL, json!(["type", "name"]), of_member);
    response_tool["properties"]["type"] = json!({"const": "function"});
    response_tool["properties"]["name"] = tool_name();
    let mut input_call = object(
        &responses::CALL,
        json!(["type", "call_id", "name", "arguments"]),
        of_member,
    );
    input_call["properties"]["type"] = json!({"const": "function_call"});
    input_call["properties"]["name"] = json!({"type": "string", "minLength": 1});
    input_call["properties"]["arguments"] = json!({"type": "string", "description": "JSON."});
    let mut output = object(
        &responses::CALL_OUTPUT,
        json!(["type", "call_id", "output"]),
        of_member,
    );
    output["properties"]["type"] = json!({"const": "function_call_output"});
    output["properties"]["output"] = content("InputText");
    let mut input_thought = object(&responses::THOUGHT, json!(["type"]), of_member);
    input_thought["properties"]["type"] = json!({"const": "reasoning"});
    input_thought["properties"]["content"] = json!({"type": ["array", "null"], "items": {
        "type": "object", "required": ["type", "text"], "additionalProperties": false,
        "properties": {"type": {"const": "reasoning_text"}, "text": {"type": "string"}},
    }});
    let any_of = |names: &[&str]| {
        let schemas: Vec<Value> = names.iter().map(|name| reference(name)).collect();
        json!({"anyOf": schemas})
    };
    let mut input = object(&responses::MESSAGE, json!(["role", "content"]), of_member);
    input["properties"]["type"] = json!({"const": "message"});
    input["properties"]["role"] = json!({"enum": ["user", "assistant", "system", "developer"]});
    input["properties"]["content"] = content("InputText");
    let text = json!(["type", "text"]);
    let mut input_text = object(&responses::CONTENT, text.clone(), of_member);
    input_text["properties"]["type"] = json!({"enum": ["input_text", "output_text", "text"]});
    let mut reasoning = object(&responses::REASONING, json!([]), of_member);
    reasoning["properties"]["effort"] = string();
    let kind = json!({"const": "function"});
    let mut tool = object(&field_table::TOOL, json!(["type", "function"]), of_member);
    tool["properties"]["type"] = kind.clone();
    tool["properties"]["function"] = reference("Function");
    let mut function = object(&field_table::FUNCTION, json!(["name"]), of_member);
    function["properties"]["name"] = json!({
        "type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME_BYTES,
        "pattern": "^[a-zA-Z0-9_.-]+$",
    });
    let mut call = object(&field_table::CALL, json!(["function"]), of_member);
    call["properties"]["type"] = kind;
    let mut called = object(&field_table::CALLED_FUNCTION, json!(["name"]), of_member);
    called["properties"]["name"] = json!({"type": "string", "minLength": 1});
    let mut ollama_message = object(&ollama::MESSAGE, json!(["role"]), of_member);
    ollama_message["properties"]["role"] = json!({"enum": ["user", "assistant", "system", "tool"]});
    for name in ["content", "thinking", "tool_name", "tool_call_id"] {
        ollama_message["properties"][name] = string();
    }
    ollama_message["properties"]["tool_calls"] = tool_array("OllamaCall");
    let mut ollama_call = object(&ollama::CALL, json!(["function"]), of_member);
    ollama_call["properties"]["id"] = string();
    let mut called_tool = object(&ollama::CALLED_FUNCTION, json!(["name"]), of_member);
    called_tool["properties"]["name"] = json!({"type": "string"});
    called_tool["properties"]["arguments"] = json!({"type": ["object", "null"]});
    ollama_call["properties"]["function"] = called_tool;
    let pairs = [
        ("OllamaMessage", ollama_message),
        ("OllamaCall", ollama_call),
        ("ChatMessage", message),
        (
            "ChatText",
            object(&field_table::CONTENT_PART, text.clone(), of_member),
        ),
        (
            "StreamOptions",
            object(&field_table::STREAM_OPTIONS, json!([]), of_member),
        ),
        ("InputTurn", turn),
        ("TextBlock", object(&messages::BLOCK, text, of_member)),
        ("InputMessage", input),
        ("InputText", input_text),
        ("Reasoning", reasoning),
        ("Thinking", thinking),
        ("ToolResult", result),
        ("ToolUse", tool_use),
        ("ThinkingBlock", thought),
        (
            "ContentBlock",
            any_of(&["TextBlock", "ToolUse", "ToolResult", "ThinkingBlock"]),
        ),
        ("MessageTool", message_tool),
        ("MessageToolChoice", choice),
        ("ResponseTool", response_tool),
        ("InputCall", input_call),
        ("InputCallOutput", output),
        ("InputThought", input_thought),
        (
            "InputItem",
            any_of(&[
                "InputMessage",
                "InputCall",
                "InputCallOutput",
                "InputThought",
            ]),
        ),
        ("Tool", tool),
        ("Function", function),
        ("ToolCall", call),
        ("CalledFunction", called),
        (
            "TextOptions",
            json!({
                "type": "object", "additionalProperties": false,
                "properties": {"format": {"anyOf": [
                    {"type": "object", "required": ["type"], "additionalProperties": false,
                        "properties": {"type": {"enum": ["text", "json_object"]}}},
                    {"type": "object", "required": ["type", "schema"], "additionalProperties": false,
                        "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"},
                            "name": {}, "description": {}, "strict": {}}},
                    {"type": "null"},
                ]}},
            }),
        ),
    ];
    Map::from_iter(pairs.map(|(name, schema)| (name.to_owned(), schema)))
}

/// The schema of a member of a message, of a part of it, or of `stream_options`.
pub fn of_member(name: &str) -> Option<Value> {
    Some(match name {
        "type" => json!({"const": "text"}),
        "role" | "text" => json!({"type": "string"}),
        "content" => content("ChatText"),
        "name" | "tool_name" | "tool_call_id" | "reasoning" | "reasoning_content" | "thinking"
        | "prefix" | "partial" => json!({"description": "Passed to the chat template as it is."}),
        "id" | "return" => json!({"description": "Passed to the chat template as it is."}),
        "tool_calls" => json!({"type": ["array", "null"], "items": reference("ToolCall")}),
        "function" => reference("CalledFunction"),
        "arguments" => json!({
            "type": ["string", "object", "null"], "description": "JSON, as an answer has it.",
        }),
        "description" => string(),
        "parameters" => object(),
        "include_usage" | "continuous_usage_stats" => boolean(),
        "effort" => string(),
        "tool_use_id" | "call_id" | "output" => json!({"type": "string"}),
        "input" | "input_schema" => json!({"type": "object"}),
        "disable_parallel_tool_use" => boolean(),
        _ => return None,
    })
}

fn tool_name() -> Value {
    json!({
        "type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME_BYTES,
        "pattern": "^[a-zA-Z0-9_.-]+$",
    })
}

/// A word, one tool, or some of them. Endpoints differ in how a tool is named, and where the members of
/// a choice of some are.
fn tool_choice(tool: &Value, of_some: impl Fn(Value) -> Value) -> Value {
    let some = of_some(json!({
        "mode": {"enum": ["auto", "required"]},
        "tools": {"type": "array", "minItems": 1, "items": tool},
    }));
    json!({"anyOf": [{"enum": ["auto", "none", "required", null]}, tool, some]})
}

fn tool_array(name: &str) -> Value {
    json!({"type": ["array", "null"], "items": reference(name)})
}

fn content(part: &str) -> Value {
    json!({"anyOf": [{"type": "string"}, {"type": "array", "items": reference(part)}]})
}

fn boolean() -> Value {
    json!({"type": ["boolean", "null"]})
}

fn string() -> Value {
    json!({"type": ["string", "null"]})
}

fn object() -> Value {
    json!({"type": ["object", "null"]})
}

fn integer(minimum: i64, maximum: i64) -> Value {
    json!({"type": ["integer", "null"], "minimum": minimum, "maximum": maximum})
}

fn number(minimum: f64, maximum: f64) -> Value {
    json!({"type": ["number", "null"], "minimum": minimum, "maximum": maximum})
}

fn array(items: Value, min_items: usize, max_items: usize) -> Value {
    json!({"type": ["array", "null"], "items": items, "minItems": min_items, "maxItems": max_items})
}

fn required_array(items: Value, max_items: usize) -> Value {
    json!({"type": "array", "items": items, "minItems": 1, "maxItems": max_items})
}
