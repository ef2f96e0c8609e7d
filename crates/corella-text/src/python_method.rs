//! Python's methods of strings: those of minijinja-contrib, and more that templates use.

use minijinja::value::{Tuple, from_args};
use minijinja::{Error, ErrorKind, State, Value};

/// Calls a method of a value. The engine asks for those that it does not know itself.
pub fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match method {
        "removeprefix" => {
            one_text(args).map(|prefix| Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            one_text(args).map(|suffix| Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" => one_text(args).map(|separator| match text.split_once(separator) {
            Some((before, after)) => triple([before, separator, after]),
            None => triple([text, "", ""]),
        }),
        "rpartition" => one_text(args).map(|separator| match text.rsplit_once(separator) {
            Some((before, after)) => triple([before, separator, after]),
            None => triple(["", "", text]),
        }),
        "rsplit" if !args.is_empty() && !args[0].is_none() => rsplit(text, args),
        "title" => from_args(args).map(|()| Value::from(title(text))),
        "swapcase" => from_args(args).map(|()| Value::from(swapped_case(text))),
        "splitlines" => splitlines(text, args),
        "join" => {
            let not_text = { args.first() }
                .and_then(|items| items.try_iter().ok())
                .is_some_and(|mut items| items.any(|item| item.as_str().is_none()));
            return not_text.then(|| Err(invalid("join: every item must be a string")));
        }
        _ => return None,
    })
}

fn invalid(reason: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn one_text(args: &[Value]) -> Result<&str, Error> {
    from_args(args).map(|(text,): (&str,)| text)
}

fn triple(parts: [&str; 3]) -> Value {
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit): (&str, Option<i64>) = from_args(args)?;
    let limit = limit.and_then(|limit| usize::try_from(limit).ok());
    let limit = limit.map_or(usize::MAX, |limit| limit.saturating_add(1));
    let parts: Vec<&str> = text.rsplitn(limit, separator).collect();
    Ok(parts.into_iter().rev().map(Value::from).collect())
}

/// Each run of letters begins with an upper-case one, behind an apostrophe too.
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

fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keeps,): (Option<bool>,) = from_args(args)?;
    let keeps = keeps.unwrap_or(false);
    let line = |(line, end): (&str, &str)| match keeps {
        true => Value::from(format!("{line}{end}")),
        false => Value::from(line),
    };
    Ok(lines(text).into_iter().map(line).collect())
}

/// The lines of a text with what ends each, as Python's `str.splitlines` finds them.
pub fn lines(text: &str) -> Vec<(&str, &str)> {
    const ENDS: [char; 10] = [
        '\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}',
        '\u{2029}',
    ];
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.find(ENDS) {
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
