//! Python's `text % values`.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use crate::python::python_text::{python_repr, python_str};
use crate::python::template_cost::{SLOT_BYTES, charge, weigh};

/// The widest field, so that fields cannot fill the memory.
const MAX_WIDTH: usize = 1000;

/// One `%…` of the text.
#[derive(Default)]
struct Field {
    is_left: bool,
    has_sign: bool,
    has_space: bool,
    is_alternate: bool,
    is_zero_padded: bool,
    width: usize,
    precision: Option<usize>,
}

/// The values on the right side of `%`.
enum Given<'v> {
    /// The items of a tuple, or a single value.
    Positional {
        values: Vec<Value>,
        num_taken: usize,
    },
    Named(&'v Value),
}

fn invalid(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}

/// `text % given`
pub fn formatted(state: &State, text: &str, given: &Value) -> Result<String, Error> {
    let add = |out: &mut String, piece: &str| {
        charge(state, SLOT_BYTES + piece.len())?;
        out.push_str(piece);
        Ok::<_, Error>(())
    };
    let mut values = match given.downcast_object_ref::<Tuple>() {
        Some(items) => Given::Positional {
            values: items.iter().cloned().collect(),
            num_taken: 0,
        },
        None => Given::Positional {
            values: vec![given.clone()],
            num_taken: 0,
        },
    };
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(behind) = rest.strip_prefix('(') {
            let end = behind
                .find(')')
                .ok_or_else(|| invalid("incomplete format key"))?;
            if given.kind() != ValueKind::Map {
                return Err(invalid("format requires a mapping"));
            }
            let value = given.get_item(&Value::from(&behind[..end]))?;
            if value.is_undefined() {
                return Err(invalid("the format has a name without a value"));
            }
            rest = &behind[end + 1..];
            values = Given::Named(given);
            let (field, conversion) = read_field(&mut rest, &mut values)?;
            weigh(state, &value)?;
            add(&mut out, &converted(&field, conversion, Some(&value))?)?;
            continue;
        }
        let (field, conversion) = read_field(&mut rest, &mut values)?;
        let value = match conversion {
            '%' => None,
            _ => Some(values.next()?),
        };
        if let Some(value) = &value {
            weigh(state, value)?;
        }
        add(&mut out, &converted(&field, conversion, value.as_ref())?)?;
    }
    out.push_str(rest);
    if let Given::Positional { values, num_taken } = &values {
        // A single list or mapping may stay unused.
        let is_container =
            !given.is_tuple() && matches!(given.kind(), ValueKind::Map | ValueKind::Seq);
        if *num_taken < values.len() && !is_container {
            return Err(invalid("not all values are in the format"));
        }
    }
    Ok(out)
}

impl Given<'_> {
    fn next(&mut self) -> Result<Value, Error> {
        let missing = || invalid("not enough values for the format");
        match self {
            Self::Positional { values, num_taken } => {
                let value = values.get(*num_taken).cloned().ok_or_else(missing)?;
                *num_taken += 1;
                Ok(value)
            }
            Self::Named(mapping) => Ok((*mapping).clone()),
        }
    }
}

/// Reads flags, width and precision, and the character of the conversion.
fn read_field(rest: &mut &str, values: &mut Given<'_>) -> Result<(Field, char), Error> {
    let mut field = Field::default();
    loop {
        match rest.chars().next() {
            Some('-') => field.is_left = true,
            Some('+') => field.has_sign = true,
            Some(' ') => field.has_space = true,
            Some('#') => field.is_alternate = true,
            Some('0') => field.is_zero_padded = true,
            _ => break,
        }
        *rest = &rest[1..];
    }
    if let Some(width) = read_number(rest, values)? {
        field.is_left |= width < 0;
        field.width = bounded(width)?;
    }
    if let Some(behind) = rest.strip_prefix('.') {
        *rest = behind;
        let precision = read_number(rest, values)?.unwrap_or(0);
        field.precision = Some(bounded(precision.max(0))?);
    }
    // C's sizes have no effect.
    *rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
    let conversion = rest
        .chars()
        .next()
        .ok_or_else(|| invalid("incomplete format"))?;
    *rest = &rest[conversion.len_utf8()..];
    Ok((field, conversion))
}

fn bounded(width: i64) -> Result<usize, Error> {
    match usize::try_from(width.unsigned_abs()) {
        Ok(width) if width <= MAX_WIDTH => Ok(width),
        _ => Err(invalid(format!(
            "a width of the format is more than {MAX_WIDTH}"
        ))),
    }
}

