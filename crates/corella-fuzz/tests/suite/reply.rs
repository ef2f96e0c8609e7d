//! Replies of models, and the schemas of tools that constrain them.

use std::sync::Arc;

use corella_fuzz::{Random, Target, Verdict, mutate_json, mutate_text};
use corella_text::{
    CallFormat, Grammar, ReasoningFormat, ReplyContext, ReplyFormat, ReplyParser, ReplyPart,
    ToolSet, WantedCalls, WantedReply,
};
use serde_json::{Value, json};

use crate::corpus;
use crate::grammar::{COMPILER, TOKENIZER};

const REASONING: [Option<ReasoningFormat>; 7] = [
    None,
    Some(ReasoningFormat::Think),
    Some(ReasoningFormat::MistralThink),
    Some(ReasoningFormat::Harmony),
    Some(ReasoningFormat::Gemma4),
    Some(ReasoningFormat::SeedOss),
    Some(ReasoningFormat::Granite),
];
/// Calls in the formats of `CallFormat::ALL`, and text around them.
const REPLIES: [&str; 17] = [
    "<think>Hm.</think><tool_call>\n{\"name\": \"weather\", \"arguments\": {\"days\": 3}}\n</tool_call>",
    "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>weather\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
    "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"days\">3</parameter>\n</invoke>\n\
     <invoke name=\"time\">\n</invoke>\n</minimax:tool_call>",
    "<seed:think>Hm.</seed:think><seed:tool_call><function=weather><parameter=days>3</parameter></function>\
     </seed:tool_call>",
    "<|python_tag|>{\"name\": \"weather\", \"parameters\": {\"city\": \"Paris\"}}; {\"name\": \"time\", \"parameters\": {}}",
    "[THINK]Hm.[/THINK][TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"days\": 3}",
    "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"days\": 3}, \"id\": \"abcdefghi\"}]",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather \
     <|constrain|>json<|message|>{\"days\": 3}<|call|>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{\"days\": 3}\n```\
     <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"days\": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "<think>Hm.</think><response><|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"days\": 3}}]</response>",
    "<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|\"|>Paris<|\"|>,days:3}<tool_call|>",
    "<|tool_call_start|>[weather(city=\"Paris\", days=3), time()]<|tool_call_end|>",
    "{\"name\": \"weather\", \"parameters\": {\"units\": [1, {\"a\": null}]}}",
    "Hello <b>you</b>, {\"a\": 1}",
];

#[derive(Clone)]
struct Reply {
    text: String,
    calls: CallFormat,
    reasoning: Option<ReasoningFormat>,
    /// Bits that select `within_reasoning`, `past_reasoning` and `one_call`.
    flags: usize,
}

impl AsRef<[u8]> for Reply {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

/// Reads a reply in pieces of `piece_chars` characters, and joins the parts of one kind.
fn parts(context: &ReplyContext, text: &str, piece_chars: usize) -> Vec<ReplyPart> {
    let mut parser = ReplyParser::new(context);
    let mut parts = Vec::new();
    let characters: Vec<char> = text.chars().collect();
    for piece in characters.chunks(piece_chars) {
        let piece: String = piece.iter().collect();
        for part in parser.push_token(&piece) {
            part.append_to(&mut parts);
        }
    }
    for part in parser.finish(false) {
        part.append_to(&mut parts);
    }
    parts
}

/// Checks that the parts do not depend on the pieces, and that only offered tools are called.
fn check(context: &ReplyContext, text: &str) -> Vec<ReplyPart> {
    let whole = parts(context, text, usize::MAX);
    let split = parts(context, text, 1 + text.len() % 3);
    assert_eq!(whole, split, "{context:?}: {text:?}");
    let tools = context.tools.as_ref().expect("tools");
    for part in &whole {
        if let ReplyPart::CallStart { name, .. } = part {
            assert!(tools.contains(name), "{context:?}: {text:?}");
        }
    }
    whole
}

fn read(input: &Reply) -> Verdict {
    let schema = json!({"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "units": {"type": "array"},
    }});
    let tools = [
        ("weather".to_owned(), schema),
        ("time".to_owned(), Value::Null),
    ];
    let format = ReplyFormat {
        calls: Some(input.calls),
        reasoning: input.reasoning,
    };
    let context = ReplyContext {
        format,
        tools: Some(Arc::new(ToolSet::new(tools))),
        within_reasoning: input.flags & 3 == 1,
        past_reasoning: input.flags & 3 == 2,
        one_call: input.flags & 4 != 0,
    };
    check(&context, &input.text);
    Verdict::Accepted
}

#[test]
fn reply() {
    let corpus: Vec<Reply> = REPLIES
        .iter()
        .zip(CallFormat::ALL.iter().cycle())
        .map(|(text, calls)| Reply {
            text: (*text).to_owned(),
            calls: *calls,
            reasoning: None,
            flags: 0,
        })
        .collect();
    let mut words: Vec<&str> = vec!["weather", "other", "{", "}", "\"", "\\u00", "null", "1e9"];
    for calls in CallFormat::ALL {
        for reasoning in REASONING {
            let calls = Some(calls);
            words.extend(ReplyFormat { calls, reasoning }.markers());
        }
    }
    let mutate = |random: &mut Random, input: &mut Reply| {
        input.calls = random.pick(&CallFormat::ALL);
        input.reasoning = random.pick(&REASONING);
        input.flags = random.below(8);
        let other = random.pick(&REPLIES);
        mutate_text(random, &mut input.text, &words, other);
    };
    Target::new("reply", 16 << 20, 4000)
        .in_child("reply::reply")
        .run(&corpus, mutate, read);
}

#[derive(Clone)]
struct Tool {
    schema: String,
    calls: CallFormat,
    reasoning: Option<ReasoningFormat>,
}

impl AsRef<[u8]> for Tool {
    fn as_ref(&self) -> &[u8] {
        self.schema.as_bytes()
    }
}

/// Draws a reply, of a few hundred tokens at most, and tells whether it is complete.
fn draw(grammar: &Grammar, random: &mut Random) -> (String, bool) {
    let mut state = grammar.start();
    let mut tokens = Vec::new();
    let text = |tokens: &[u32]| TOKENIZER.decode(tokens, false).expect("known tokens");
    for _ in 0..300 {
        let Ok(words) = state.allowed() else {
            return (text(&tokens), false);
        };
        let allowed: Vec<u32> = (0..words.len() as u32 * 32)
            .filter(|token| (words[*token as usize / 32] >> (token % 32)) & 1 == 1)
            .collect();
        if state.may_end() == Ok(true) && (allowed.is_empty() || random.once_in(2)) {
            return (text(&tokens), true);
        }
        if allowed.is_empty() {
            break;
        }
        let token = random.pick(&allowed);
        if state.push(token).is_err() {
            break;
        }
        tokens.push(token);
    }
    (text(&tokens), false)
}

/// Checks that a reply that follows the grammar of a tool is read as calls of the tool.
fn call(input: &Tool) -> Verdict {
    let Ok(schema) = serde_json::from_str(&input.schema) else {
        return Verdict::Refused;
    };
    let format = ReplyFormat {
        calls: Some(input.calls),
        reasoning: input.reasoning,
    };
    let context = ReplyContext {
        format,
        tools: Some(Arc::new(ToolSet::new([("f".to_owned(), schema)]))),
        past_reasoning: input.reasoning.is_some(),
        ..ReplyContext::default()
    };
    let wanted = WantedReply {
        calls: Some(WantedCalls::Any),
        text: None,
    };
    let Ok(grammar) = COMPILER.compile_reply(&TOKENIZER, &context, wanted, &|| true) else {
        return Verdict::Refused;
    };
    let mut random = Random::new(input.schema.len() as u64, 0);
    let (text, is_complete) = draw(&grammar, &mut random);
    let parts = check(&context, &text);
    let has_call = parts
        .iter()
        .any(|part| matches!(part, ReplyPart::CallStart { .. }));
    assert!(has_call || !is_complete, "{context:?}: {text:?}");
    Verdict::Accepted
}

#[test]
fn tool_schema() {
    let schemas = corpus::text("tests/schemas/schemas.jsonl");
    let corpus: Vec<Tool> = schemas
        .lines()
        .step_by(5)
        .zip(CallFormat::ALL.iter().cycle())
        .map(|(schema, calls)| Tool {
            schema: schema.to_owned(),
            calls: *calls,
            reasoning: None,
        })
        .filter(|input| call(input) == Verdict::Accepted)
        .collect();
    assert!(corpus.len() > 20, "{}", corpus.len());
    let words = [
        "type",
        "object",
        "string",
        "properties",
        "required",
        "items",
        "$ref",
        "#/$defs/a",
        "$defs",
        "anyOf",
        "allOf",
        "enum",
        "const",
        "additionalProperties",
        "patternProperties",
        "</parameter>",
        "<|\"|>",
        "null",
    ];
    let mutate = |random: &mut Random, input: &mut Tool| {
        let mut schema: Value = serde_json::from_str(&input.schema).expect("a schema");
        mutate_json(random, &mut schema, &words);
        // The schema may be deeper than the parser of JSON allows.
        input.schema = schema.to_string();
        input.calls = random.pick(&CallFormat::ALL);
        // Harmony's reader of reasoning reads calls, too.
        let reads_other_calls = input.calls != CallFormat::Harmony;
        input.reasoning = random
            .pick(&REASONING)
            .filter(|reasoning| *reasoning != ReasoningFormat::Harmony || !reads_other_calls);
    };
    Target::new("tool_schema", 256 << 20, 4000)
        .in_child("reply::tool_schema")
        .run(&corpus, mutate, call);
}
