//! The errors of grammars, worded for their caller. llguidance's own messages name its options and parts.

use crate::grammar::schema::LOOK_AROUND;

const TOO_LARGE: &str = "it is too large: use fewer parts, and smaller counts and lengths";

/// Whether a grammar failed because it is too large.
pub(crate) fn is_too_large(reason: &str) -> bool {
    reason.ends_with(TOO_LARGE)
}

/// The reason in llguidance's message of one or a few lines.
pub(crate) fn caller_reason(error: &str) -> String {
    // llguidance prints its state after the reason of an error, and a backtrace after the reason of a panic.
    let error = error.split("\n<").next().unwrap_or_default().trim();
    if error.starts_with("panic: ") {
        return "it cannot be compiled: make it simpler".to_owned();
    }
    // The place of an error in a schema is found separately.
    let error = error
        .split("\n  while processing ")
        .next()
        .unwrap_or_default();
    let (place, error) = lark_place(error);
    let error = [
        "failed to compile JSON schema: ",
        "lexer error: ",
        "parser error: ",
        "Parser Error: ",
    ]
    .iter()
    .fold(error, |error, prefix| {
        error.strip_prefix(prefix).unwrap_or(error)
    });
    // A picture of the place in the grammar has lines of its own.
    let first = error.trim().lines().next().unwrap_or_default();
    let reason = regex_reason(error)
        .or_else(|| schema_reason(first))
        .or_else(|| grammar_reason(first))
        .unwrap_or_else(|| first.to_owned());
    format!("{place}{reason}")
}

/// The place that Lark's parser puts before an error, such as `at 2(7): `.
fn lark_place(error: &str) -> (&str, &str) {
    let Some(end) = error.find(": ") else {
        return ("", error);
    };
    let place = error[..end].trim_start_matches("at ");
    let is_place =
        place == "EOF" || place.ends_with(')') && place.starts_with(|c: char| c.is_ascii_digit());
    match is_place {
        true => error.split_at(end + 2),
        false => ("", error),
    }
}

/// The reason without a place, for a grammar without lines of its own.
pub(crate) fn without_place(reason: &str) -> String {
    lark_place(reason).1.to_owned()
}

/// The reason for a wrong regular expression, without its parser's picture of several lines.
fn regex_reason(error: &str) -> Option<String> {
    if error.contains("look-around") {
        return Some(LOOK_AROUND.to_owned());
    }
    if error.contains("lookarounds not supported") {
        return Some(
            "the regular expression has `^`, `$` or `\\b` inside, where they cannot be followed: anchors are \
             taken at its ends only"
                .to_owned(),
        );
    }
    if let Some(at) = error.find("regex parse error:") {
        let fault = error[at..]
            .split("\nerror: ")
            .nth(1)
            .unwrap_or("it has a wrong form");
        let fault = fault.lines().next().unwrap_or(fault);
        return Some(format!("the regular expression is wrong: {fault}"));
    }
    if error.contains("Unable to determine if regex is empty") {
        return Some(
            "`pattern`, `format` and the lengths together are too complex: give fewer of them, or a simpler \
             pattern"
                .to_owned(),
        );
    }
    error.contains("Regex is empty: ").then(|| {
        "no text has the `pattern`, the `format` and the length that it asks for together"
            .to_owned()
    })
}

