//! Replies in the formats whose calls are tags.

use super::{
    CallFormat, ChatTemplate, PARIS, ReasoningFormat, ReplyContext, SpecialTokens, TagFormat,
    check, context,
};

fn tagged(format: TagFormat) -> ReplyContext {
    context(CallFormat::Tagged(format), Some(ReasoningFormat::Think))
}

/// Checks a call of `weather`, a call of `time` after it, and text before and after the calls.
#[track_caller]
fn check_calls(context: &ReplyContext, weather: &str, time: &str, around: [&str; 2]) {
    let [open, close] = around;
    let weather_alone = [("weather", PARIS)];
    check(
        context,
        &format!("{open}{weather}{close}"),
        "",
        "",
        &weather_alone,
    );
    let both = [("weather", PARIS), ("time", "{}")];
    let text = format!("I look.\n\n{open}{weather}\n{time}{close}\nDone.");
    check(context, &text, "", "I look.Done.", &both);
    // The reply was cut off.
    let cut = &weather[..weather.find("Paris").expect("it is in it") + 3];
    let begun = [("weather", "{\"city\": \"Par")];
    check(context, &format!("{open}{cut}"), "", "", &begun);
}

#[test]
fn glm() {
    for format in [TagFormat::Glm45, TagFormat::Glm47] {
        let context = tagged(format);
        let weather = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n\
                       <arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>";
        let time = "<tool_call>time\n</tool_call>";
        check_calls(&context, weather, time, ["", ""]);
        check_calls(
            &context,
            &weather.replace('\n', ""),
            "<tool_call>time</tool_call>",
            ["", ""],
        );
        // A key without a value is left out, and JSON is no call.
        let incomplete = "<tool_call>time<arg_key>days</arg_key></tool_call>";
        check(&context, incomplete, "", "", &[("time", "{}")]);
        let json = "<tool_call>{\"name\": \"time\"}</tool_call>";
        check(&context, json, "", "{\"name\": \"time\"}", &[]);
    }
}

#[test]
fn minimax_m2() {
    let weather = "<invoke name=\"weather\">\n<parameter name=\"city\">Paris</parameter>\n\
                   <parameter name=\"days\">3</parameter>\n</invoke>";
    let time = "<invoke name=\"time\">\n</invoke>";
    let around = ["<minimax:tool_call>\n", "\n</minimax:tool_call>"];
    check_calls(&tagged(TagFormat::MiniMaxM2), weather, time, around);
}

#[test]
fn seed_oss() {
    let mut context = tagged(TagFormat::SeedOss);
    context.format.reasoning = Some(ReasoningFormat::SeedOss);
    let weather = "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n\
                   <parameter=days>3</parameter>\n</function>\n</seed:tool_call>";
    let time = "<seed:tool_call>\n<function=time>\n</function>\n</seed:tool_call>";
    check_calls(&context, weather, time, ["", ""]);
    let thoughtful = format!("<seed:think>Hm.</seed:think>\n{time}");
    check(&context, &thoughtful, "Hm.", "", &[("time", "{}")]);
}

/// Only Qwen3-Coder puts line breaks around a value. Others write the value as it is.
#[test]
fn line_breaks_in_a_value_stay() {
    let value = "\nif a < b:\n  </x>\n";
    let json = |value: &str| {
        serde_json::json!({"city": value})
            .to_string()
            .replacen(':', ": ", 1)
    };
    for (format, call) in [
        (
            TagFormat::Qwen3Coder,
            format!("<function=weather><parameter=city>\n{value}\n</parameter></function>"),
        ),
        (
            TagFormat::SeedOss,
            format!("<function=weather><parameter=city>{value}</parameter></function>"),
        ),
        (
            TagFormat::MiniMaxM2,
            format!(
                "<invoke name=\"weather\"><parameter name=\"city\">{value}</parameter></invoke>"
            ),
        ),
        (
            TagFormat::Glm45,
            format!(
                "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
            ),
        ),
    ] {
        check(&tagged(format), &call, "", "", &[("weather", &json(value))]);
    }
}

/// Templates with the constructs of the models' own.
#[test]
fn the_printed_call_tells_the_format() {
    const EACH: &str = "{% for k, v in c.function.arguments.items() %}";
    let turn = |call: &str| {
        format!(
            "{{% if tools %}}<tool_call>{{\"name\": x}}</tool_call>{{% endif %}}{{% for m in messages %}}\
             {{{{ m.content }}}}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{{% endfor %}}"
        )
    };
    let glm = |gap: &str| {
        turn(&format!(
            "{{{{ '\\n<tool_call>' + c.function.name }}}}{gap}{EACH}<arg_key>{{{{ k }}}}</arg_key>{gap}\
             <arg_value>{{{{ v }}}}</arg_value>{gap}{{% endfor %}}</tool_call>"
        ))
    };
    let seed = turn(&format!(
        "{{{{ '<seed:tool_call>\\n<function=' + c.function.name + '>' }}}}{EACH}<parameter={{{{ k }}}}>{{{{ v }}}}{{% endfor %}}"
    ));
    let qwen = seed.replace("<seed:tool_call>", "<tool_call>");
    let minimax = turn(&format!(
        "<minimax:tool_call>\n<invoke name=\"{{{{ c.function.name }}}}\">{EACH}{{{{ k }}}}{{{{ v }}}}{{% endfor %}}"
    ));
    let hermes = turn("<tool_call>\n{{ c.function | tojson }}\n</tool_call>");
    let tagged = |format| Some(CallFormat::Tagged(format));
    for (source, expected) in [
        (glm("\n"), tagged(TagFormat::Glm45)),
        (glm(""), tagged(TagFormat::Glm47)),
        (seed, tagged(TagFormat::SeedOss)),
        (qwen, tagged(TagFormat::Qwen3Coder)),
        (minimax, tagged(TagFormat::MiniMaxM2)),
        (hermes, Some(CallFormat::Hermes)),
        (
            turn("<|tool_call|>[{{ c.function | tojson }}]"),
            Some(CallFormat::Granite),
        ),
        (
            turn("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"),
            Some(CallFormat::Mistral),
        ),
        // An unknown form in known tags.
        (
            turn(
                "<tool_call>call {{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>",
            ),
            None,
        ),
    ] {
        let template = ChatTemplate::new(&source, SpecialTokens::default()).unwrap();
        assert_eq!(template.reply_format().calls, expected, "{source}");
    }
}

/// vLLM's names.
#[test]
fn a_parser_has_the_name_of_vllm() {
    for name in [
        "glm45",
        "glm47",
        "minimax_m2",
        "seed_oss",
        "qwen3_coder",
        "granite",
        "granite4",
        "ernie45",
        "olmo3",
    ] {
        assert!(name.parse::<CallFormat>().is_ok(), "{name}");
    }
    for name in ["glm45", "minimax_m2", "seed_oss", "granite", "ernie45"] {
        assert!(name.parse::<ReasoningFormat>().is_ok(), "{name}");
    }
}
