//! Numbers in schemas of answers and of tools: at the edges of 64-bit integers and doubles, and beyond them.

use std::sync::Arc;

use corella_fuzz::{Random, Target, Verdict};
use corella_text::{
    CallFormat, GrammarSource, ReplyContext, ReplyFormat, ToolSet, WantedCalls, WantedReply,
};
use serde_json::Value;

use crate::grammar::{COMPILER, TOKENIZER, draw};

const EDGES: [&str; 30] = [
    "0",
    "-0.0",
    "1",
    "-1",
    "0.5",
    "0.1",
    "1e-7",
    "5e-324",
    "-5e-324",
    "2.2250738585072014e-308",
    "1e-30",
    "2147483647",
    "-2147483648",
    "4294967295",
    "4294967296",
    "9007199254740991",
    "9007199254740993",
    "999999999999999999",
    "1e18",
    "9223372036854774784",
    "9223372036854775807",
    "-9223372036854775808",
    "-9223372036854775809",
    "-9.9e18",
    "1e19",
    "18446744073709551615",
    "18446744073709551616",
    "1e300",
    "1.7976931348623157e308",
    "-1.7976931348623157e308",
];
const BOUNDS: [&str; 5] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];

#[derive(Clone)]
struct Input {
    schema: String,
    /// Selects the kind of request by which the schema becomes a grammar.
    entrance: usize,
}

impl AsRef<[u8]> for Input {
    fn as_ref(&self) -> &[u8] {
        self.schema.as_bytes()
    }
}

fn number(random: &mut Random) -> String {
    let edge = random.pick(&EDGES);
    match random.below(4) {
        0 => random
            .pick(&["2", "3", "7", "10", "0.01", "0.25", "1000", "97"])
            .to_owned(),
        // A neighbour of an edge.
        1 if !edge.contains(['.', 'e']) => {
            let edge: i128 = edge.parse().expect("an integer");
            (edge + random.below(5) as i128 - 2).to_string()
        }
        2 => format!("{}e{}", random.below(1000), random.below(700) as i64 - 350),
        _ => edge.to_owned(),
    }
}

fn schema(random: &mut Random, depth: usize) -> String {
    let kind = random.pick(&["number", "integer"]);
    let mut fields = vec![format!(r#""type":"{kind}""#)];
    for bound in BOUNDS {
        if random.below(3) == 0 {
            fields.push(format!(r#""{bound}":{}"#, number(random)));
        }
    }
    match random.below(12) {
        0 => fields.push(format!(r#""const":{}"#, number(random))),
        1 => fields.push(format!(r#""enum":[{},{}]"#, number(random), number(random))),
        2..=4 if depth > 0 => {
            let keyword = random.pick(&["allOf", "anyOf", "oneOf"]);
            let parts: Vec<_> = (0..=random.below(3))
                .map(|_| schema(random, depth - 1))
                .collect();
            fields.push(format!(r#""{keyword}":[{}]"#, parts.join(",")));
        }
        5 => fields.push(r##""$ref":"#/other/a""##.to_owned()),
        _ => {}
    }
    if random.below(3) == 0 {
        fields.remove(0);
    }
    format!("{{{}}}", fields.join(","))
}

fn follow(input: &Input) -> Verdict {
    let Ok(schema) = serde_json::from_str::<Value>(&input.schema) else {
        return Verdict::Refused;
    };
    let grammar = match input.entrance {
        0 => COMPILER.compile(&GrammarSource::JsonSchema(schema)).ok(),
        1 => COMPILER
            .compile(&GrammarSource::Lark(format!("start: %json {schema}")))
            .ok(),
        other => {
            let format = ReplyFormat {
                calls: Some(CallFormat::ALL[other % CallFormat::ALL.len()]),
                reasoning: None,
            };
            let context = ReplyContext {
                format,
                tools: Some(Arc::new(ToolSet::new([("f".to_owned(), schema)]))),
                ..ReplyContext::default()
            };
            let wanted = WantedReply {
                calls: Some(WantedCalls::Any),
                text: None,
            };
            COMPILER
                .compile_reply(&TOKENIZER, &context, wanted, &|| true)
                .ok()
        }
    };
    match grammar {
        Some(grammar) => {
            draw(&grammar, input.schema.len() as u64);
            Verdict::Accepted
        }
        None => Verdict::Refused,
    }
}

#[test]
fn number_schema() {
    let corpus = [Input {
        schema: r#"{"type":"number","minimum":0}"#.to_owned(),
        entrance: 0,
    }];
    let mutate = |random: &mut Random, input: &mut Input| {
        let (whole, other) = (schema(random, 2), schema(random, 0));
        input.schema = format!(
            r#"{{"type":"object","properties":{{"a":{whole}}},"required":["a"],"other":{{"a":{other}}}}}"#
        );
        input.entrance = random.below(2 + 2 * CallFormat::ALL.len());
    };
    Target::new("number_schema", 256 << 20, 4000)
        .in_child("number::number_schema")
        .run(&corpus, mutate, follow);
}
