//! The parts of a reply do not depend on the division of its text, and contain no markup.

mod family;
mod gemma4;
mod lfm2;
mod offered;
mod tagged;

use std::sync::Arc;

use corella_text::{
    CallFormat, ChatTemplate, ReasoningFormat, ReplyContext, ReplyFormat, ReplyParser, ReplyPart,
    SpecialTokens, TagFormat, ToolSet,
};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A reply with its parts joined.
#[derive(Debug, Default, PartialEq)]
struct Reply {
    reasoning: String,
    text: String,
    calls: Vec<(String, String)>,
}

impl Reply {
    fn add(&mut self, parts: Vec<ReplyPart>) {
        for part in parts {
            match part {
                ReplyPart::Reasoning(text) => self.reasoning.push_str(&text),
                ReplyPart::Text(text) => self.text.push_str(&text),
                ReplyPart::CallStart { call, name } => {
                    assert_eq!(call, self.calls.len(), "calls count up");
                    assert!(!name.is_empty());
                    self.calls.push((name, String::new()));
                }
                ReplyPart::CallArguments { call, json } => {
                    assert_eq!(call + 1, self.calls.len(), "arguments follow their call");
                    self.calls[call].1.push_str(&json);
                }
            }
        }
    }

    fn read<'p>(context: &ReplyContext, pieces: impl IntoIterator<Item = &'p str>) -> Self {
        Self::read_until(false, context, pieces)
    }

    fn read_until<'p>(
        is_cut_off: bool,
        context: &ReplyContext,
        pieces: impl IntoIterator<Item = &'p str>,
    ) -> Self {
        let mut parser = ReplyParser::new(context);
        let mut reply = Self::default();
        for piece in pieces {
            reply.add(parser.push(piece));
        }
        reply.add(parser.finish(is_cut_off));
        reply
    }
}

fn tools() -> Arc<ToolSet> {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"},
    }});
    let names = ["weather", "time"];
    Arc::new(ToolSet::new(
        names.map(|name| (name.to_owned(), schema.clone())),
    ))
}

fn context(calls: CallFormat, reasoning: Option<ReasoningFormat>) -> ReplyContext {
    ReplyContext {
        format: ReplyFormat {
            calls: Some(calls),
            reasoning,
        },
        tools: Some(tools()),
        ..ReplyContext::default()
    }
}

/// Reads `text` whole, cut once at every place, and character by character.
#[track_caller]
fn check(
    context: &ReplyContext,
    text: &str,
    reasoning: &str,
    content: &str,
    calls: &[(&str, &str)],
) {
    let expected = Reply {
        reasoning: reasoning.into(),
        text: content.into(),
        calls: { calls.iter() }
            .map(|&(name, json)| (name.into(), json.into()))
            .collect(),
    };
    assert_eq!(Reply::read(context, [text]), expected, "{text}");
    for (cut, _) in text.char_indices() {
        let (start, end) = text.split_at(cut);
        assert_eq!(
            Reply::read(context, [start, end]),
            expected,
            "{start}|{end}"
        );
    }
    let characters = text.split_inclusive(|_: char| true);
    assert_eq!(Reply::read(context, characters), expected, "{text}");
}

const PARIS: &str = r#"{"city": "Paris", "days": 3}"#;

