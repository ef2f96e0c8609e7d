//! Replies in the format of LFM2.

use super::{CallFormat, PARIS, ReasoningFormat, ReplyContext, check, context};

fn lfm2() -> ReplyContext {
    context(CallFormat::Lfm2, Some(ReasoningFormat::Think))
}

/// Checks the arguments of a call of `time`.
#[track_caller]
fn check_arguments(arguments: &str, json: &str) {
    let calls = [("time", json)];
    let list = format!("<|tool_call_start|>[time({arguments})]<|tool_call_end|>");
    check(&lfm2(), &list, "", "", &calls);
    let list = format!("<|tool_call_start|>[time({arguments}), time()]<|tool_call_end|>");
    check(&lfm2(), &list, "", "", &[("time", json), ("time", "{}")]);
}

#[test]
fn calls_become_json() {
    let context = lfm2();
    let list = "<|tool_call_start|>[weather(city=\"Paris\", days=3), time()]<|tool_call_end|>";
    let calls = [("weather", PARIS), ("time", "{}")];
    check(&context, list, "", "", &calls);
    check(
        &context,
        &format!("<think>\nHm.\n</think>\n\nI look.\n{list}Checking the weather. "),
        "Hm.",
        "I look.Checking the weather. ",
        &calls,
    );
    let blocks = "<|tool_call_start|>[weather(city='Paris', days=3)]<|tool_call_end|>\n\
                  <|tool_call_start|> [ time( ) ] <|tool_call_end|>";
    check(&context, blocks, "", "", &calls);
    let bare = "<|tool_call_start|>time()<|tool_call_end|>";
    check(&context, bare, "", "", &[("time", "{}")]);
    let json = "<|tool_call_start|>[{\"name\": \"weather\", \"arguments\": {\"city\": \"Paris\", \"days\": 3}}, \
                {\"name\": \"time\", \"arguments\": {}}]<|tool_call_end|>";
    check(&context, json, "", "", &calls);
    check(
        &context,
        "<|tool_call_start|>[]<|tool_call_end|>",
        "",
        "",
        &[],
    );
    check(&context, "a <|tool b", "", "a <|tool b", &[]);
    check(&context, "see [time()]", "", "see [time()]", &[]);
}

