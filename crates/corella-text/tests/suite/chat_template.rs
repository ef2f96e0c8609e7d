//! Chat templates print the same as Jinja2 with the settings of Transformers.

use corella_text::{ChatInput, ChatTemplate, RenderLimit, SpecialTokens, TemplateFiles, TextError};
use serde_json::{Map, Value, json};

fn golden(path: &str) -> String {
    let path = format!("{}/tests/golden/{path}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).unwrap()
}

fn special() -> SpecialTokens {
    SpecialTokens {
        bos_token: Some("<s>".into()),
        eos_token: Some("</s>".into()),
        ..SpecialTokens::default()
    }
}

fn input(messages: &[Value]) -> ChatInput<'_> {
    ChatInput {
        messages,
        tools: None,
        add_generation_prompt: false,
        continue_final_message: false,
        kwargs: None,
    }
}

fn render(source: &str, messages: Value) -> Result<String, TextError> {
    ChatTemplate::new(source, special())?.render(input(messages.as_array().unwrap()))
}

#[test]
fn prints_what_jinja2_prints() {
    let cases: Vec<Value> = serde_json::from_str(&golden("template_case.json")).unwrap();
    let mut wrong = Vec::new();
    for (index, case) in cases.iter().enumerate() {
        let name = case["template"].as_str().unwrap();
        let source = golden(&format!("template/{name}.jinja"));
        let rendered = ChatTemplate::new(&source, special())
            .unwrap()
            .render(ChatInput {
                messages: case["messages"].as_array().unwrap(),
                tools: Some(&case["tools"]).filter(|tools| !tools.is_null()),
                add_generation_prompt: case["add_generation_prompt"].as_bool().unwrap(),
                continue_final_message: false,
                kwargs: case["kwargs"].as_object(),
            });
        let expected = match case["raised"].as_str() {
            Some(message) => Err(TextError::TemplateRaised(message.into())),
            None => Ok(case["rendered"].as_str().unwrap().to_owned()),
        };
        if rendered != expected {
            wrong.push(format!(
                "{name} #{index}\n--- expected\n{expected:#?}\n--- got\n{rendered:#?}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn keys_keep_the_order_of_the_request() {
    let messages: Value = serde_json::from_str(r#"[{"z": 1, "a": 2, "m": 3}]"#).unwrap();
    let rendered = render("{{ messages[0] | tojson }}", messages).unwrap();
    assert_eq!(rendered, r#"{"z": 1, "a": 2, "m": 3}"#);
}

#[test]
fn an_endless_template_is_stopped() {
    let source = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    assert_eq!(
        render(source, json!([])),
        Err(TextError::TemplateTooExpensive)
    );
}

#[test]
fn a_template_that_calls_itself_is_stopped() {
    let source = "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}";
    assert!(matches!(
        render(source, json!([])),
        Err(TextError::TemplateRender(_))
    ));
    let nested = format!("{}1{}", "(".repeat(10_000), ")".repeat(10_000));
    let error = ChatTemplate::new(&format!("{{{{ {nested} }}}}"), special()).err();
    assert!(
        matches!(error, Some(TextError::TemplateSyntax(_))),
        "{error:?}"
    );
}

#[test]
fn a_long_conversation_with_long_messages_is_within_the_limit() {
    let message = json!({"role": "user", "content": "word ".repeat(200)});
    let rendered = render(
        &golden("template/chatml.jinja"),
        Value::Array(vec![message; 5_000]),
    );
    assert!(rendered.unwrap().len() > 5_000_000);
}

#[test]
fn errors_name_the_line() {
    let error = ChatTemplate::new("one\n{% if %}", special()).err().unwrap();
    assert!(
        matches!(&error, TextError::TemplateSyntax(reason) if reason.contains("line 2")),
        "{error}"
    );
    let error = render(
        "\n\n{{ messages[0].content.nothing.more }}",
        json!([{"content": "x"}]),
    );
    assert!(
        matches!(&error, Err(TextError::TemplateRender(reason)) if reason.contains("line 3")),
        "{error:?}"
    );
}

#[test]
fn raise_exception_passes_through_macros() {
    let source =
        "{% macro m() %}{{ raise_exception('no ' ~ messages | length) }}{% endmacro %}{{ m() }}";
    assert_eq!(
        render(source, json!([1, 2])),
        Err(TextError::TemplateRaised("no 2".into()))
    );
}

#[test]
fn strftime_now_prints_a_date_of_now() {
    let year: i32 = render("{{ strftime_now('%Y') }}", json!([]))
        .unwrap()
        .parse()
        .unwrap();
    assert!(year >= 2026);
}

#[test]
fn kwargs_are_names_in_the_template() {
    let template = ChatTemplate::new("{{ a }}{{ bos_token }}{{ unk_token }}", special()).unwrap();
    let kwargs: Map<String, Value> = [
        ("a".to_owned(), json!(1)),
        ("bos_token".to_owned(), json!("B")),
    ]
    .into_iter()
    .collect();
    let rendered = template.render(ChatInput {
        kwargs: Some(&kwargs),
        ..input(&[])
    });
    assert_eq!(rendered.unwrap(), "1B");
}

#[test]
fn continue_final_message_ends_within_it() {
    let source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}";
    let template = ChatTemplate::new(source, special()).unwrap();
    let continued = |content: Value| {
        let messages = [
            json!({"role": "user", "content": "Once"}),
            json!({"role": "assistant", "content": content}),
        ];
        template.render(ChatInput {
            continue_final_message: true,
            ..input(&messages)
        })
    };
    assert_eq!(
        continued(json!("Once upon")).unwrap(),
        "<user>Once<end><assistant>Once upon"
    );
    assert_eq!(
        continued(json!(" Once ")).unwrap(),
        "<user>Once<end><assistant>Once"
    );
    // The mark at the end of a message begins with this, too.
    assert_eq!(
        continued(json!("<")).unwrap(),
        "<user>Once<end><assistant><"
    );
    assert_eq!(continued(json!("")).unwrap(), "<user>Once<end><assistant>");
    assert!(matches!(
        continued(json!(null)),
        Err(TextError::ContinueFinalMessage(_))
    ));

    let keeps_spaces = ChatTemplate::new("{{ messages[0].content }}<end>", special()).unwrap();
    let messages = [json!({"content": "So, "})];
    let both = ChatInput {
        continue_final_message: true,
        ..input(&messages)
    };
    assert_eq!(keeps_spaces.render(both).unwrap(), "So, ");
    let both = ChatInput {
        add_generation_prompt: true,
        ..both
    };
    assert!(matches!(
        keeps_spaces.render(both),
        Err(TextError::ContinueFinalMessage(_))
    ));
}

#[test]
fn the_template_of_a_folder() {
    let from = |config: &str, file: Option<&str>| {
        ChatTemplate::from_files(TemplateFiles {
            tokenizer_config_json: Some(config.as_bytes()),
            chat_template_jinja: file.map(str::as_bytes),
            ..TemplateFiles::default()
        })
    };
    let printed = |template: ChatTemplate, tools: Option<&Value>| {
        template
            .render(ChatInput {
                tools,
                ..input(&[])
            })
            .unwrap()
    };

    assert!(from("{}", None).unwrap().is_none());
    let one = r#"{"bos_token": {"content": "<b>", "special": true}, "chat_template": "config {{ bos_token }}"}"#;
    assert_eq!(
        printed(from(one, None).unwrap().unwrap(), None),
        "config <b>"
    );
    assert_eq!(
        printed(
            from(one, Some("file {{ bos_token }}")).unwrap().unwrap(),
            None
        ),
        "file <b>"
    );

    let named = r#"{"chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]}"#;
    let tools = json!([]);
    assert_eq!(printed(from(named, None).unwrap().unwrap(), None), "plain");
    assert_eq!(
        printed(from(named, None).unwrap().unwrap(), Some(&tools)),
        "tools"
    );

    // Transformers saves further templates as separate files.
    let with_tool_use = |config: &str, file: Option<&str>, tool_use: &[u8]| {
        ChatTemplate::from_files(TemplateFiles {
            tokenizer_config_json: Some(config.as_bytes()),
            chat_template_jinja: file.map(str::as_bytes),
            tool_use_jinja: Some(tool_use),
            ..TemplateFiles::default()
        })
    };
    for (config, file) in [
        ("{}", Some("plain")),
        (named, None),
        (r#"{"chat_template": "plain"}"#, None),
    ] {
        let template = || with_tool_use(config, file, b"file with {{ tools | length }}");
        assert_eq!(printed(template().unwrap().unwrap(), None), "plain");
        let template = template().unwrap().unwrap();
        assert!(template.reads_tools());
        assert_eq!(printed(template, Some(&tools)), "file with 0");
    }
    assert!(with_tool_use("{}", None, b"tools").unwrap().is_none());
    let error = with_tool_use(one, None, b"\xff").err().unwrap();
    assert!(error.to_string().contains("tool_use.jinja"), "{error}");

    for wrong in [
        "",
        "[",
        r#"{"chat_template": 3}"#,
        r#"{"chat_template": [{"name": "x"}]}"#,
        r#"{"chat_template": []}"#,
    ] {
        let error = from(wrong, None).err().unwrap();
        assert!(
            matches!(error, TextError::TokenizerConfig(_)),
            "{wrong}: {error}"
        );
    }
}

/// Expected texts are those of Transformers 5.23.
#[test]
fn special_tokens_are_those_of_transformers() {
    let source = b"{{ bos_token }}|{{ eos_token }}|{{ image_token }}|{{ boi_token }}";
    let printed = |config: &str, map: Option<&str>| {
        let template = ChatTemplate::from_files(TemplateFiles {
            tokenizer_config_json: Some(config.as_bytes()),
            special_tokens_map_json: map.map(str::as_bytes),
            chat_template_jinja: Some(source),
            ..TemplateFiles::default()
        });
        template.unwrap().unwrap().render(input(&[])).unwrap()
    };
    let map = r#"{"bos_token": {"content": "<map>", "lstrip": false}, "eos_token": "</map>"}"#;
    assert_eq!(printed("{}", None), "|||");
    assert_eq!(printed("{}", Some(map)), "<map>|</map>||");
    assert_eq!(
        printed(r#"{"bos_token": null}"#, Some(map)),
        "<map>|</map>||"
    );
    // Newer configurations have all tokens.
    let newer = r#"{"eos_token": "</s>", "added_tokens_decoder": {}}"#;
    assert_eq!(printed(newer, Some(map)), "|</s>||");
    let named = r#"{"boi_token": "<boi>", "extra_special_tokens": {"image_token": "<img>"}, "add_bos_token": true}"#;
    assert_eq!(printed(named, Some(map)), "<map>|</map>|<img>|<boi>");
    let listed = r#"{"extra_special_tokens": ["<img>"]}"#;
    assert_eq!(printed(listed, None), "|||");
}

#[test]
fn a_template_may_be_the_processors() {
    let from = |config: &str, processor: &str| {
        let template = ChatTemplate::from_files(TemplateFiles {
            tokenizer_config_json: Some(config.as_bytes()),
            chat_template_json: Some(processor.as_bytes()),
            ..TemplateFiles::default()
        });
        template.map(|template| template.map(|template| template.render(input(&[])).unwrap()))
    };
    let processor = r#"{"chat_template": "processor {{ bos_token }}"}"#;
    let found = from(r#"{"bos_token": "<s>"}"#, processor).unwrap();
    assert_eq!(found.as_deref(), Some("processor <s>"));
    let found = from(r#"{"chat_template": "tokenizer"}"#, processor).unwrap();
    assert_eq!(found.as_deref(), Some("tokenizer"));
    let error = from("{}", "[").unwrap_err();
    assert!(
        error.to_string().starts_with("chat_template.json: "),
        "{error}"
    );
}

/// Jinja2 reads all line breaks as one character.
#[test]
fn line_breaks_are_of_one_kind() {
    let source = "{% if true %}\r\na\r\n{% endif %}\r\n{{ 'b\r\nc' }}\rd\r\n";
    assert_eq!(render(source, json!([])).unwrap(), "a\nb\nc\nd");
}

/// SmolLM3's template reads tools by another name.
#[test]
fn tools_have_the_name_that_the_template_reads() {
    let source = "{% if xml_tools or python_tools %}{% for tool in xml_tools %}{{ tool.function.name }}{% endfor %}{% endif %}";
    let template = ChatTemplate::new(source, special()).unwrap();
    assert!(template.reads_tools());
    let tools = json!([{"type": "function", "function": {"name": "weather"}}]);
    let rendered = template.render(ChatInput {
        tools: Some(&tools),
        ..input(&[])
    });
    assert_eq!(rendered.unwrap(), "weather");
}

/// The size of a prompt is limited before it is printed.
#[test]
fn a_template_is_stopped_when_it_prints_too_much_or_its_caller_has_left() {
    let source = "{% for message in messages %}[{{ message.content }}]{% endfor %}";
    let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
    let messages = vec![json!({"role": "user", "content": "twelve bytes"}); 10];
    let num_asked = std::cell::Cell::new(0);
    let render = |max_bytes, leaves_at| {
        num_asked.set(0);
        let is_abandoned = || {
            num_asked.set(num_asked.get() + 1);
            num_asked.get() == leaves_at
        };
        let limit = RenderLimit {
            max_bytes,
            is_abandoned: &is_abandoned,
        };
        template.render_within(input(&messages), limit)
    };
    let whole = "[twelve bytes]".repeat(10);
    assert_eq!(render(140, usize::MAX), Ok(whole));
    let too_large = TextError::PromptTooLarge { max_bytes: 139 };
    assert_eq!(render(139, usize::MAX), Err(too_large));
    assert_eq!(render(140, 4), Err(TextError::Abandoned));
    assert_eq!(num_asked.get(), 4);
}

#[test]
fn what_a_template_is_for_is_known() {
    let uses = |source: &str| {
        let template = ChatTemplate::new(source, special()).unwrap();
        (template.reads_tools(), template.thinking_switch())
    };
    assert_eq!(uses("{{ messages[0].content }} tools"), (false, None));
    let loops = "{% if tools %}{% for tool in tools %}{{ tool }}{% endfor %}{% endif %}";
    assert_eq!(uses(loops), (true, None));
    // A name that the template sets itself is not a caller's variable.
    assert_eq!(uses("{% set tools = [] %}{{ tools }}"), (false, None));
    let thinks = "{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}";
    assert_eq!(uses(thinks), (false, Some("enable_thinking")));
    let config = json!({"chat_template": [
        {"name": "default", "template": "x"},
        {"name": "tool_use", "template": "y"},
    ]});
    let config = config.to_string();
    let template = ChatTemplate::from_files(TemplateFiles {
        tokenizer_config_json: Some(config.as_bytes()),
        ..TemplateFiles::default()
    });
    assert!(template.unwrap().unwrap().reads_tools());
}

#[test]
fn what_is_no_template_is_an_error_and_no_panic() {
    for source in ["{%}", "{%}%}", "{% generation %}{%}"] {
        let template = ChatTemplate::new(source, special());
        assert!(
            matches!(template, Err(TextError::TemplateSyntax(_))),
            "{source}"
        );
    }
}

#[test]
fn indentations_are_bounded() {
    let render = |filter: &str| {
        let source = format!("{{{{ 'a\\nb' | {filter} }}}}");
        let template = ChatTemplate::new(&source, special()).expect("it parses");
        template.render(ChatInput {
            messages: &[],
            tools: None,
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: None,
        })
    };
    assert_eq!(render("indent(2)").unwrap(), "a\n  b");
    assert_eq!(render("indent(width=2, first=true)").unwrap(), "  a\n  b");
    for wide in ["indent(1001)", "indent(width=1000000000)"] {
        let error = render(wide).unwrap_err();
        assert!(error.to_string().contains("more than 1000"), "{error}");
    }
}

/// A request's variables override the server's own, and no variable can replace the conversation.
#[test]
fn default_variables_are_those_of_conversations_without_them() {
    let source = "{{ enable_thinking }} {{ style }} {{ messages | length }}";
    let defaults = json!({"enable_thinking": false, "style": "short", "messages": []});
    let template = ChatTemplate::new(source, special())
        .unwrap()
        .with_default_kwargs(defaults.as_object().unwrap().clone());
    let messages = [json!({"role": "user", "content": "x"})];
    let plain = input(&messages);
    assert_eq!(template.render(plain).unwrap(), "False short 1");
    let kwargs = json!({"enable_thinking": true});
    let asked = ChatInput {
        kwargs: kwargs.as_object(),
        ..plain
    };
    assert_eq!(template.render(asked).unwrap(), "True short 1");
}