fn read_number(rest: &mut &str, values: &mut Given<'_>) -> Result<Option<i64>, Error> {
    if let Some(behind) = rest.strip_prefix('*') {
        *rest = behind;
        let value = values.next()?;
        let number = value.is_integer().then(|| value.as_i64()).flatten();
        return number
            .map(Some)
            .ok_or_else(|| invalid("* wants an integer"));
    }
    let len = rest.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, behind) = rest.split_at(len);
    *rest = behind;
    match digits {
        "" => Ok(None),
        digits => Ok(Some(digits.parse().unwrap_or(i64::MAX))),
    }
}

fn converted(field: &Field, conversion: char, value: Option<&Value>) -> Result<String, Error> {
    let Some(value) = value else {
        return Ok("%".to_owned());
    };
    let is_number = matches!(value.kind(), ValueKind::Number | ValueKind::Bool);
    let not_number = || {
        invalid(format!(
            "%{conversion} wants a number, and not {}",
            value.kind()
        ))
    };
    match conversion {
        's' => Ok(padded_text(field, &python_str(value))),
        'r' => Ok(padded_text(field, &python_repr(value))),
        'a' => Ok(padded_text(field, &ascii_only(&python_repr(value)))),
        'c' => {
            let one = match value.as_str() {
                Some(text) => Some(text)
                    .filter(|text| text.chars().count() == 1)
                    .map(str::to_owned),
                None => { value.as_i64().filter(|_| value.is_integer()) }
                    .and_then(|code| u32::try_from(code).ok())
                    .and_then(char::from_u32)
                    .map(String::from),
            };
            one.map(|one| padded_text(field, &one))
                .ok_or_else(|| invalid("%c wants one character"))
        }
        'd' | 'i' | 'u' if is_number => {
            let (is_negative, digits) = match whole(value) {
                Some(number) => (number < 0, number.unsigned_abs().to_string()),
                None if value.is_integer() => (false, value.to_string()),
                None => return Err(not_number()),
            };
            Ok(padded_number(
                field,
                is_negative,
                "",
                with_digits(field, digits),
            ))
        }
        'x' | 'X' | 'o' if value.is_integer() || value.kind() == ValueKind::Bool => {
            let number = whole(value).ok_or_else(not_number)?;
            let magnitude = number.unsigned_abs();
            let (prefix, digits) = match conversion {
                'x' => ("0x", format!("{magnitude:x}")),
                'X' => ("0X", format!("{magnitude:X}")),
                _ => ("0o", format!("{magnitude:o}")),
            };
            let prefix = if field.is_alternate { prefix } else { "" };
            Ok(padded_number(
                field,
                number < 0,
                prefix,
                with_digits(field, digits),
            ))
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' if is_number => {
            let number = float(value).ok_or_else(not_number)?;
            let mut text = float_text(field, conversion.to_ascii_lowercase(), number.abs());
            if conversion.is_ascii_uppercase() {
                text.make_ascii_uppercase();
            }
            Ok(padded_number(
                field,
                number.is_sign_negative() && !number.is_nan(),
                "",
                text,
            ))
        }
        'd' | 'i' | 'u' | 'x' | 'X' | 'o' | 'e' | 'E' | 'f' | 'F' | 'g' | 'G' => Err(not_number()),
        '%' => Ok("%".to_owned()),
        _ => Err(invalid(format!("%{conversion} is no format"))),
    }
}

/// Python's `int` of a number.
fn whole(value: &Value) -> Option<i128> {
    if value.kind() == ValueKind::Bool {
        return Some(i128::from(value.is_true()));
    }
    if value.is_integer() {
        return i128::try_from(value.clone()).ok();
    }
    let number = float(value)?;
    number.is_finite().then_some(number as i128)
}

fn float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        _ => f64::try_from(value.clone()).ok(),
    }
}

/// Adds zeros in front: the precision of an integer is the least number of its digits.
fn with_digits(field: &Field, digits: String) -> String {
    format!("{digits:0>width$}", width = field.precision.unwrap_or(0))
}