/// The examples of vLLM's parser.
#[test]
fn values_are_literals_of_python() {
    check_arguments(
        "name='John Doe', age=37, address={'city': 'San Francisco', 'state': 'CA'}, role=None, \
         passed_test=True, aliases=['John', 'Johnny']",
        r#"{"name": "John Doe", "age": 37, "address": {"city": "San Francisco", "state": "CA"}, "role": null, "passed_test": true, "aliases": ["John", "Johnny"]}"#,
    );
    check_arguments("additional_data={}", r#"{"additional_data": {}}"#);
    check_arguments("steps=[]", r#"{"steps": []}"#);
    check_arguments("tags={'urgent', 'bug'}", r#"{"tags": ["urgent", "bug"]}"#);
    check_arguments("month=07, day=05", r#"{"month": 7, "day": 5}"#);
    check_arguments(
        r#"city='Martha\'s Vineyard', metric='\"cool units\"'"#,
        r#"{"city": "Martha's Vineyard", "metric": "\"cool units\""}"#,
    );
    check_arguments(
        "list=[{'name': 'Lasagna noodles', 'amount': 250}, [1, (2, 3.5)]], to='845 Willow Lane, Springfield'",
        r#"{"list": [{"name": "Lasagna noodles", "amount": 250}, [1, [2, 3.5]]], "to": "845 Willow Lane, Springfield"}"#,
    );
    check_arguments(
        "command='cat > f.py << EOF\nimport csv\nEOF'",
        r#"{"command": "cat > f.py << EOF\nimport csv\nEOF"}"#,
    );
    // JSON within Python, as the model's templates write objects.
    check_arguments(
        r#"a={"b": true, "c": null, "d": ["\u00e9", -1e3]}"#,
        r#"{"a": {"b": true, "c": null, "d": ["é", -1e3]}}"#,
    );
    check_arguments(r"a='\ud83d\ude00\x41\d'", r#"{"a": "😀A\\d"}"#);
    check_arguments(
        "a='''it's\n'x' ''', b=''",
        r#"{"a": "it's\n'x' ", "b": ""}"#,
    );
    check_arguments("a={1: 'x', 'b': {}}", r#"{"a": {"1": "x", "b": {}}}"#);
    check_arguments("a = 1 , b = 'x' ", r#"{"a": 1, "b": "x"}"#);
}

/// A template writes strings unescaped, including quotes.
#[test]
fn quotes_and_markup_in_a_string_are_text() {
    check_arguments(
        "command='sed -n '360,450p' /testbed/common.py', n=1",
        r#"{"command": "sed -n '360,450p' /testbed/common.py", "n": 1}"#,
    );
    check_arguments(
        "command='python3 -c \"print(latex(3*x, mul_symbol='\\\\,'))\"'",
        r#"{"command": "python3 -c \"print(latex(3*x, mul_symbol='\\,'))\""}"#,
    );
    check_arguments(
        "command='grep -F \"]\" log.txt'",
        r#"{"command": "grep -F \"]\" log.txt"}"#,
    );
    check_arguments(
        "a='O'Neil', b=['it's', 'x']",
        r#"{"a": "O'Neil", "b": ["it's", "x"]}"#,
    );
    check_arguments(
        "a='), <|tool_call_end|> b'",
        r#"{"a": "), <|tool_call_end|> b"}"#,
    );
    check_arguments("a='x', y=1'", r#"{"a": "x", "y": "1'"}"#);
}

#[test]
fn what_a_model_gets_wrong_is_read_as_it_is_meant() {
    // The parameter of a value without a name is unknown.
    check_arguments("'x', 2, [3, 'y'], a=1", r#"{"a": 1}"#);
    check_arguments("a=, b=1", r#"{"a": null, "b": 1}"#);
    check_arguments("a: 1, b=[2)", r#"{"a": 1, "b": [2]}"#);
    let of = |reply: &str, text: &str, calls: &[(&str, &str)]| {
        check(&lfm2(), reply, "", text, calls);
    };
    of(
        "<|tool_call_start|>[time(a=[1<|tool_call_end|>So",
        "So",
        &[("time", r#"{"a": [1]}"#)],
    );
    of(
        "<|tool_call_start|>[two words()]<|tool_call_end|>",
        "two words()]",
        &[],
    );
    // The model repeats the list after its end.
    of(
        "<|tool_call_start|>[time(a=1)]<|tool_call_end|>\n[time(a=1)]<|tool_call_end|>Done.",
        "Done.",
        &[("time", r#"{"a": 1}"#)],
    );
    of(
        "<|tool_call_start|>[time(a=1)]<|tool_call_end|>[1] is a note.",
        "[1] is a note.",
        &[("time", r#"{"a": 1}"#)],
    );
    of(
        "<|tool_call_start|>[time(a=1)]<|tool_call_end|>[time(a=1)] is right.",
        "[time(a=1)] is right.",
        &[("time", r#"{"a": 1}"#)],
    );
}

#[test]
fn a_reply_may_be_cut_off() {
    let of = |reply: &str, calls: &[(&str, &str)]| {
        let text = if calls.is_empty() { "Well. " } else { "Well." };
        check(&lfm2(), reply, "", text, calls);
    };
    of("Well. <|tool_call_start|>[wea", &[]);
    of("Well. <|tool_call_start|>[weather(", &[("weather", "{")]);
    of(
        "Well. <|tool_call_start|>[weather(city='Par",
        &[("weather", "{\"city\": \"Par")],
    );
    of(
        "Well. <|tool_call_start|>[weather(city='Paris', days=1",
        &[("weather", "{\"city\": \"Paris\", \"days\": ")],
    );
    of(
        "Well. <|tool_call_start|>[time()]<|tool_",
        &[("time", "{}")],
    );
}
