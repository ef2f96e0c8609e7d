//! Python's `str` and `repr` of values, where the template engine prints them differently: floats with an exponent, and
//! unprintable characters in lists.

use std::borrow::Cow;
use std::fmt::Write;

use minijinja::value::ValueKind;
use minijinja::{Error, Output, State, Value};

use crate::python::python_iterable::iterable_str;
use crate::python::python_number::python_float;
use crate::python::template_cost::{MAX_DEPTH, weigh};

/// The text of `{{ value }}`.
pub fn print(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    out.write_str(&text_of(state, value)?).map_err(Error::from)
}

/// Python's `str` of a value. Charges for the values in a list or mapping.
pub fn text_of<'v>(state: &State, value: &'v Value) -> Result<Cow<'v, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.into());
    }
    weigh(state, value)?;
    Ok(python_str(value).into())
}

pub fn python_str(value: &Value) -> String {
    let mut text = String::new();
    match value.as_str() {
        Some(string) => text.push_str(string),
        None if value.is_undefined() => {}
        None => write_repr(value, 0, &mut text),
    }
    text
}

pub fn python_repr(value: &Value) -> String {
    let mut text = String::new();
    write_repr(value, 0, &mut text);
    text
}

fn write_repr(value: &Value, depth: usize, out: &mut String) {
    match value.kind() {
        ValueKind::String => write_string(value.as_str().unwrap_or_default(), out),
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::Number if !value.is_integer() => write_float(value, out),
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if depth > MAX_DEPTH => {
            out.push_str("...");
        }
        ValueKind::Seq | ValueKind::Iterable => {
            if let Some(text) = iterable_str(value) {
                out.push_str(&text);
                return;
            }
            let Ok(items) = value.try_iter() else {
                let _ = write!(out, "{value}");
                return;
            };
            let (open, close) = match value.is_tuple() {
                true => ('(', ')'),
                false => ('[', ']'),
            };
            out.push(open);
            let mut num_items = 0;
            for item in items {
                if num_items > 0 {
                    out.push_str(", ");
                }
                write_repr(&item, depth + 1, out);
                num_items += 1;
            }
            if value.is_tuple() && num_items == 1 {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            let Ok(keys) = value.try_iter() else {
                let _ = write!(out, "{value}");
                return;
            };
            out.push('{');
            for (index, key) in keys.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                write_repr(&key, depth + 1, out);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), depth + 1, out);
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

fn write_float(value: &Value, out: &mut String) {
    match f64::try_from(value.clone()) {
        Ok(number) if number.is_finite() => out.push_str(&python_float(number)),
        Ok(number) if number.is_nan() => out.push_str("nan"),
        _ => {
            let _ = write!(out, "{value}");
        }
    }
}

fn write_string(text: &str, out: &mut String) {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if is_printable(c) => out.push(c),
            c => {
                let code = u32::from(c);
                let _ = match code {
                    0..=0xFF => write!(out, "\\x{code:02x}"),
                    0x100..=0xFFFF => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable`: neither a separator other than the space, nor a control or format character. Rust
/// escapes control and format characters, and also combining characters, which Python prints.
pub fn is_printable(c: char) -> bool {
    if c == ' ' || c.is_ascii_graphic() {
        return true;
    }
    if c.is_whitespace() || c.is_control() {
        return false;
    }
    let is_escaped = c.escape_debug().len() > 1;
    !is_escaped || is_mark(c)
}

/// Whether `escape_debug` escapes a character only because it combines with the previous one. After another character,
/// `escape_debug` escapes it only if it is not printable.
fn is_mark(c: char) -> bool {
    let mut text = String::from("a");
    text.push(c);
    text.escape_debug().count() == 2
}
