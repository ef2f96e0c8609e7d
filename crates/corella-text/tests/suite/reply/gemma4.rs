//! Replies in the format of Gemma 4.

use super::{CallFormat, PARIS, ReasoningFormat, ReplyContext, check, context};

fn gemma4() -> ReplyContext {
    context(CallFormat::Gemma4, Some(ReasoningFormat::Gemma4))
}

#[test]
fn calls_become_json() {
    let context = gemma4();
    let call = "<|tool_call>call:weather{city:<|\"|>Paris<|\"|>,days:3}<tool_call|>";
    check(&context, call, "", "", &[("weather", PARIS)]);
    let time = "<|tool_call>call:time{}<tool_call|>";
    check(
        &context,
        &format!("<|channel>thought\nHm.\n<channel|>I look.\n{call}{time}Done. "),
        "Hm.",
        "I look.Done. ",
        &[("weather", PARIS), ("time", "{}")],
    );
    let bare = "<|tool_call>call:time<tool_call|>";
    check(&context, bare, "", "", &[("time", "{}")]);
}

/// The examples of vLLM's parser.
#[test]
fn values_are_of_every_type() {
    let of = |arguments: &str, json: &str| {
        let call = format!("<|tool_call>call:time{{{arguments}}}<tool_call|>");
        check(&gemma4(), &call, "", "", &[("time", json)]);
    };
    of(
        "location:<|\"|>San Francisco<|\"|>,unit:<|\"|>celsius<|\"|>",
        r#"{"location": "San Francisco", "unit": "celsius"}"#,
    );
    of(
        "count:42,flag:true,no:false,none:null,x:-1.5",
        r#"{"count": 42, "flag": true, "no": false, "none": null, "x": -1.5}"#,
    );
    of(
        "nested:{inner_key:<|\"|>val<|\"|>,deep:{a:[1,{b:2}]}}",
        r#"{"nested": {"inner_key": "val", "deep": {"a": [1, {"b": 2}]}}}"#,
    );
    of(
        "items:[<|\"|>a<|\"|>,<|\"|>b<|\"|>],empty:[],none:{}",
        r#"{"items": ["a", "b"], "empty": [], "none": {}}"#,
    );
    of("bare:Paris", r#"{"bare": "Paris"}"#);
    of("<|\"|>a b<|\"|>:1", r#"{"a b": 1}"#);
    of(" a : 1 , b : [ 2 , 3 ] ", r#"{"a": 1, "b": [2, 3]}"#);
}

/// Markup in a string is text, and so are brackets, commas and JSON's quotes.
#[test]
fn strings_hold_markup() {
    let text = "}<tool_call|>, \"x\": {[\\n\n<|\" <|tool_call>";
    let call = format!("<|tool_call>call:time{{a:<|\"|>{text}<|\"|>,b:1}}<tool_call|>");
    let json = r#"{"a": "}<tool_call|>, \"x\": {[\\n\n<|\" <|tool_call>", "b": 1}"#;
    check(&gemma4(), &call, "", "", &[("time", json)]);
}

#[test]
fn what_a_model_gets_wrong_is_read_as_it_is_meant() {
    let of = |call: &str, json: &str| check(&gemma4(), call, "", "", &[("time", json)]);
    // JSON in place of the model's own notation.
    of(
        "<|tool_call>call:time{\"a\": \"x, }\\\"\", \"b\": [\"y\"]}<tool_call|>",
        r#"{"a": "x, }\"", "b": ["y"]}"#,
    );
    // Single quotes.
    of(
        "<|tool_call>call:time{a:'x',b:['it's, y' , ''],'c':'}'}<tool_call|>",
        r#"{"a": "x", "b": ["it's, y", ""], "c": "}"}"#,
    );
    // The name without its prefix, and superfluous or missing brackets.
    of("<|tool_call>:time{a:1}}<tool_call|>", r#"{"a": 1}"#);
    of(
        "<|tool_call>call:time{a:{b:[1<tool_call|>",
        r#"{"a": {"b": [1]}}"#,
    );
    of(
        "<|tool_call>call:time{a:,b:}<tool_call|>",
        r#"{"a": "", "b": ""}"#,
    );
    of("<|tool_call>call:time{a,b:1}<tool_call|>", r#"{"b": 1}"#);
    let no_name = "<|tool_call>call:get the time{a:1}<tool_call|>";
    check(&gemma4(), no_name, "", "call:get the time{a:1}", &[]);
    check(&gemma4(), "a <|tool b", "", "a <|tool b", &[]);
}

#[test]
fn a_reply_may_be_cut_off() {
    let of = |reply: &str, calls: &[(&str, &str)]| {
        let text = if calls.is_empty() { "Well. " } else { "Well." };
        check(&gemma4(), reply, "", text, calls);
    };
    of("Well. <|tool_call>call:wea", &[]);
    of("Well. <|tool_call>call:weather{", &[("weather", "{")]);
    of(
        "Well. <|tool_call>call:weather{city:<|\"|>Par",
        &[("weather", "{\"city\": \"Par")],
    );
    of(
        "Well. <|tool_call>call:weather{days:1",
        &[("weather", "{\"days\": ")],
    );
    of(
        "Well. <|tool_call>call:weather{}<tool_",
        &[("weather", "{}")],
    );
}

#[test]
fn reasoning_has_a_label() {
    let mut context = gemma4();
    check(
        &context,
        "<|channel>thought\nA thought\n<channel|>\n\nHi",
        "A thought",
        "Hi",
        &[],
    );
    check(&context, "<|channel>thought\n<channel|>Hi", "", "Hi", &[]);
    check(&context, "<|channel>So.<channel|>Hi", "So.", "Hi", &[]);
    check(&context, "<|channel>though", "", "", &[]);
    // A call also ends the thoughts.
    check(
        &context,
        "<|channel>thought\nHm. <|tool_call>call:time{}<tool_call|>",
        "Hm.",
        "",
        &[("time", "{}")],
    );
    context.within_reasoning = true;
    check(&context, "So.\n<channel|>Hi", "So.", "Hi", &[]);
    let format = ReasoningFormat::Gemma4;
    assert!(format.is_opened_by("<|turn>model\n<|channel>thought\n"));
    assert!(format.is_closed_by("<|turn>model\n<|channel>thought\n<channel|>"));
    assert!(!format.is_opened_by("<|turn>model\n<|channel>thought\n<channel|>"));
    assert!(format.is_open_at_end("<|channel>thought\nWell, "));
}
