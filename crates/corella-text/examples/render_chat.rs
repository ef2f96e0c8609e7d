//! Renders conversations, for `tests/golden/compare_templates.py`, which compares them with Jinja2's output.
//!
//! Reads JSON lines. `{"template": SOURCE}` sets the template. Any other line is a conversation, and its prompt, or its
//! error, is printed as `{"text": …}` or `{"error": …}`.

use std::io::{BufRead, Write};

use corella_text::{ChatInput, ChatTemplate, SpecialTokens};
use serde_json::{Value, json};

fn main() {
    let mut out = std::io::stdout().lock();
    let mut template = Err("there is no template yet".to_owned());
    for line in std::io::stdin().lock().lines() {
        let line: Value = serde_json::from_str(&line.expect("UTF-8")).expect("JSON");
        if let Some(source) = line["template"].as_str() {
            let special = SpecialTokens {
                bos_token: Some("<s>".into()),
                eos_token: Some("</s>".into()),
                ..SpecialTokens::default()
            };
            template = ChatTemplate::new(source, special).map_err(|error| error.to_string());
            continue;
        }
        let rendered = template
            .as_ref()
            .map_err(String::clone)
            .and_then(|template| {
                let input = ChatInput {
                    messages: line["messages"].as_array().expect("messages"),
                    tools: Some(&line["tools"]).filter(|tools| !tools.is_null()),
                    add_generation_prompt: line["add_generation_prompt"] == true,
                    continue_final_message: false,
                    kwargs: line["kwargs"].as_object(),
                };
                template.render(input).map_err(|error| error.to_string())
            });
        let answer = match rendered {
            Ok(text) => json!({"text": text}),
            Err(error) => json!({"error": error}),
        };
        writeln!(out, "{answer}").expect("standard output");
    }
}
