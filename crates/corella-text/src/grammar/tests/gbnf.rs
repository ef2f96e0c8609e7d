//! Grammars in llama.cpp's notation: the texts that they allow, and their mistakes.

use super::*;
use crate::grammar::gbnf::is_gbnf;

fn gbnf(text: &str) -> GrammarSource {
    assert!(is_gbnf(text), "{text}");
    GrammarSource::Gbnf(text.to_owned())
}

#[track_caller]
fn check(source: &str, accepted: &[&str], refused: &[&str]) {
    let source = gbnf(source);
    for text in accepted {
        assert!(accepts(&source, text), "{text:?}");
    }
    for text in refused {
        assert!(!accepts(&source, text), "{text:?}");
    }
}

/// Objects and arrays contain values, so these rules are recursive.
const JSON: &str = r#"
# JSON without exponents
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws # may be empty
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn rules_may_lead_to_themselves() {
    check(
        JSON,
        &[
            "{}",
            r#"{"a": [1, -2.5, {"b\\\u00e4": null}], "c": "x/y é"}"#,
            "{\n  \"a\": [ ]\n}",
        ],
        &["", "[1]", r#"{"a": 01}"#, r#"{"a": "b}"#, r#"{"a": 1,}"#],
    );
}

#[test]
fn what_llama_writes_has_the_same_meaning() {
    check(
        "root ::= [a-c]* \"b\" word?\nword ::= \"\" | \" \" [^ ]{2}",
        &["b", "aab", "bb xy"],
        &["a", "b x", "b   "],
    );
    check(
        "root ::= (\"x\" | Y-2){2,} [.-] .\nY-2 ::= \"\\u00e9\\n\"",
        &["xx-é", "é\né\n.\n"],
        &["x-a", "xx-", "xx,a"],
    );
    check(
        r#"root ::= "/" [\]/\[^]+ | "\x41\U0001F600""#,
        &["/]^[", "A😀"],
        &["/", "A", "/a"],
    );
    check(
        "root ::= \"a\"\n  | \"b\" [^]{,2}",
        &["a", "b", "bcd"],
        &["bcde", "c"],
    );
}

#[test]
fn mistakes_are_told_with_their_line() {
    let compiler = compiler();
    for (text, words) in [
        ("root ::= a\nb ::= \"x\"", "no rule `a`"),
        ("other ::= \"x\"", "no rule `root`"),
        (
            "root ::= \"x\"\nroot ::= \"y\"",
            "line 2: the rule `root` is there twice",
        ),
        ("root ::= \"x", "does not end"),
        (
            "root ::= (\"x\"\na ::= \"y\"",
            "line 2: a bracket `(` is not closed",
        ),
        ("root ::= \"x\")", "`)` closes no bracket"),
        ("root ::= *", "`*` repeats nothing"),
        ("root ::= \"x\"+?", "`?` repeats nothing"),
        ("root ::= \"x\"{2,y}", "`{2,y}` must have numbers"),
        ("root ::= \"x\"{2", "not closed"),
        ("root ::= [z-a]", "goes down"),
        ("root ::= []", "no character"),
        ("root ::= [\\d]", "`\\d` is no escape"),
        ("root ::= \"\\ud800\"", "`d800` is no code"),
        ("root ::= \"a\" , \"b\"", "`,` has no meaning"),
        ("\"a\"\nroot ::= \"b\"", "line 1: a rule must begin"),
    ] {
        let error = compiler.compile(&gbnf(text)).expect_err(text);
        assert!(error.reason.contains(words), "{text}: {error}");
    }
}

#[test]
fn a_definition_tells_the_notation() {
    for lark in [
        "start: \"root ::= x\"",
        "start: a\n// root ::= x\na: \"::=\"",
        "root",
        "",
    ] {
        assert!(!is_gbnf(lark), "{lark}");
    }
    assert!(is_gbnf("# start: x\n  root-1_a::= \"x\""));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_text_makes_it_panic(text in "root ::= ([a-b]+ ::= |\"[a-z]*\"|\\[[^a-z\\]]{0,3}|\\\\x|\\(|\\)|\\||\\*|\\{1|\\}|\n|é| ){0,20}") {
        let _ = compiler().compile(&GrammarSource::Gbnf(text));
    }
}
