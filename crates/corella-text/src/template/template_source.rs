//! Rewrites the source of a chat template where the template engine's output would differ from Jinja2's:
//!
//! * `{% generation %}`, which marks the assistant's tokens for training, prints its body.
//! * The line break after `{% raw %}` stays.
//! * `for` does not treat `none` as an empty list, and recognises the last character of a string.
//! * Some operators become function calls (`template_expression`).
//! * Values made of other values are checked (`template_nesting`).

use crate::template::template_expression::{
    Token, is_name, rewritten, rewritten_tuple, tokens_until,
};
use crate::template::template_nesting::checked;

/// The filter around the iterable of a `for`.
pub const ITERATED: &str = "corella_iterated";

/// The limits of a source's size, of the tokens in a tag, and of the number of `elif`, so that neither this module nor
/// the engine needs much time or stack for a template. Templates of models have some ten thousand bytes, and some
/// hundred tokens in a tag.
const MAX_BYTES: usize = 1 << 20;
const MAX_TOKENS: usize = 1000;
const MAX_ELIFS: usize = 500;

/// The counts of a source that are limited.
#[derive(Default)]
struct Extent {
    max_tokens: usize,
    num_elifs: usize,
}

/// The rewritten source, or the reason for which a template is refused.
pub fn rewritten_source(source: &str) -> Result<String, String> {
    // Jinja2 also reads every line break as `\n`.
    let source = &source.replace("\r\n", "\n").replace('\r', "\n");
    if source.len() > MAX_BYTES {
        return Err(format!("it has more than {MAX_BYTES} bytes"));
    }
    let mut extent = Extent::default();
    let checked = with_tags(source, |tag, out| push_checked(tag, out, &mut extent));
    if extent.max_tokens > MAX_TOKENS {
        return Err(format!("a tag has more than {MAX_TOKENS} words and signs"));
    }
    if extent.num_elifs > MAX_ELIFS {
        return Err(format!("it has more than {MAX_ELIFS} elif"));
    }
    Ok(with_tags(&checked, |tag, out| match &tag[..2] {
        "{%" => push_statement(tag, out),
        _ => push_expression(tag, out),
    }))
}

/// Copies a source. `push` writes each tag that is not a comment, and returns its length, or `None` if the tag has no
/// end.
fn with_tags(source: &str, mut push: impl FnMut(&str, &mut String) -> Option<usize>) -> String {
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut rest = source;
    while let Some(open) = next_tag(rest) {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        let len = match &rest[..2] {
            "{#" => rest.find("#}").map(|end| end + 2),
            _ => push(rest, &mut out),
        };
        // The engine reports an unclosed tag.
        let Some(len) = len else { break };
        if rest.starts_with("{#") {
            out.push_str(&rest[..len]);
        }
        rest = &rest[len..];
    }
    out.push_str(rest);
    out
}

/// Writes a tag with checks of the values that it makes (`template_nesting`), and adds its counts to `extent`.
fn push_checked(tag: &str, out: &mut String, extent: &mut Extent) -> Option<usize> {
    let open = opening(tag);
    let inner = &tag[open.len()..];
    let is_statement = tag.starts_with("{%");
    let (tokens, end) = tokens_until(inner, if is_statement { "%}" } else { "}}" })?;
    let len = open.len() + end;
    extent.max_tokens = extent.max_tokens.max(tokens.len());
    if tokens.len() > MAX_TOKENS {
        return Some(len);
    }
    let is_elif = is_statement && tokens.first().is_some_and(|token| token.text == "elif");
    extent.num_elifs += usize::from(is_elif);
    if is_statement && tokens.len() == 1 && tokens[0].text == "raw" {
        let end = raw_end(tag, len)?;
        out.push_str(&tag[..end]);
        return Some(end);
    }
    match checked(&inner[..end], &tokens, is_statement) {
        Some(checked) => {
            out.push_str(open);
            out.push_str(&checked);
        }
        None => out.push_str(&tag[..len]),
    }
    Some(len)
}

fn next_tag(text: &str) -> Option<usize> {
    let mut braces = text.match_indices('{').map(|(at, _)| at);
    braces.find(|at| text[at + 1..].starts_with(['{', '%', '#']))
}

/// The text of a tag up to its first token, with the sign that trims white space.
fn opening(tag: &str) -> &str {
    let is_sign = tag[2..].starts_with(['-', '+']);
    &tag[..if is_sign { 3 } else { 2 }]
}

fn push_expression(tag: &str, out: &mut String) -> Option<usize> {
    let open = opening(tag);
    let (tokens, end) = tokens_until(&tag[open.len()..], "}}")?;
    let len = open.len() + end;
    let inner = &tag[open.len()..];
    match (rewritten_tuple(&tokens), tokens.last()) {
        (Some(expression), Some(last)) => {
            let close = last.start + last.text.len();
            out.push_str(&format!("{open} {expression}{}", &inner[close..end]));
        }
        _ => out.push_str(&tag[..len]),
    }
    Some(len)
}

