//! Tests, filters and functions of Jinja2 that the template engine has with other answers, or not at all.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::globals::{cycler, joiner};

pub fn add_builtins(environment: &mut Environment<'static>) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("wordcount", wordcount);
    environment.add_function("joiner", joiner);
    environment.add_function("cycler", |items: Rest<Value>| cycler(items.0));
}

/// Whether Python's `iter` takes it: `none` it does not, and a name without a value it does.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.is_undefined() || value.try_iter().is_ok())
}

/// Whether it has a length and items: strings and mappings, too.
fn is_sequence(value: &Value) -> bool {
    let kinds = [
        ValueKind::String,
        ValueKind::Seq,
        ValueKind::Map,
        ValueKind::Undefined,
    ];
    kinds.contains(&value.kind())
}

/// A whole number, or the default, 0, where Python's `int` and `float` fail. A name without a value is an error.
fn int(
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    check_defined(value)?;
    let default = default_of(default, 0.into(), &named)?;
    let base = match base {
        Some(base) => base,
        None => named.get::<Option<u32>>("base")?.unwrap_or(10),
    };
    named.assert_all_used()?;
    if let Some(whole) = { value.as_str() }.and_then(|text| whole_number(text, base)) {
        return Ok(Value::from(whole));
    }
    if value.is_integer() {
        return Ok(value.clone());
    }
    let number = number_of(value).filter(|number| number.is_finite());
    Ok(number.map_or(default, |number| Value::from(number as i128)))
}

/// A number, or the default, 0.0, where Python's `float` fails.
fn float(value: &Value, default: Option<Value>, named: Kwargs) -> Result<Value, Error> {
    check_defined(value)?;
    let default = default_of(default, 0.0.into(), &named)?;
    named.assert_all_used()?;
    Ok(number_of(value).map_or(default, Value::from))
}

fn check_defined(value: &Value) -> Result<(), Error> {
    match value.is_undefined() {
        true => Err(Error::from(ErrorKind::UndefinedError)),
        false => Ok(()),
    }
}

fn default_of(given: Option<Value>, usual: Value, named: &Kwargs) -> Result<Value, Error> {
    match given {
        Some(given) => Ok(given),
        None => Ok(named.get::<Option<Value>>("default")?.unwrap_or(usual)),
    }
}

/// Digits in a base, with the prefix that Python knows for it.
fn whole_number(text: &str, base: u32) -> Option<i128> {
    let text = text.trim();
    let (is_negative, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (text.starts_with('-'), digits),
        None => (false, text),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        10 => "",
        _ => return None,
    };
    let digits = match digits.get(..prefix.len()) {
        Some(start) if start.eq_ignore_ascii_case(prefix) => &digits[prefix.len()..],
        _ => digits,
    };
    let is_digit = |c: char| c.is_digit(base);
    if digits.is_empty() || !digits.chars().all(is_digit) {
        return None;
    }
    let number = i128::from_str_radix(digits, base).ok()?;
    Some(if is_negative { -number } else { number })
}

fn number_of(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::String => value.as_str()?.trim().parse().ok(),
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone()).ok(),
        _ => None,
    }
}

/// How many runs of letters, digits and underscores there are.
fn wordcount(value: &Value) -> usize {
    let text = value.to_string();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words = text.split(|c| !is_word(c));
    words.filter(|word| !word.is_empty()).count()
}