fn schema_reason(error: &str) -> Option<String> {
    if let Some(keys) = error.strip_prefix("Unimplemented keys: ") {
        let keys: Vec<String> = serde_json::from_str(keys).ok()?;
        return Some(format!(
            "what `{}` says cannot be promised of an answer: leave it out",
            keys.join("` and `")
        ));
    }
    if let Some(format) = error.strip_prefix("Unknown format: ") {
        return Some(format!(
            "the format `{format}` is not known: use `pattern`, or leave it out"
        ));
    }
    if let Some(kind) = error.strip_prefix("Invalid type: ") {
        return Some(format!(
            "`{kind}` is no type: those are null, boolean, number, integer, string, array and object"
        ));
    }
    if let Some(rest) = error.strip_prefix("Expected ") {
        let (kind, rest) = rest.split_once(" for ")?;
        let (name, value) = rest.split_once(", got ")?;
        let name = name.trim_end_matches(" item").trim_matches('\'');
        let name = match name {
            "numeric const" => "const",
            name => name,
        };
        let kind = match kind {
            "f64" => "a number",
            "string" => "a string",
            "array" => "an array",
            "object" => "an object",
            _ => "an integer from 0 up",
        };
        return Some(format!("`{name}` must be {kind}, not {value}"));
    }
    if let Some(rest) = error.strip_prefix("Unsatisfiable schema: ") {
        return Some(format!("no answer can follow it: {rest}"));
    }
    if error.starts_with("oneOf constraints") {
        return Some(
            "the cases of `oneOf` may overlap, and that an answer follows just one of them cannot be promised: use \
             `anyOf`, or give the cases different types, or a required member with a `const` of its own in each"
                .to_owned(),
        );
    }
    if let Some(reason) = reference_reason(error) {
        return Some(reason);
    }
    if error.starts_with("min/maxProperties only supported") {
        return Some(
            "`minProperties` and `maxProperties` are followed only where all of `properties` are `required`"
                .to_owned(),
        );
    }
    if error.starts_with("Failed to generate regex for") || error.contains("multipleOf") {
        return Some(
            "`multipleOf`, or the range from `minimum` to `maximum`, has too many digits"
                .to_owned(),
        );
    }
    if let Some(rest) = error.strip_prefix("patternProperty regexes ") {
        return Some(format!(
            "the patterns of `patternProperties` must exclude each other: {rest}"
        ));
    }
    if error.starts_with("can't determine if patternProperty regexes") {
        return Some(
            "whether the patterns of `patternProperties` exclude each other is too hard to tell: use simpler ones"
                .to_owned(),
        );
    }
    error
        .starts_with("Schema intersection stack level")
        .then(|| {
            "its `allOf`, or `$ref` with other keywords beside it, are nested too deep".to_owned()
        })
}

fn reference_reason(error: &str) -> Option<String> {
    if error.starts_with("circular references with sibling keys") {
        return Some(
            "`$ref` leads back to itself with other keywords beside it: put those into the definition that it \
             leads to"
                .to_owned(),
        );
    }
    if error.starts_with("Reference segment") || error.starts_with("Definition not found") {
        return Some(format!("`$ref` leads nowhere{}", in_quotes(error)));
    }
    if error.starts_with("Only absolute $ref's") {
        return Some(format!(
            "`$ref` must lead into the schema itself, as \"#/$defs/NAME\" does{}",
            in_quotes(error)
        ));
    }
    error
        .starts_with("invalid digit found in string")
        .then(|| "`$ref` leads into an array, and does not name the item by its number".to_owned())
}

/// The caller's own name is the last part in single quotes.
fn in_quotes(error: &str) -> String {
    let named = error.rsplit('\'').nth(1);
    named.map(|named| format!(": {named}")).unwrap_or_default()
}

fn grammar_reason(error: &str) -> Option<String> {
    const LARGE: [&str; 12] = [
        "schema too large",
        "too big (limit for this grammar",
        "DNF too large",
        "fuel exhausted",
        "relevance check fuel",
        "exceeds the supported range",
        "too many states: ",
        "too many expressions constructed",
        "Too many items (limit",
        "lexer precomputation",
        "LexerTooComplex",
        "ParserTooComplex",
    ];
    if LARGE.iter().any(|large| error.contains(large)) {
        return Some(TOO_LARGE.to_owned());
    }
    if error.contains("consider making your grammar left-recursive") {
        return Some(
            "too many rules of it fit the same text: make it less ambiguous, or left-recursive"
                .to_owned(),
        );
    }
    if let Some((unknown, _)) = error.split_once("; following special tokens are available") {
        return Some(unknown.to_owned());
    }
    if error.starts_with("grammar must have either") {
        return Some("it is empty".to_owned());
    }
    if error == "NoExtensionBias" {
        return Some(
            "no answer can follow it: there is a place behind which no token of the model's vocabulary may come"
                .to_owned(),
        );
    }
    None
}