fn push_statement(tag: &str, out: &mut String) -> Option<usize> {
    let open = opening(tag);
    let inner = &tag[open.len()..];
    let (tokens, end) = tokens_until(inner, "%}")?;
    let len = open.len() + end;
    let Some((keyword, rest)) = tokens.split_first() else {
        out.push_str(&tag[..len]);
        return Some(len);
    };
    let new = match keyword.text {
        "raw" if rest.is_empty() => return push_raw(tag, len, out),
        "generation" if rest.is_empty() => Some("if true".to_owned()),
        "endgeneration" if rest.is_empty() => Some("endif".to_owned()),
        "if" | "elif" => rewritten(rest).map(|condition| format!("{} {condition}", keyword.text)),
        "for" => rewritten_for(inner, rest),
        "set" => rewritten_set(inner, rest),
        _ => None,
    };
    match new {
        Some(new) => {
            let last = rest.last().unwrap_or(keyword);
            let close = last.start + last.text.len();
            out.push_str(&format!("{open} {new}{}", &inner[close..end]));
        }
        None => out.push_str(&tag[..len]),
    }
    Some(len)
}

/// The place of the tag that ends a raw block. `len` is the length of the tag that begins the block.
fn raw_end(tag: &str, len: usize) -> Option<usize> {
    tag[len..].match_indices("{%").find_map(|(at, _)| {
        let behind = &tag[len + at + 2..];
        let behind = behind.strip_prefix(['-', '+']).unwrap_or(behind);
        behind
            .trim_start()
            .starts_with("endraw")
            .then_some(len + at)
    })
}

/// Copies a raw block. The engine would drop a line break after the tag.
fn push_raw(tag: &str, len: usize, out: &mut String) -> Option<usize> {
    let end = raw_end(tag, len)?;
    out.push_str(&tag[..len]);
    let body = &tag[len..end];
    if body.starts_with('\n') && !tag[..len].ends_with("-%}") {
        out.push('\n');
    }
    out.push_str(body);
    let close = tag[end..].find("%}")? + 2;
    out.push_str(&tag[end..end + close]);
    Some(end + close)
}

/// `for TARGETS in ITEMS [if CONDITION] [recursive]`
fn rewritten_for(inner: &str, rest: &[Token<'_>]) -> Option<String> {
    let place_of = |names: &[&str], from: usize| {
        let mut depth = 0_usize;
        (from..rest.len()).find(|&at| {
            match rest[at].text {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            depth == 0 && names.contains(&rest[at].text)
        })
    };
    let start = place_of(&["in"], 0)?;
    let end = place_of(&["if", "recursive"], start + 1).unwrap_or(rest.len());
    let (targets, items) = (slice(inner, &rest[..start])?, &rest[start + 1..end]);
    let items = match rewritten_tuple(items) {
        Some(items) => items,
        None => slice(inner, items)?.to_owned(),
    };
    let mut out = format!("for {targets} in ({items})|{ITERATED}");
    let (condition, is_recursive) = match rest[end..].split_last() {
        Some((last, before)) if last.text == "recursive" => (before, true),
        _ => (&rest[end..], false),
    };
    if let Some((_, condition)) = condition.split_first() {
        let condition = match rewritten(condition) {
            Some(condition) => condition,
            None => slice(inner, condition)?.to_owned(),
        };
        out.push_str(&format!(" if {condition}"));
    }
    if is_recursive {
        out.push_str(" recursive");
    }
    Some(out)
}

fn rewritten_set(inner: &str, rest: &[Token<'_>]) -> Option<String> {
    let equals = rest.iter().position(|token| token.text == "=")?;
    let is_target =
        |token: &Token| is_name(token.text) || [".", ",", "(", ")"].contains(&token.text);
    if !rest[..equals].iter().all(is_target) {
        return None;
    }
    let value = rewritten_tuple(&rest[equals + 1..])?;
    Some(format!("set {} = {value}", slice(inner, &rest[..equals])?))
}

/// The original text of these tokens.
fn slice<'s>(inner: &'s str, tokens: &[Token<'s>]) -> Option<&'s str> {
    let (first, last) = (tokens.first()?, tokens.last()?);
    Some(&inner[first.start..last.start + last.text.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_needs_it_is_rewritten() {
        for same in [
            "",
            "a {{ b }} c",
            "{{- b.c['}}'] | d(e=1) -}}\n",
            "{% if a is not defined and b %}{% endif %}",
            "{% set x = f(a, b=[1]) %}",
            "{# {{ a ~ b }} {% for #}",
            "{% raw %}{{ a ~ b }}{% endraw %}",
            "{{ 'a ~ b % c' }}",
            "{{ a ~ ",
            "{% for",
            "{%}",
            "{{ a ~ }}",
        ] {
            assert_eq!(rewritten_source(same).as_deref(), Ok(same));
        }
        for (source, expected) in [
            (
                "{%- generation -%}a{% endgeneration %}",
                "{%- if true -%}a{% endif %}",
            ),
            (
                "{% raw %}\na{%- endraw %}\n",
                "{% raw %}\n\na{%- endraw %}\n",
            ),
            ("{% raw -%}\na{% endraw %}", "{% raw -%}\na{% endraw %}"),
            (
                "{%- for a, b in c.items() if d(1, 2) recursive -%}",
                "{%- for a, b in (c.items())|corella_iterated if d(1, 2) recursive -%}",
            ),
            (
                "{% for a in [1, 'if'] %}",
                "{% for a in ([1, 'if'])|corella_iterated %}",
            ),
        ] {
            assert_eq!(rewritten_source(source).as_deref(), Ok(expected));
        }
    }
}