#[test]
fn hermes() {
    let context = context(CallFormat::Hermes, Some(ReasoningFormat::Think));
    let call =
        format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {PARIS}}}\n</tool_call>");
    let time =
        r#"<tool_call>{"arguments": {"city": "</tool_call> \" }"}, "name": "time"}</tool_call>"#;
    let time_arguments = r#"{"city": "</tool_call> \" }"}"#;
    check(&context, &call, "", "", &[("weather", PARIS)]);
    check(
        &context,
        &format!("<think>\nHm. \n</think>\n\nI look.\n\n{call}\n{time}\nDone. "),
        "Hm.",
        "I look.Done. ",
        &[("weather", PARIS), ("time", time_arguments)],
    );
    let as_string = r#"<tool_call>{"name": "time", "arguments": "{\"a\": 1}"}</tool_call>"#;
    check(&context, as_string, "", "", &[("time", r#"{"a": 1}"#)]);
    let without = r#"<tool_call>{"name": "time"}</tool_call>"#;
    check(&context, without, "", "", &[("time", "{}")]);
    let unclosed = r#"<tool_call>{"name": "time", "arguments": {}}}<tool_call>{"name": "time"}"#;
    check(
        &context,
        unclosed,
        "",
        "",
        &[("time", "{}"), ("time", "{}")],
    );
    // Invalid calls are text, without the tags.
    check(
        &context,
        "<tool_call>{\"nam\": 1}</tool_call>",
        "",
        "{\"nam\": 1}",
        &[],
    );
    check(
        &context,
        "<tool_call>{\"name\": \"\"}</tool_call>",
        "",
        "{\"name\": \"\"}",
        &[],
    );
    // A name with a line break is not JSON, and a tag within it is a part of its text.
    let broken = "{\"name\": \"a\n<tool_call>{\", \"arguments\": {}}";
    check(
        &context,
        &format!("<tool_call>{broken}</tool_call>"),
        "",
        broken,
        &[],
    );
    check(
        &context,
        "a < b <tool b> \n c <",
        "",
        "a < b <tool b> \n c <",
        &[],
    );
    // The reply was cut off: within a name, no call has begun.
    check(
        &context,
        "Well. <tool_call>\n{\"name\": \"wea",
        "",
        "Well. ",
        &[],
    );
    let half = "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"P";
    check(&context, half, "", "", &[("weather", "{\"city\": \"P")]);
}

/// A tag that a limit cut off is left out. In a whole reply it is text.
#[test]
fn a_tag_that_was_cut_off_is_no_text() {
    let tagged = |format: TagFormat| CallFormat::Tagged(format);
    for (calls, tag) in [
        (CallFormat::Hermes, "<tool_call>"),
        (tagged(TagFormat::Qwen3Coder), "<tool_call>"),
        (tagged(TagFormat::Glm45), "<tool_call>"),
        (tagged(TagFormat::MiniMaxM2), "<minimax:tool_call>"),
        (tagged(TagFormat::SeedOss), "<seed:tool_call>"),
        (CallFormat::Mistral, "[TOOL_CALLS]"),
        (CallFormat::Harmony, "<|call|>"),
        (CallFormat::DeepSeekV3, "<｜tool▁calls▁begin｜>"),
        (CallFormat::DeepSeekV31, "<｜tool▁calls▁begin｜>"),
        (CallFormat::Granite, "<|tool_call|>"),
        (CallFormat::Gemma4, "<|tool_call>"),
        (CallFormat::Lfm2, "<|tool_call_start|>"),
        (CallFormat::Olmo3, "<function_calls>"),
    ] {
        let context = context(calls, None);
        for (len, _) in tag.char_indices().skip(1) {
            let reply = format!("I look.{}", &tag[..len]);
            let pieces = reply.split_inclusive(|_: char| true);
            let cut = Reply::read_until(true, &context, pieces);
            assert_eq!(cut.text, "I look.", "{calls:?} {reply}");
            assert_eq!(Reply::read(&context, [&*reply]).text, reply, "{calls:?}");
        }
    }
    let call = r#"<tool_call>{"name": "time"}</tool_call>"#;
    let again = format!("{call}\n<tool_call");
    let cut = Reply::read_until(true, &context(CallFormat::Hermes, None), [&*again]);
    assert_eq!((&*cut.text, cut.calls.len()), ("", 1));
}

/// Calls without tags begin like text, so a text that was cut off stays.
#[test]
fn a_plain_call_that_was_cut_off_may_be_text() {
    for (calls, reply) in [
        (CallFormat::Llama3, r#"{"x": {"name": "ti"#),
        (CallFormat::CommandR, "Plan A"),
        (CallFormat::Glm4, "weath"),
    ] {
        let cut = Reply::read_until(true, &context(calls, None), [reply]);
        assert_eq!(cut.text, reply, "{calls:?}");
    }
}

#[test]
fn qwen_coder() {
    let context = context(CallFormat::Tagged(TagFormat::Qwen3Coder), None);
    let text = "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nPa\"ris\n\n</b>\n</parameter>\n\
        <parameter=days>\n3\n</parameter>\n<parameter=units>\n[\"a\", 1]\n</parameter>\n</function>\n</tool_call>";
    let arguments = r#"{"city": "Pa\"ris\n\n</b>", "days": 3, "units": ["a", 1]}"#;
    check(&context, text, "", "Let me see.", &[("weather", arguments)]);
    let two = "<function=time>\n</function>\n<tool_call>\n<function=time><parameter=days>soon</parameter></function></tool_call>";
    let calls = [("time", "{}"), ("time", r#"{"days": "soon"}"#)];
    check(&context, two, "", "", &calls);
    check(&context, "if a <function b", "", "if a <function b", &[]);
    check(&context, "<function=>x", "", ">x", &[]);
}

#[test]
fn llama() {
    let context = context(CallFormat::Llama3, None);
    let call = format!(r#"{{"name": "weather", "parameters": {PARIS}}}"#);
    check(&context, &call, "", "", &[("weather", PARIS)]);
    let two = format!("<|python_tag|>{call}; {call}");
    check(
        &context,
        &two,
        "",
        "",
        &[("weather", PARIS), ("weather", PARIS)],
    );
    let typed = r#"{"type": "function", "name": "time", "parameters": {}}"#;
    check(&context, typed, "", "", &[("time", "{}")]);
    // JSON that the user requested.
    for json in [
        r#"{"name": "Ada", "age": 36}"#,
        r#"{"x": {"name": "time"}}"#,
        "{\"name\": \"ti",
    ] {
        check(&context, json, "", json, &[]);
    }
    check(
        &context,
        " Say {\"name\": \"time\"}",
        "",
        " Say {\"name\": \"time\"}",
        &[],
    );
}

#[test]
fn mistral() {
    let context = context(CallFormat::Mistral, Some(ReasoningFormat::MistralThink));
    let list = format!(
        r#"[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}, {{"name": "time", "arguments": {{}}}}]"#
    );
    check(
        &context,
        &list,
        "",
        "",
        &[("weather", PARIS), ("time", "{}")],
    );
    let named =
        format!("Hm. [TOOL_CALLS]weather[ARGS]{PARIS}[TOOL_CALLS]time[CALL_ID]abc123[ARGS]{{}}");
    check(
        &context,
        &named,
        "",
        "Hm.",
        &[("weather", PARIS), ("time", "{}")],
    );
    let bare = format!("[THINK]So.[/THINK][TOOL_CALLS]weather{PARIS}");
    check(&context, &bare, "So.", "", &[("weather", PARIS)]);
    check(&context, "[TOOL_CALLS] hello there", "", "hello there", &[]);
    check(&context, "[TOOL_CALLS]weather", "", "", &[]);
    check(&context, "a [TOOL] b", "", "a [TOOL] b", &[]);
}

#[test]
fn granite() {
    let context = context(CallFormat::Granite, Some(ReasoningFormat::Think));
    let list = format!(
        r#"[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "time", "arguments": {{}}}}]"#
    );
    let calls = [("weather", PARIS), ("time", "{}")];
    check(&context, &format!("<|tool_call|>{list}"), "", "", &calls);
    check(
        &context,
        &format!("I look.\n<tool_call>{list}</tool_call>\n"),
        "",
        "I look.",
        &calls,
    );
    let one = r#"<think>Hm.</think><|tool_call|> {"name": "time"}"#;
    check(&context, one, "Hm.", "", &[("time", "{}")]);
    check(&context, "<|tool_call|>[]", "", "", &[]);
    check(&context, "<|tool_call|> none", "", "none", &[]);
    check(&context, "a <|tool b", "", "a <|tool b", &[]);
}

/// The model sometimes omits the end of a parameter.
#[test]
fn an_argument_of_qwen3_coder_without_its_end() {
    let context = context(CallFormat::Tagged(TagFormat::Qwen3Coder), None);
    let city = |value: &str| json!({"city": value}).to_string().replace(':', ": ");
    let begun = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n";
    let paris = city("Paris");
    for end in [
        "</function>\n</tool_call>",
        "</function></tool_call>\n",
        "</function>",
        "</tool_call>",
        "</parameter>\n</tool_call>",
    ] {
        check(
            &context,
            &format!("{begun}{end}"),
            "",
            "",
            &[("weather", &paris)],
        );
    }
    let time = "<tool_call>\n<function=time>\n</function>\n</tool_call>";
    for end in [
        "</function>\n</tool_call>\n",
        "</function>\n",
        "</tool_call>\n",
        "</parameter>\n</function>\n",
    ] {
        let calls = [("weather", paris.as_str()), ("time", "{}")];
        check(&context, &format!("{begun}{end}{time}"), "", "", &calls);
    }
    // The next parameter begins.
    let days = format!("{begun}<parameter=days>\n3\n</function>\n</tool_call>");
    check(&context, &days, "", "", &[("weather", PARIS)]);
    // Such a tag belongs to the value if more of the value follows.
    for value in [
        "a</function>b",
        "</tool_call>\nx",
        "<parameter=other>1",
        "<parameter=city>1",
        "<parameter= x",
        "</function> </para",
        "<",
    ] {
        let text = format!("<function=weather><parameter=city>\n{value}\n</parameter></function>");
        check(&context, &text, "", "", &[("weather", &city(value))]);
    }
}

#[test]
fn harmony() {
    let context = context(CallFormat::Harmony, Some(ReasoningFormat::Harmony));
    let text = format!(
        "<|channel|>analysis<|message|>We need it.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>\
         <|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
         <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>"
    );
    check(
        &context,
        &text,
        "We need it.\nYes.",
        "I look.",
        &[("weather", PARIS)],
    );
    // The recipient may be in the role, with which the prompt ends, and the end may be missing from the text.
    let early = " to=functions.time<|channel|>commentary json<|message|>{}";
    check(&context, early, "", "", &[("time", "{}")]);
    let answer = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hello <b>";
    check(&context, answer, "Hm", "Hello <b>", &[]);
    check(&context, "Hello", "", "Hello", &[]);
    check(&context, "<|channel|>anal", "", "", &[]);
}

#[test]
fn deepseek() {
    let v3 = context(CallFormat::DeepSeekV3, Some(ReasoningFormat::Think));
    let text = format!(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>\n\
         <｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    let calls = [("weather", PARIS), ("time", "{}")];
    check(&v3, &text, "", "I look.", &calls);
    let v31 = context(CallFormat::DeepSeekV31, None);
    let text = format!(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>\
         <｜tool▁call▁begin｜>time<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    );
    check(&v31, &text, "", "", &calls);
    check(&v31, "a <｜ b", "", "a <｜ b", &[]);
}

#[test]
fn reasoning() {
    let mut context = context(CallFormat::Hermes, Some(ReasoningFormat::Think));
    context.tools = None;
    check(
        &context,
        "\n<think>\nA\n\nB\n</think>\n\nHi <tool_call>\n",
        "A\n\nB",
        "Hi <tool_call>\n",
        &[],
    );
    check(&context, "<think>\n\n</think>\n\nHi", "", "Hi", &[]);
    // Only a tag at the beginning of a reply counts.
    check(
        &context,
        "The tag <think> opens.",
        "",
        "The tag <think> opens.",
        &[],
    );
    check(&context, " <thin", "", " <thin", &[]);
    context.within_reasoning = true;
    check(&context, "A </thin B</think>Hi", "A </thin B", "Hi", &[]);
    check(&context, "<think>A", "A", "", &[]);
}

#[test]
fn only_the_first_call_is_told_if_one_is_wanted() {
    let mut context = context(CallFormat::Hermes, None);
    context.one_call = true;
    let call = r#"<tool_call>{"name": "time", "arguments": {}}</tool_call>"#;
    check(&context, &call.repeat(3), "", "", &[("time", "{}")]);
}

#[test]
fn text_is_told_as_soon_as_it_cannot_be_markup() {
    let mut parser = ReplyParser::new(&context(CallFormat::Hermes, None));
    let text = |text: &str| vec![ReplyPart::Text(text.into())];
    assert_eq!(parser.push("Hello <"), text("Hello"));
    assert_eq!(parser.push("b"), text(" <b"));
    assert_eq!(parser.push("<tool_call>{\"name\": \"time\""), {
        let name = "time".into();
        vec![ReplyPart::CallStart { call: 0, name }]
    });
    assert_eq!(parser.push(", \"arguments\": {\"city"), {
        let json = "{\"city".into();
        vec![ReplyPart::CallArguments { call: 0, json }]
    });
}

#[test]
fn a_template_shows_the_format() {
    let cases = [
        ("{{ '<tool_call>' }}", Some(CallFormat::Hermes), None),
        (
            "<tool_call><function=x><parameter=y>",
            Some(CallFormat::Tagged(TagFormat::Qwen3Coder)),
            None,
        ),
        ("[TOOL_CALLS]", Some(CallFormat::Mistral), None),
        ("<|python_tag|>", Some(CallFormat::Llama3), None),
        (
            "<|channel|><|message|>",
            Some(CallFormat::Harmony),
            Some(ReasoningFormat::Harmony),
        ),
        (
            "<｜tool▁call▁begin｜>```json</think>",
            Some(CallFormat::DeepSeekV3),
            Some(ReasoningFormat::Think),
        ),
        ("<｜tool▁call▁begin｜>", Some(CallFormat::DeepSeekV31), None),
        ("[THINK]", None, Some(ReasoningFormat::MistralThink)),
        ("<|tool_call|>", Some(CallFormat::Granite), None),
        (
            "'<|tool_call>call:' <|channel>thought\n<channel|>",
            Some(CallFormat::Gemma4),
            Some(ReasoningFormat::Gemma4),
        ),
        ("<|tool_call_start|>[", Some(CallFormat::Lfm2), None),
        ("<|tool_list_start|>[", Some(CallFormat::Lfm2), None),
        (
            "<|im_start|>system List of tools: [ </think>",
            Some(CallFormat::Lfm2),
            Some(ReasoningFormat::Think),
        ),
        ("{{ messages }}", None, None),
    ];
    for (source, calls, reasoning) in cases {
        let template = ChatTemplate::new(source, SpecialTokens::default()).unwrap();
        assert_eq!(
            template.reply_format(),
            ReplyFormat { calls, reasoning },
            "{source}"
        );
    }
    for format in CallFormat::ALL {
        assert_eq!(format.name().parse::<CallFormat>().unwrap(), format);
    }
    for format in ReasoningFormat::ALL {
        assert_eq!(format.name().parse::<ReasoningFormat>().unwrap(), format);
    }
    let error = "hermex".parse::<CallFormat>().unwrap_err().to_string();
    assert!(
        error.contains("hermex") && error.contains("qwen3_coder"),
        "{error}"
    );
}

#[test]
fn a_template_tells_how_it_wants_arguments() {
    let of = |expression: &str| {
        let source = format!(
            "{{% for m in messages %}}{{% for c in m.tool_calls %}}{expression}{{% endfor %}}{{% endfor %}}"
        );
        let template = ChatTemplate::new(&source, SpecialTokens::default()).unwrap();
        template.needs_text_arguments()
    };
    assert!(!of("{{ c.function.arguments | tojson }}"));
    assert!(!of(
        "{% for k, v in c.function.arguments.items() %}{{ k }}{% endfor %}"
    ));
    assert!(of("{{ '```json\\n' + c.function.arguments + '\\n```' }}"));
    assert!(!of(""));
}

#[test]
fn a_prompt_opens_the_reasoning_at_its_end() {
    let think = ReasoningFormat::Think;
    assert!(think.is_opened_by("<|assistant|><think>\n"));
    assert!(!think.is_opened_by("<|assistant|><think>\n\n</think>\n\n"));
    assert!(think.is_open_at_end("<think>Well, "));
    assert!(!think.is_open_at_end("<think>Well</think>, "));
}

fn fragment() -> impl Strategy<Value = &'static str> {
    prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "name",
        "\"name\": ",
        "\"weather\"",
        "\"arguments\": ",
        "\"parameters\": ",
        "{\"city\": \"é\"}",
        ", ",
        ": ",
        "\\",
        "<",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        ";",
        "<function=",
        "weather",
        ">",
        "<parameter=",
        "city",
        "days",
        "</parameter>",
        "</function>",
        "12",
        "<think>",
        "</think>",
        "<|channel|>",
        "analysis",
        "final",
        "<|message|>",
        "<|end|>",
        "<|start|>assistant",
        " to=functions.time",
        "<|call|>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "```json",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_call>",
        "call:",
        "<|\"|>",
        "<tool_call|>",
        "<|channel>",
        "thought\n",
        "<channel|>",
        "<|tool_call_start|>",
        "[weather(",
        "=",
        "'",
        ")",
        "<|tool_call_end|>",
        "hello",
    ])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_cuts_give_the_same_reply(
        fragments in prop::collection::vec(fragment(), 0..40),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        format in prop::sample::select(CallFormat::ALL.to_vec()),
        reasoning in prop::sample::select(vec![
            None, Some(ReasoningFormat::Think), Some(ReasoningFormat::Harmony), Some(ReasoningFormat::Gemma4),
        ]),
        within_reasoning: bool,
    ) {
        let text = fragments.concat();
        let context = ReplyContext { within_reasoning, ..context(format, reasoning) };
        let mut places: Vec<_> = text.char_indices().map(|(at, _)| at).collect();
        places.push(text.len());
        let mut cuts: Vec<_> = cuts.iter().map(|cut| *cut.get(&places)).collect();
        cuts.extend([0, text.len()]);
        cuts.sort_unstable();
        let pieces = cuts.windows(2).map(|cut| &text[cut[0]..cut[1]]);
        prop_assert_eq!(Reply::read(&context, pieces), Reply::read(&context, [text.as_str()]));
    }
}

#[test]
fn a_set_of_tools_is_in_order() {
    let set = tools();
    let names: Vec<_> = set.iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["time", "weather"]);
    assert!(set.iter().all(|(_, schema)| *schema != Value::Null));
}
