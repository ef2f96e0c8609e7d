//! Replies of families with formats of their own: Olmo 3, Command R and GLM-4.

use super::{CallFormat, ChatTemplate, PARIS, ReasoningFormat, SpecialTokens, check, context};

const BOTH: [(&str, &str); 2] = [("weather", PARIS), ("time", "{}")];

/// The format that a template shows.
fn format_of(template: &str) -> Option<CallFormat> {
    let template = ChatTemplate::new(template, SpecialTokens::default());
    template.expect("it parses").reply_format().calls
}

#[test]
fn olmo3() {
    let context = context(CallFormat::Olmo3, Some(ReasoningFormat::Think));
    let weather = "weather(city=\"Paris\", days=3)";
    check(
        &context,
        &format!("I look.\n<function_calls>{weather}\ntime()</function_calls>"),
        "",
        "I look.",
        &BOTH,
    );
    check(
        &context,
        &format!("<function_calls>\n{weather}\n</function_calls>Done."),
        "",
        "Done.",
        &BOTH[..1],
    );
    // Values are JSON or Python, and a line ends a call.
    let values = "<function_calls>time(a='x)', b=null, c=True)\ntime(d=[\"y\"])</function_calls>";
    let calls = [
        ("time", r#"{"a": "x)", "b": null, "c": true}"#),
        ("time", r#"{"d": ["y"]}"#),
    ];
    check(&context, values, "", "", &calls);
    let cut = [("weather", "{\"city\": \"Par")];
    check(
        &context,
        &format!("<function_calls>{}", &weather[..17]),
        "",
        "",
        &cut,
    );
    check(
        &context,
        "<function_calls>\n[]</function_calls>",
        "",
        "",
        &[],
    );
    check(&context, "a <function_b", "", "a <function_b", &[]);
}

#[test]
fn command_r() {
    let context = context(CallFormat::CommandR, None);
    let list = "[\n    {\n        \"tool_name\": \"weather\",\n        \"parameters\": {\"city\": \"Paris\", \
                \"days\": 3}\n    },\n    {\n        \"tool_name\": \"time\",\n        \"parameters\": {}\n    }\n]";
    for begin in ["Action:\n```json\n", "Action: ```json\n", "Action:```json "] {
        for end in ["```", "\n```\n"] {
            let reply = format!("Plan: I look.\n{begin}{list}{end}");
            check(&context, &reply, "", "Plan: I look.", &BOTH);
        }
    }
    let text = "Action: none. ```json\n[1]\n```";
    check(&context, text, "", text, &[]);
}

#[test]
fn glm4() {
    let think = context(CallFormat::Glm4, Some(ReasoningFormat::Think));
    let weather = format!("weather\n{PARIS}");
    for context in [&context(CallFormat::Glm4, None), &think] {
        check(context, &weather, "", "", &BOTH[..1]);
        let both = format!("{weather}<|assistant|>time\n{{}}");
        check(context, &both, "", "", &BOTH);
        let behind = format!("\nI look.<|assistant|>{weather}");
        check(context, &behind, "", "\nI look.", &BOTH[..1]);
        for text in [
            "weather",
            "weather\nis nice",
            "The weather\n{}",
            "other\n{}",
            "weather report\n{}",
        ] {
            check(context, text, "", text, &[]);
        }
        check(
            context,
            "weather\n{\"city\": \"Par",
            "",
            "",
            &[("weather", "{\"city\": \"Par")],
        );
    }
    let thought = format!("<think>\nHm.\n</think>\n{weather}");
    check(&think, &thought, "Hm.", "", &BOTH[..1]);
}

/// The models' own templates have these forms.
#[test]
fn templates_of_families_show_their_formats() {
    let turn = |call: &str| {
        format!(
            "{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{% if m.tool_calls %}}{call}{{% endif %}}\
             {{% endfor %}}"
        )
    };
    let olmo3 = turn(
        "<function_calls>{% for c in m.tool_calls %}{{ c.function.name ~ '(' }}\
         {% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ (v | tojson) }}{% endfor %}){% endfor %}</function_calls>",
    );
    assert_eq!(format_of(&olmo3), Some(CallFormat::Olmo3));
    // The first version of Olmo 3's template takes calls as a text of their own.
    let earlier = "{% for m in messages %}{{ m.content }}{% if m.function_calls %}\
                   <function_calls>{{ m.function_calls }}</function_calls>{% endif %}{% endfor %}";
    assert_eq!(format_of(earlier), Some(CallFormat::Olmo3));
    let command_r = turn(
        "\nAction:\n```json\n[\n{% for c in m.tool_calls %}    {\n        \"tool_name\": \"{{ c.function.name }}\",\n        \
         \"parameters\": {{ c.function.arguments | tojson(indent=4) | indent(8) }}\n    }{% endfor %}\n]```\n",
    );
    assert_eq!(format_of(&command_r), Some(CallFormat::CommandR));
    let glm4 = "{% for m in messages %}{% set meta = m.get('metadata', '') %}{% if m.role == 'assistant' %}\
                <|assistant|>{{ meta }}\n{{ m.content }}{% elif m.role == 'observation' %}<|observation|>\n{{ m.content }}\
                {% else %}<|{{ m.role }}|>\n{{ m.content }}{% endif %}{% endfor %}";
    assert_eq!(format_of(glm4), Some(CallFormat::Glm4));
    // GLM 4.5 has the same roles.
    let glm45 = format!("{glm4}{{# <tool_call> #}}");
    assert_ne!(format_of(&glm45), Some(CallFormat::Glm4));
}
