//! Constraints of callers: JSON schemas, regular expressions, and grammars in the notations of Lark and llama.cpp.

use std::sync::LazyLock;

use corella_fuzz::{Random, Target, Verdict, mutate_json, mutate_text};
use corella_text::{Grammar, GrammarCompiler, GrammarSource, Tokenizer};
use serde_json::Value;

use crate::corpus;

/// A constraint in the form of a request.
#[derive(Clone)]
struct Input {
    text: String,
    wrap: fn(&str) -> GrammarSource,
}

impl AsRef<[u8]> for Input {
    fn as_ref(&self) -> &[u8] {
        self.text.as_bytes()
    }
}

pub(crate) static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let tokenizer = Tokenizer::from_bytes(&corpus::bytes("models/nano/tokenizer.json"));
    tokenizer.expect("the built-in model's")
});
pub(crate) static COMPILER: LazyLock<GrammarCompiler> = LazyLock::new(|| {
    GrammarCompiler::new(&TOKENIZER, TOKENIZER.vocab_size()).expect("a vocabulary")
});

/// Compiles a constraint, and follows it for some tokens.
fn follow(input: &Input) -> Verdict {
    let grammar = COMPILER.compile(&(input.wrap)(&input.text));
    if let Ok(grammar) = &grammar {
        draw(grammar, input.text.len() as u64);
    }
    Verdict::from(&grammar)
}

pub(crate) fn draw(grammar: &Grammar, seed: u64) {
    let mut random = Random::new(seed, 0);
    let mut state = grammar.start();
    for _ in 0..24 {
        let Ok(words) = state.allowed() else {
            return;
        };
        let allowed: Vec<u32> = (0..words.len() as u32 * 32)
            .filter(|token| (words[*token as usize / 32] >> (token % 32)) & 1 == 1)
            .collect();
        if allowed.is_empty() || state.push(random.pick(&allowed)).is_err() {
            return;
        }
        let _ = state.may_end();
    }
}

#[test]
fn json_schema() {
    let wrap =
        |text: &str| GrammarSource::JsonSchema(serde_json::from_str(text).unwrap_or_default());
    let schemas = corpus::text("tests/schemas/schemas.jsonl");
    let of_zod = corpus::text("tests/schemas/zod.jsonl");
    let of_zod = of_zod.lines().map(|line| {
        let case: Value = serde_json::from_str(line).expect("JSON");
        case["schema"].to_string()
    });
    let corpus: Vec<Input> = schemas
        .lines()
        .step_by(7)
        .map(str::to_owned)
        .chain(of_zod)
        .map(|text| Input { text, wrap })
        .filter(|input| follow(input) == Verdict::Accepted)
        .collect();
    let words = [
        "type",
        "object",
        "string",
        "integer",
        "properties",
        "required",
        "items",
        "minItems",
        "maxItems",
        "pattern",
        "^(a|a)*$",
        "^(?!a)(?!.*b$)(?=.*c)[a-z]+$",
        "propertyNames",
        "not",
        "format",
        "date-time",
        "$ref",
        "#",
        "#/$defs/a",
        "$defs",
        "anyOf",
        "allOf",
        "oneOf",
        "enum",
        "const",
        "additionalProperties",
        "patternProperties",
        "minLength",
        "maxLength",
        "minimum",
        "multipleOf",
    ];
    let mutate = |random: &mut Random, input: &mut Input| {
        let mut schema: Value = serde_json::from_str(&input.text).expect("a schema");
        mutate_json(random, &mut schema, &words);
        input.text = schema.to_string();
    };
    Target::new("json_schema", 256 << 20, 4000)
        .in_child("grammar::json_schema")
        .run(&corpus, mutate, follow);
}

#[test]
fn regex() {
    let wrap = |text: &str| GrammarSource::Regex(text.to_owned());
    let corpus = [
        "[a-c]{2,3}\\d",
        "(?i)yes|no",
        "\\p{L}+(-\\p{N}{1,4})*",
        "[^\\n]{1,80}\\.?",
        "(a|b(c|d)*)+",
    ]
    .map(|text| Input {
        text: text.to_owned(),
        wrap,
    });
    let words = [
        "(",
        ")",
        "[",
        "]",
        "{1000}",
        "{0,65535}",
        "*",
        "+",
        "?",
        "|",
        "(?i)",
        "\\p{L}",
        "\\b",
        "(?=",
        ".",
        "^",
        "$",
        "\\",
    ];
    let mutate = |random: &mut Random, input: &mut Input| {
        mutate_text(
            random,
            &mut input.text,
            &words,
            "[a-z]+@([a-z]+\\.){1,3}[a-z]{2,}",
        );
    };
    Target::new("regex", 256 << 20, 4000)
        .in_child("grammar::regex")
        .run(&corpus, mutate, follow);
}

#[test]
fn lark() {
    let wrap = |text: &str| GrammarSource::Lark(text.to_owned());
    let corpus = [
        "start: greeting \" \" NAME\ngreeting: \"hi\" | \"bye\"\nNAME: /[A-Z][a-z]+/\n",
        "start: sum\nsum: product (\"+\" product)*\nproduct: NUMBER (\"*\" NUMBER)*\nNUMBER: /[0-9]{1,6}/\n%ignore /[ ]+/\n",
        "start: \"{\" pair (\",\" pair)* \"}\"\npair: /[a-z]+/ \":\" value\nvalue: start | /[0-9]+/\n",
    ]
    .map(|text| Input { text: text.to_owned(), wrap });
    let words = [
        "start: ",
        "\n",
        "|",
        "*",
        "+",
        "?",
        "(",
        ")",
        "\"a\"",
        "/a*/",
        "%ignore ",
        "%import ",
        "%json {}",
        "%llguidance {}",
        "{1,1000000}",
        "NAME",
        "a: b\nb: a\n",
        "[",
        "]",
        "~",
        "@",
        "<|end|>",
    ];
    let mutate = |random: &mut Random, input: &mut Input| {
        mutate_text(
            random,
            &mut input.text,
            &words,
            "start: a\na: a a | \"x\"\n",
        );
    };
    Target::new("lark", 256 << 20, 4000)
        .in_child("grammar::lark")
        .run(&corpus, mutate, follow);
}

#[test]
fn gbnf() {
    let wrap = |text: &str| GrammarSource::Gbnf(text.to_owned());
    let corpus = [
        "root ::= \"hi\" \" \" name # Ada\nname ::= [A-Z] [^\\n\\x20]{1,9}\n",
        "root ::= sum\nsum ::= product (\"+\" product)*\nproduct ::= [0-9]+ | \"(\" sum \")\"\n",
    ]
    .map(|text| Input {
        text: text.to_owned(),
        wrap,
    });
    let words = [
        "root ::= ",
        "\n",
        "|",
        "*",
        "+",
        "?",
        "(",
        ")",
        "\"a\"",
        "[",
        "]",
        "^",
        "-",
        "\\u00e9",
        "#",
        ".",
        "{1,1000000}",
    ];
    let mutate = |random: &mut Random, input: &mut Input| {
        let more = "root ::= a\na ::= a a | \"x\"\n";
        mutate_text(random, &mut input.text, &words, more);
    };
    Target::new("gbnf", 256 << 20, 4000)
        .in_child("grammar::gbnf")
        .run(&corpus, mutate, follow);
}