fn float_text(field: &Field, conversion: char, magnitude: f64) -> String {
    if !magnitude.is_finite() {
        return if magnitude.is_nan() { "nan" } else { "inf" }.to_owned();
    }
    let precision = field.precision.unwrap_or(6);
    let point = if field.is_alternate { "." } else { "" };
    match conversion {
        'f' if precision == 0 => format!("{magnitude:.0}{point}"),
        'f' => format!("{magnitude:.precision$}"),
        'e' => {
            let (digits, exponent) = scientific(magnitude, precision);
            let point = if precision == 0 { point } else { "" };
            format!("{digits}{point}{}", exponent_text(exponent))
        }
        _ => {
            let precision = precision.max(1);
            let (digits, exponent) = scientific(magnitude, precision - 1);
            let is_fixed =
                i32::try_from(precision).is_ok_and(|precision| (-4..precision).contains(&exponent));
            let (mut digits, tail) = match is_fixed {
                true => {
                    let decimals = i64::try_from(precision).unwrap_or(0) - 1 - i64::from(exponent);
                    let decimals = usize::try_from(decimals).unwrap_or(0);
                    (format!("{magnitude:.decimals$}"), String::new())
                }
                false => (digits, exponent_text(exponent)),
            };
            if !field.is_alternate && digits.contains('.') {
                digits.truncate(digits.trim_end_matches('0').trim_end_matches('.').len());
            }
            digits + &tail
        }
    }
}

/// The digits and the exponent of ten.
fn scientific(magnitude: f64, decimals: usize) -> (String, i32) {
    let text = format!("{magnitude:.decimals$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    (digits.to_owned(), exponent.parse().unwrap_or(0))
}

fn exponent_text(exponent: i32) -> String {
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("e{sign}{:02}", exponent.unsigned_abs())
}

fn padded_text(field: &Field, text: &str) -> String {
    let text: String = text
        .chars()
        .take(field.precision.unwrap_or(usize::MAX))
        .collect();
    padded(field, text)
}

fn padded(field: &Field, text: String) -> String {
    match field.is_left {
        true => format!("{text:<width$}", width = field.width),
        false => format!("{text:>width$}", width = field.width),
    }
}

fn padded_number(field: &Field, is_negative: bool, prefix: &str, digits: String) -> String {
    let sign = match is_negative {
        true => "-",
        false if field.has_sign => "+",
        false if field.has_space => " ",
        false => "",
    };
    if field.is_zero_padded && !field.is_left {
        let width = field.width.saturating_sub(sign.len() + prefix.len());
        return format!("{sign}{prefix}{digits:0>width$}");
    }
    padded(field, format!("{sign}{prefix}{digits}"))
}

/// Escapes all characters but ASCII, as Python's `ascii` does.
fn ascii_only(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match u32::from(c) {
            0..0x80 => out.push(c),
            code @ 0x80..=0xFF => out.push_str(&format!("\\x{code:02x}")),
            code @ 0x100..=0xFFFF => out.push_str(&format!("\\u{code:04x}")),
            code => out.push_str(&format!("\\U{code:08x}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are Python 3.11's.
    #[test]
    fn formats_are_pythons() {
        let environment = minijinja::Environment::new();
        let state = environment.empty_state();
        let tuple = |values: &[Value]| Value::from(Tuple::from(values.to_vec()));
        let cases = [
            ("%r|%a", tuple(&["ü".into(), "ü".into()]), "'ü'|'\\xfc'"),
            (
                "%+d|% d|%#x|%05d",
                tuple(&[3.into(), 3.into(), 255.into(), (-42).into()]),
                "+3| 3|0xff|-0042",
            ),
            (
                "%g|%g|%g|%g",
                tuple(&[1.0.into(), 1e5.into(), 1e6.into(), 1e-5.into()]),
                "1|100000|1e+06|1e-05",
            ),
            (
                "%e|%.0e|%G",
                tuple(&[1234.5.into(), 15.0.into(), 1e20.into()]),
                "1.234500e+03|2e+01|1E+20",
            ),
            (
                "%-5s|%5.1s|%*d",
                tuple(&["a".into(), "bc".into(), 4.into(), 7.into()]),
                "a    |    b|   7",
            ),
            (
                "%d|%c|%c|%%",
                tuple(&[1.9.into(), 65.into(), "x".into()]),
                "1|A|x|%",
            ),
            (
                "%08.3f|%.0f",
                tuple(&[(-2.5).into(), 2.5.into()]),
                "-002.500|2",
            ),
            ("%s", Value::from(vec![1]), "[1]"),
            ("none", Value::from(vec![1]), "none"),
        ];
        for (text, given, expected) in cases {
            assert_eq!(
                formatted(&state, text, &given).expect("it formats"),
                expected,
                "{text}"
            );
        }
        for (text, given) in [
            ("%s", tuple(&["a".into(), "b".into()])),
            ("a", "b".into()),
            ("%s %s", "a".into()),
            ("%d", "1".into()),
            ("%z", 1.into()),
            ("%", 1.into()),
            ("%(a)s", 1.into()),
            ("%x", 1.5.into()),
            ("%1001d", 1.into()),
        ] {
            assert!(formatted(&state, text, &given).is_err(), "{text}");
        }
    }
}
