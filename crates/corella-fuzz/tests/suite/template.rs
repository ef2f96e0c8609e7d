//! Chat templates, which come with models, and their input from callers.

use corella_fuzz::{Random, Target, Verdict, mutate_json, mutate_text};
use corella_text::{ChatInput, ChatTemplate, RenderLimit, SpecialTokens, TextError};
use serde_json::{Value, json};

use crate::corpus;

const MAX_PROMPT_BYTES: usize = 1 << 20;

const WORDS: &[&str] = &[
    "{% for m in messages %}",
    "{% endfor %}",
    "{% if x %}",
    "{% endif %}",
    "{{ messages }}",
    "{{ 'a' * 1000000000 }}",
    "{{ range(1000000000) | list }}",
    "| tojson(indent=1000000)",
    "| join",
    "| replace('', 'aaaaaaaaaaaaaaaa')",
    "{% macro f(x) %}",
    "{% endmacro %}",
    "{{ f(f(1)) }}",
    "{% set a = namespace() %}",
    "{% set a.b = a %}",
    "| indent(1000000000)",
    ".split('')",
    "[::-1]",
    "[1:2:0]",
    "{% break %}",
    "{%- generation -%}",
    "{# ",
    " #}",
    "~",
    "| batch(0)",
    "%1000000000d",
    "| format(1)",
    ".strftime_now('%Y')",
];

/// A template, and a conversation to render with it.
#[derive(Clone)]
struct Input {
    source: String,
    messages: Vec<Value>,
}

impl AsRef<[u8]> for Input {
    fn as_ref(&self) -> &[u8] {
        self.source.as_bytes()
    }
}

fn messages() -> Vec<Value> {
    vec![
        json!({"role": "system", "content": "Be kind."}),
        json!({"role": "user", "content": "Wie spät?"}),
        json!({"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "time", "arguments": {"zone": "CET"}}}]}),
        json!({"role": "tool", "content": "12:00", "tool_call_id": "a"}),
        json!({"role": "user", "content": "Thanks."}),
    ]
}

/// Renders a conversation. A template that refuses it by `raise_exception` counts as accepted.
fn render(input: &Input) -> Verdict {
    match try_render(input) {
        Ok(_) | Err(TextError::TemplateRaised(_)) => Verdict::Accepted,
        Err(_) => Verdict::Refused,
    }
}

fn try_render(input: &Input) -> Result<String, TextError> {
    let template = ChatTemplate::new(&input.source, SpecialTokens::default())?;
    template.reply_format();
    template.needs_text_arguments();
    let limit = RenderLimit {
        max_bytes: MAX_PROMPT_BYTES,
        is_abandoned: &|| false,
    };
    let tools = json!([{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]);
    let chat = ChatInput {
        messages: &input.messages,
        tools: Some(&tools),
        add_generation_prompt: true,
        continue_final_message: false,
        kwargs: None,
    };
    template.render_within(chat, limit)
}

/// The templates that accept this conversation.
fn corpus() -> Vec<Input> {
    let input = |name: &str| Input {
        source: source(name),
        messages: messages(),
    };
    let inputs = ["chatml", "header", "tools", "values"].map(input);
    let corpus: Vec<Input> = inputs
        .into_iter()
        .filter(|input| render(input) == Verdict::Accepted)
        .collect();
    assert!(corpus.len() >= 2);
    corpus
}

fn source(name: &str) -> String {
    corpus::text(&format!(
        "crates/corella-text/tests/golden/template/{name}.jinja"
    ))
}

/// The operator who chooses a model chooses its template, which may still be hostile.
#[test]
fn template() {
    let other = source("tools");
    let mutate = |random: &mut Random, input: &mut Input| {
        mutate_text(random, &mut input.source, WORDS, &other);
    };
    Target::new("template", 256 << 20, 2000).run(&corpus(), mutate, render);
}

/// Templates that try to take all memory.
#[test]
fn hostile_template() {
    let folder = corpus::path("crates/corella-text/tests/golden/hostile");
    let sources = std::fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| std::fs::read_to_string(entry.expect("an entry").path()).expect("a template"));
    let inputs: Vec<Input> = sources
        .map(|source| Input {
            source,
            messages: messages(),
        })
        .collect();
    assert!(inputs.len() > 50);
    Target::new("hostile template", 256 << 20, 0).check(&inputs, render);
}

/// Callers choose messages.
#[test]
fn conversation() {
    let mutate = |random: &mut Random, input: &mut Input| {
        let mut json = Value::Array(std::mem::take(&mut input.messages));
        mutate_json(
            random,
            &mut json,
            &[
                "role",
                "content",
                "tool_calls",
                "system",
                "user",
                "<|im_end|>",
            ],
        );
        input.messages = match json {
            Value::Array(messages) => messages,
            other => vec![other],
        };
    };
    Target::new("conversation", 64 << 20, 2000).run(&corpus(), mutate, render);
}
