//! Python's methods of strings that the template engine lacks, or has with fewer arguments.

use minijinja::value::{Kwargs, Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use crate::python::python_argument::optional;
use crate::python::python_iterable::unindexed_items;
use crate::python::python_text::is_printable;
use crate::python::template_cost::{SLOT_BYTES, charge, charge_items, weigh};

/// The widest padded text, so that a method cannot fill the memory.
const MAX_WIDTH: usize = 1000;

pub fn string_method(
    state: &State,
    text: &str,
    method: &str,
    args: &[Value],
) -> Option<Result<Value, Error>> {
    if let Err(error) = charge(state, text.len()) {
        return Some(Err(error));
    }
    Some(match method {
        "removeprefix" => {
            one_text(args).map(|prefix| Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            one_text(args).map(|suffix| Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => separator(args).map(|separator| match text.split_once(separator) {
            Some((before, after)) => triple([before, separator, after]),
            None => triple([text, "", ""]),
        }),
        "rpartition" => separator(args).map(|separator| match text.rsplit_once(separator) {
            Some((before, after)) => triple([before, separator, after]),
            None => triple(["", "", text]),
        }),
        "split" => split(state, text, args, false),
        "rsplit" => split(state, text, args, true),
        "title" => from_args(args).map(|()| Value::from(title(text))),
        "swapcase" => from_args(args).map(|()| Value::from(swapped_case(text))),
        "casefold" => from_args(args).map(|()| Value::from(text.to_lowercase().replace('ß', "ss"))),
        "splitlines" => splitlines(state, text, args),
        "join" => return check_joined(state, text, args).err().map(Err),
        "format" => return check_widths(state, text, args).err().map(Err),
        "startswith" | "endswith" => has_affix(text, args, method == "startswith"),
        "find" | "index" => place(text, args, method == "index", |text, part| text.find(part)),
        "rfind" | "rindex" => place(text, args, method == "rindex", |text, part| {
            text.rfind(part)
        }),
        "count" => within(text, args).map(|(_, range, part)| match (range, part) {
            (None, _) => Value::from(0),
            (Some(range), "") => Value::from(range.chars().count() + 1),
            (Some(range), part) => Value::from(range.matches(part).count()),
        }),
        "center" | "ljust" | "rjust" => filled_up(text, method, args),
        "zfill" => zero_filled(text, args),
        "expandtabs" => with_spaces(state, text, args),
        "isdecimal" => from_args(args).map(|()| Value::from(is_decimal(text))),
        "istitle" => from_args(args).map(|()| Value::from(is_title(text))),
        "isidentifier" => from_args(args).map(|()| Value::from(is_identifier(text))),
        "isprintable" => from_args(args).map(|()| Value::from(text.chars().all(is_printable))),
        _ => return None,
    })
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// Charges for the text of `text.join(items)`. Items that are no strings are an error.
fn check_joined(state: &State, text: &str, args: &[Value]) -> Result<(), Error> {
    let Some(items) = args.first() else {
        return Ok(());
    };
    if let Some(items) = unindexed_items(items) {
        let num_bytes: usize = items
            .iter()
            .map(|item| text.len() + item.as_str().map_or(0, str::len))
            .sum();
        return charge(state, num_bytes);
    }
    for item in items.try_iter()? {
        let Some(item) = item.as_str() else {
            return Err(invalid("join: every item must be a string"));
        };
        charge(state, SLOT_BYTES + text.len() + item.len())?;
    }
    Ok(())
}

/// Charges for the text of `text.format(…)`, and refuses wide fields.
fn check_widths(state: &State, text: &str, args: &[Value]) -> Result<(), Error> {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit());
    let is_wide =
        |digits: &str| !digits.is_empty() && digits.parse().unwrap_or(i64::MAX) > MAX_WIDTH as i64;
    if numbers.any(is_wide) {
        return Err(invalid(format!(
            "a width of the format is more than {MAX_WIDTH}"
        )));
    }
    let mut num_bytes = MAX_WIDTH;
    for arg in args {
        num_bytes += weigh(state, arg)?;
    }
    charge(state, text.matches('{').count().saturating_mul(num_bytes))
}

fn one_text(args: &[Value]) -> Result<&str, Error> {
    from_args(args).map(|(text,): (&str,)| text)
}

fn separator(args: &[Value]) -> Result<&str, Error> {
    match one_text(args)? {
        "" => Err(invalid("the separator is empty")),
        separator => Ok(separator),
    }
}

fn triple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

/// `split(sep=None, maxsplit=-1)`, or the same from the end.
fn split(state: &State, text: &str, args: &[Value], is_from_end: bool) -> Result<Value, Error> {
    let (separator, limit, named): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = optional(separator, &named, "sep")?;
    let limit = optional(limit, &named, "maxsplit")?;
    named.assert_all_used()?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    let num_parts = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let separator = separator.filter(|separator| !separator.is_none());
    let num_separators = match separator.as_ref().map(Value::as_str) {
        None => text.matches(is_space).count(),
        Some(Some(separator)) if !separator.is_empty() => text.matches(separator).count(),
        Some(_) => 0,
    };
    charge_items(state, num_separators.min(num_parts))?;
    let parts: Vec<&str> = match &separator {
        None if is_from_end => reversed(words_from_end(text, num_parts)),
        None => words(text, num_parts),
        Some(separator) => match separator.as_str() {
            None => return Err(invalid("the separator must be a string")),
            Some("") => return Err(invalid("the separator is empty")),
            Some(separator) if is_from_end => {
                reversed(text.rsplitn(num_parts, separator).collect())
            }
            Some(separator) => text.splitn(num_parts, separator).collect(),
        },
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

fn reversed(mut parts: Vec<&str>) -> Vec<&str> {
    parts.reverse();
    parts
}

fn words(text: &str, num_parts: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = match words.len() + 1 < num_parts {
            true => rest.find(is_space).unwrap_or(rest.len()),
            false => rest.len(),
        };
        words.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    words
}

fn words_from_end(text: &str, num_parts: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let start = match words.len() + 1 < num_parts {
            true => { rest.char_indices().rfind(|(_, c)| is_space(*c)) }
                .map_or(0, |(at, c)| at + c.len_utf8()),
            false => 0,
        };
        words.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    words
}

/// Python's white space: Unicode's, and four separators of ASCII.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Makes each run of letters begin with an upper-case letter, also after an apostrophe.
fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_within = false;
    for c in text.chars() {
        let is_cased = c.is_lowercase() || c.is_uppercase();
        match is_within {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        is_within = is_cased;
    }
    out
}

fn swapped_case(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_uppercase() {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
    }
    out
}

fn splitlines(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    charge_items(state, text.matches(LINE_ENDS).count())?;
    let (keeps, named): (Option<bool>, Kwargs) = from_args(args)?;
    let keeps = optional(keeps, &named, "keepends")?.unwrap_or(false);
    named.assert_all_used()?;
    let line = |(line, end): (&str, &str)| match keeps {
        true => Value::from(format!("{line}{end}")),
        false => Value::from(line),
    };
    Ok(lines(text).into_iter().map(line).collect())
}

pub const LINE_ENDS: [char; 10] = [
    '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}',
];

/// The lines of a text and the end of each, as Python's `str.splitlines` finds them.
pub fn lines(text: &str) -> Vec<(&str, &str)> {
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.find(LINE_ENDS) {
        let behind = &rest[end..];
        let len = match behind.starts_with("\r\n") {
            true => 2,
            false => behind.chars().next().map_or(0, char::len_utf8),
        };
        lines.push((&rest[..end], &behind[..len]));
        rest = &behind[len..];
    }
    if !rest.is_empty() {
        lines.push((rest, ""));
    }
    lines
}

/// The number of characters before the range `start..end`, and the text of the range. Negative indices count from the
/// end. The text is `None` if the range would begin after its end.
fn ranged(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, Option<&str>) {
    let len = text.chars().count();
    let place = |at: i64| {
        let magnitude = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
        match at < 0 {
            true => len.saturating_sub(magnitude),
            false => magnitude,
        }
    };
    let (start, end) = (start.map_or(0, place), end.map_or(len, place).min(len));
    if start > end {
        return (start, None);
    }
    let byte = |at| text.char_indices().nth(at).map_or(text.len(), |(at, _)| at);
    (start, Some(&text[byte(start)..byte(end)]))
}

/// The arguments `part`, `start` and `end`: the begin of the range, the range, and the part.
fn within<'t>(
    text: &'t str,
    args: &'t [Value],
) -> Result<(usize, Option<&'t str>, &'t str), Error> {
    let (part, start, end): (&str, Option<i64>, Option<i64>) = from_args(args)?;
    let (start, range) = ranged(text, start, end);
    Ok((start, range, part))
}

fn place(
    text: &str,
    args: &[Value],
    must_be: bool,
    find: fn(&str, &str) -> Option<usize>,
) -> Result<Value, Error> {
    let (start, range, part) = within(text, args)?;
    let at = range.and_then(|range| Some(range[..find(range, part)?].chars().count() + start));
    match at {
        None if must_be => Err(invalid("it is not in the string")),
        None => Ok(Value::from(-1)),
        Some(at) => Ok(Value::from(at)),
    }
}

fn has_affix(text: &str, args: &[Value], is_prefix: bool) -> Result<Value, Error> {
    let (affix, start, end): (&Value, Option<i64>, Option<i64>) = from_args(args)?;
    let (_, range) = ranged(text, start, end);
    let has = |affix: &Value| match affix.as_str() {
        None => Err(invalid("it must be a string or a tuple of strings")),
        Some(affix) => Ok(range.is_some_and(|range| match is_prefix {
            true => range.starts_with(affix),
            false => range.ends_with(affix),
        })),
    };
    if !affix.is_tuple() {
        return has(affix).map(Value::from);
    }
    for affix in affix.try_iter()? {
        if has(&affix)? {
            return Ok(Value::from(true));
        }
    }
    Ok(Value::from(false))
}

fn bounded(width: i64) -> Result<usize, Error> {
    let width = usize::try_from(width.max(0)).unwrap_or(usize::MAX);
    match width > MAX_WIDTH {
        true => Err(invalid(format!("a width is more than {MAX_WIDTH}"))),
        false => Ok(width),
    }
}

fn filled_up(text: &str, method: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, filler): (i64, Option<&str>) = from_args(args)?;
    let filler = filler.unwrap_or(" ");
    if filler.chars().count() != 1 {
        return Err(invalid("the filler must be one character"));
    }
    let width = bounded(width)?;
    let missing = width.saturating_sub(text.chars().count());
    let before = match method {
        "ljust" => 0,
        "rjust" => missing,
        // The larger half of an odd number is before the text if the width is odd, too.
        _ => missing / 2 + (missing & width & 1),
    };
    let (before, after) = (filler.repeat(before), filler.repeat(missing - before));
    Ok(Value::from(format!("{before}{text}{after}")))
}

/// Pads with zeros, after a sign.
fn zero_filled(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (width,): (i64,) = from_args(args)?;
    let missing = bounded(width)?.saturating_sub(text.chars().count());
    let (sign, digits) = text.split_at(usize::from(text.starts_with(['-', '+'])));
    Ok(Value::from(format!(
        "{sign}{}{digits}",
        "0".repeat(missing)
    )))
}

/// Replaces each tab by spaces up to the next multiple of the size.
fn with_spaces(state: &State, text: &str, args: &[Value]) -> Result<Value, Error> {
    let (size, named): (Option<i64>, Kwargs) = from_args(args)?;
    let size = optional(size, &named, "tabsize")?.unwrap_or(8);
    named.assert_all_used()?;
    let size = bounded(size)?;
    charge(state, text.matches('\t').count().saturating_mul(size))?;
    let mut out = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let num_spaces = match size {
                    0 => 0,
                    size => size - column % size,
                };
                out.push_str(&" ".repeat(num_spaces));
                column += num_spaces;
            }
            c => {
                out.push(c);
                column = if matches!(c, '\n' | '\r') {
                    0
                } else {
                    column + 1
                };
            }
        }
    }
    Ok(Value::from(out))
}

/// Whether all characters are decimal digits of any script. Rust's own test is for numbers, which include superscripts
/// and fractions.
fn is_decimal(text: &str) -> bool {
    let is_digit = |c: char| {
        let has_other_form =
            matches!(u32::from(c), 0xB2..=0xBE | 0x2070..=0x218B | 0x2460..=0x24FF);
        c.is_ascii_digit() || c.is_numeric() && !has_other_form && !c.is_alphabetic()
    };
    !text.is_empty() && text.chars().all(is_digit)
}

/// Whether every run of letters begins with an upper-case letter and has no other.
fn is_title(text: &str) -> bool {
    let mut is_within = false;
    let mut has_letter = false;
    for c in text.chars() {
        let is_cased = c.is_uppercase() || c.is_lowercase();
        if is_cased && c.is_uppercase() == is_within {
            return false;
        }
        is_within = is_cased;
        has_letter |= is_cased;
    }
    has_letter
}

fn is_identifier(text: &str) -> bool {
    let mut chars = text.chars();
    let begins = chars.next().is_some_and(|c| c.is_alphabetic() || c == '_');
    begins && chars.all(|c| c.is_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::python::python_text::python_str;

    fn call(text: &str, method: &str, args: &[Value]) -> Option<String> {
        let environment = minijinja::Environment::new();
        let state = environment.empty_state();
        let result = string_method(&state, text, method, args).expect("it is a method");
        result.ok().map(|value| python_str(&value))
    }

    /// Expected values are Python 3.11's.
    #[test]
    fn methods_are_pythons() {
        let none = || Value::from(());
        let cases: &[(&str, &str, &[Value], &str)] = &[
            (" a  b c ", "split", &[], "['a', 'b', 'c']"),
            (" a  b c ", "split", &[none(), 1.into()], "['a', 'b c ']"),
            (" a  b c ", "rsplit", &[none(), 1.into()], "[' a  b', 'c']"),
            ("a,b,c", "rsplit", &[",".into(), 1.into()], "['a,b', 'c']"),
            ("", "split", &[",".into()], "['']"),
            ("", "split", &[], "[]"),
            ("äbcab", "find", &["b".into(), 2.into()], "4"),
            ("äbcab", "rfind", &["b".into(), 0.into(), (-1).into()], "1"),
            ("äbcab", "find", &["".into(), 9.into()], "-1"),
            ("abc", "count", &["".into()], "4"),
            ("abc", "startswith", &["b".into(), 1.into()], "True"),
            ("abc", "center", &[6.into()], " abc  "),
            ("abcd", "center", &[7.into(), "*".into()], "**abcd*"),
            ("-4", "zfill", &[4.into()], "-004"),
            ("a\tb\n\tc", "expandtabs", &[4.into()], "a   b\n    c"),
            ("Ab Cd", "istitle", &[], "True"),
            ("AB", "istitle", &[], "False"),
            ("1a", "isidentifier", &[], "False"),
            ("²", "isdecimal", &[], "False"),
            ("٣", "isdecimal", &[], "True"),
        ];
        for (text, method, args, expected) in cases {
            let found = call(text, method, args);
            assert_eq!(
                found.as_deref(),
                Some(*expected),
                "{text:?}.{method}{args:?}"
            );
        }
        for (method, args) in [
            ("split", vec![Value::from("")]),
            ("index", vec!["z".into()]),
            ("startswith", vec![Value::from(vec!["a"])]),
            ("center", vec![1_000_000.into()]),
            ("ljust", vec![5.into(), "ab".into()]),
        ] {
            assert_eq!(call("abc", method, &args), None, "{method}");
        }
    }
}
