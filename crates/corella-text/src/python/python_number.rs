//! Numbers of JSON as Python reads them: integers of any size, and floats.

use std::fmt;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr};
use serde_json::Number;

pub fn value_of_number(number: &Number) -> Value {
    let text = number.as_str();
    if text.contains(['.', 'e', 'E']) {
        // Beyond the largest float, Python reads infinity.
        return Value::from(text.parse().unwrap_or(f64::NAN));
    }
    if let Ok(integer) = text.parse::<i64>() {
        return Value::from(integer);
    }
    text.parse::<i128>().map_or_else(
        |_| Value::from_object(LongInteger(text.into())),
        Value::from,
    )
}

/// An integer of more than 128 bits, which the template engine lacks. Templates can print it, but not compute with it.
#[derive(Debug)]
pub struct LongInteger(Box<str>);

impl LongInteger {
    pub fn is(value: &Value) -> bool {
        value.downcast_object_ref::<Self>().is_some()
    }
}

impl Object for LongInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Formats a finite float as Python's `repr` does, with the fewest digits that identify it. Magnitudes below 1e-4
/// (other than zero) and from 1e16 up are written with an exponent of at least two digits.
pub(crate) fn python_float(number: f64) -> String {
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let mut text = number.to_string();
    if !text.contains('.') {
        text.push_str(".0");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::python::python_text::python_str;

    /// Python 3's `str(json.loads(…))`.
    #[test]
    fn numbers_are_printed_as_python_reads_them() {
        for (written, printed) in [
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1.0", "1.0"),
            ("1.50", "1.5"),
            ("1E5", "100000.0"),
            ("1e16", "1e+16"),
            ("9007199254740993", "9007199254740993"),
            ("9007199254740993.0", "9007199254740992.0"),
            ("18446744073709551616", "18446744073709551616"),
            (
                "-170141183460469231731687303715884105729",
                "-170141183460469231731687303715884105729",
            ),
            ("1e400", "inf"),
            ("-1e400", "-inf"),
            ("1e-400", "0.0"),
        ] {
            let number: Number = serde_json::from_str(written).expect("a number");
            assert_eq!(python_str(&value_of_number(&number)), printed, "{written}");
        }
    }
}
