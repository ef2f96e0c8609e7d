//! Only a tool that the request offers is called. The name and the arguments of another tool are text.

use super::{CallFormat, PARIS, ReasoningFormat, Reply, ReplyContext, TagFormat, check, context};

#[test]
fn another_tool_is_not_called_in_any_format() {
    const DAYS: &str = r#"{"days": 3}"#;
    let tagged = |format, call: &str| (CallFormat::Tagged(format), call.to_owned());
    let object = format!(r#"{{"name": "other", "arguments": {DAYS}}}"#);
    let calls = [
        (
            CallFormat::Hermes,
            format!("<tool_call>{object}</tool_call>"),
        ),
        tagged(
            TagFormat::Qwen3Coder,
            "<tool_call><function=other><parameter=days>3</parameter></function></tool_call>",
        ),
        tagged(
            TagFormat::SeedOss,
            "<seed:tool_call><function=other><parameter=days>3</parameter></function></seed:tool_call>",
        ),
        tagged(
            TagFormat::MiniMaxM2,
            "<minimax:tool_call><invoke name=\"other\"><parameter name=\"days\">3</parameter></invoke></minimax:tool_call>",
        ),
        tagged(
            TagFormat::Glm45,
            "<tool_call>other\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        ),
        tagged(
            TagFormat::Glm47,
            "<tool_call>other<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
        ),
        (CallFormat::Llama3, object.clone()),
        (
            CallFormat::Mistral,
            format!("[TOOL_CALLS]other[ARGS]{DAYS}"),
        ),
        (CallFormat::Mistral, format!("[TOOL_CALLS][{object}]")),
        (
            CallFormat::Harmony,
            format!(
                "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{DAYS}<|call|>"
            ),
        ),
        (
            CallFormat::DeepSeekV3,
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>other\n```json\n{DAYS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            CallFormat::DeepSeekV31,
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>other<｜tool▁sep｜>{DAYS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (CallFormat::Granite, format!("<|tool_call|>[{object}]")),
        (
            CallFormat::Gemma4,
            "<|tool_call>call:other{days:3}<tool_call|>".to_owned(),
        ),
        (
            CallFormat::Lfm2,
            "<|tool_call_start|>[other(days=3)]<|tool_call_end|>".to_owned(),
        ),
        (
            CallFormat::Olmo3,
            "<function_calls>other(days=3)</function_calls>".to_owned(),
        ),
        (
            CallFormat::CommandR,
            format!("Action: ```json\n[{{\"tool_name\": \"other\", \"parameters\": {DAYS}}}]\n```"),
        ),
        (CallFormat::Glm4, format!("other\n{DAYS}")),
    ];
    for format in CallFormat::ALL {
        assert!(calls.iter().any(|(of, _)| *of == format), "{format:?}");
    }
    for (format, call) in calls {
        let context = context(format, None);
        let whole = Reply::read(&context, [call.as_str()]);
        assert_eq!(whole.calls, [], "{call}");
        let has_name = whole.text.contains("other");
        assert!(
            has_name || format == CallFormat::Harmony,
            "{call}: {:?}",
            whole.text
        );
        assert!(
            whole.text.contains("\"days\": "),
            "{call}: {:?}",
            whole.text
        );
        check(&context, &call, "", &whole.text, &[]);
        // With the name of the offered tool, the same text is a call.
        let offered = call.replace("other", "weather");
        let calls = Reply::read(&context, [offered.as_str()]).calls;
        assert_eq!(calls.len(), 1, "{offered}");
    }
}

/// gpt-oss knows tools of its own, which it calls in its thoughts.
#[test]
fn a_tool_of_the_model_itself_is_a_thought() {
    let context = context(CallFormat::Harmony, Some(ReasoningFormat::Harmony));
    let text = format!(
        "<|channel|>analysis to=python code<|message|>print(1)<|end|><|start|>assistant<|channel|>commentary \
         to=functions.weather<|message|>{PARIS}<|call|>"
    );
    check(&context, &text, "print(1)", "", &[("weather", PARIS)]);
}

/// Only the first call of an offered tool counts.
#[test]
fn another_tool_does_not_take_the_place_of_a_call() {
    let context = ReplyContext {
        one_call: true,
        ..context(CallFormat::Hermes, None)
    };
    let call = |name: &str| {
        format!("<tool_call>{{\"name\": \"{name}\", \"arguments\": {{}}}}</tool_call>")
    };
    let text = format!("{}{}{}", call("other"), call("time"), call("weather"));
    check(&context, &text, "", "other {}", &[("time", "{}")]);
}

/// Granite and ERNIE write their answer in tags, too.
#[test]
fn an_answer_has_no_tags_around_it() {
    let context = context(CallFormat::Granite, Some(ReasoningFormat::Granite));
    for (text, reasoning, content) in [
        (
            "<think>Hm.</think> <response>Hi\n</b></response>",
            "Hm.",
            "Hi\n</b>",
        ),
        ("<think>Hm.</think>\n<response>\nHi", "Hm.", "Hi"),
        ("<think>Hm.</think>Hi <response>", "Hm.", "Hi <response>"),
        ("<response>Hi</response>", "", "Hi"),
        ("Hi</response>", "", "Hi</response>"),
        ("<resp", "", "<resp"),
    ] {
        check(&context, text, reasoning, content, &[]);
    }
    let call = "<think>Hm.</think><response><|tool_call|>[{\"name\": \"time\", \"arguments\": {}}]</response>";
    check(&context, call, "Hm.", "", &[("time", "{}")]);
}
