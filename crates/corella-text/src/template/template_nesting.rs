//! Puts a check around each list, mapping and tuple that a template makes of other values, and around each new member of
//! a namespace (`template_cost`).

use crate::python::template_cost::{MEMBER, NESTED};
use crate::template::template_expression::{Token, is_name};

/// Words after which a bracket begins a value. After any other name, a bracket begins arguments or an index.
const KEYWORDS: [&str; 14] = [
    "in",
    "not",
    "and",
    "or",
    "if",
    "else",
    "elif",
    "is",
    "for",
    "set",
    "with",
    "print",
    "do",
    "recursive",
];

/// A text to insert, and the index of the byte before which it is inserted.
type Insertion = (usize, String);

/// The text of a tag's tokens with checks. `None` if the tag needs no checks.
pub fn checked(inner: &str, tokens: &[Token<'_>], is_statement: bool) -> Option<String> {
    let keyword = match is_statement {
        true => tokens.first()?.text,
        false => "",
    };
    let behind = |text: &str| Some(outside_brackets(tokens, text)? + 1);
    // Targets of assignments are no values.
    let first = match keyword {
        "set" => behind("=")?,
        "for" => behind("in")?,
        _ => usize::from(is_statement),
    };
    let value = tokens.get(first)?;
    let mut insertions = literals(tokens, first);
    if keyword == "set" {
        let (start, end) = (value.start, end_of(tokens.last()?));
        let mut surround = |open: String, close: &str| {
            insertions.insert(0, (start, open));
            insertions.push((end, close.to_owned()));
        };
        if has_comma(&tokens[first..]) {
            surround(format!("{NESTED}(("), "))");
        }
        if tokens[1..first].iter().any(|token| token.text == ".") {
            surround(format!("{MEMBER}("), ")");
        }
    }
    if insertions.is_empty() {
        return None;
    }
    insertions.sort_by_key(|(at, _)| *at);
    let mut out = String::with_capacity(inner.len() + insertions.len() * 16);
    let mut done = 0;
    for (at, text) in insertions {
        out.push_str(&inner[done..at]);
        out.push_str(&text);
        done = at;
    }
    out.push_str(&inner[done..]);
    Some(out)
}

/// The checks around lists, mappings and tuples of other values.
fn literals(tokens: &[Token<'_>], first: usize) -> Vec<Insertion> {
    let mut insertions = Vec::new();
    let mut open = Vec::new();
    for at in first..tokens.len() {
        match tokens[at].text {
            "(" | "[" | "{" => open.push(at),
            ")" | "]" | "}" => {
                let Some(begin) = open.pop() else { continue };
                let inner = &tokens[begin + 1..at];
                let is_value = begins_value(&tokens[..begin]);
                let is_tuple = tokens[begin].text == "(";
                if is_value && !is_constant(inner) && (!is_tuple || has_comma(inner)) {
                    insertions.push((tokens[begin].start, format!("{NESTED}(")));
                    insertions.push((end_of(&tokens[at]), ")".to_owned()));
                }
            }
            _ => {}
        }
    }
    insertions
}

/// Whether a bracket after these tokens begins a value.
fn begins_value(before: &[Token<'_>]) -> bool {
    let texts: Vec<&str> = before
        .iter()
        .rev()
        .take(3)
        .map(|token| token.text)
        .collect();
    match texts.as_slice() {
        // The argument of a test.
        ["in", "is", ..] | ["in", "not", "is"] => false,
        [last, ..] if is_name(last) => KEYWORDS.contains(last),
        [last, ..] => {
            let is_value_end = |c: char| c.is_ascii_digit() || ")]}'\"".contains(c);
            !last.ends_with(is_value_end)
        }
        [] => true,
    }
}

fn is_constant(tokens: &[Token<'_>]) -> bool {
    const CONSTANTS: [&str; 6] = ["true", "false", "none", "True", "False", "None"];
    let is_constant = |token: &Token| !is_name(token.text) || CONSTANTS.contains(&token.text);
    tokens.iter().all(is_constant)
}

/// The place of the first token of this text outside of brackets.
fn outside_brackets(tokens: &[Token<'_>], text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    tokens.iter().position(|token| {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && token.text == text
    })
}

fn has_comma(tokens: &[Token<'_>]) -> bool {
    outside_brackets(tokens, ",").is_some()
}

fn end_of(token: &Token<'_>) -> usize {
    token.start + token.text.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::template_expression::tokens_until;

    fn new(tag: &str, is_statement: bool) -> Option<String> {
        let text = format!("{tag} %}}");
        let (tokens, _) = tokens_until(&text, "%}")?;
        checked(tag, &tokens, is_statement)
    }

    #[test]
    fn values_of_other_values_are_checked() {
        for (tag, expected) in [
            ("set x = [a]", "set x = corella_nested([a])"),
            ("set x = a, b", "set x = corella_nested((a, b))"),
            ("set n.x = a", "set n.x = corella_member(a)"),
            (
                "set n.x = [a], 1",
                "set n.x = corella_member(corella_nested((corella_nested([a]), 1)))",
            ),
            (
                "for (k, v) in [a, {'b': c['d']}]",
                "for (k, v) in corella_nested([a, corella_nested({'b': c['d']})])",
            ),
            ("if a in (b, c)", "if a in corella_nested((b, c))"),
            ("with a = [b]", "with a = corella_nested([b])"),
            ("call(x) f([x])", "call(x) f(corella_nested([x]))"),
        ] {
            assert_eq!(new(tag, true).as_deref(), Some(expected), "{tag}");
        }
        let found = new("f(a, b) + [a]", false);
        assert_eq!(found.as_deref(), Some("f(a, b) + corella_nested([a])"));
    }

    #[test]
    fn other_brackets_stay() {
        for tag in [
            "set x = ['a', -1, {'b': none}, (1, 2)]",
            "set x = f(a, b)[c](d, e)",
            "if a is in [b, c] or a is not in (b, c)",
            "for x in y",
            "set x",
            "macro f(a, b=[])",
            "call(a, b) f(a)",
            "set x | f(a=b, c=d)",
            "set (a, b) = c",
            "if (a or b) and 'c'[a:b]",
        ] {
            assert_eq!(new(tag, true), None, "{tag}");
        }
    }
}
