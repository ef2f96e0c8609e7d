//! The filter `tojson` as Transformers defines it: Python's `json.dumps`, with `ensure_ascii=False` by default.

use std::fmt::Write;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use crate::python::python_argument::optional;
use crate::python::python_iterable::check_indexed;
use crate::python::python_number::{LongInteger, python_float};
use crate::python::template_cost::{MAX_DEPTH, charge, weigh};

/// The output is charged in pieces of this size.
const MAX_UNPAID_BYTES: usize = 4096;
/// The longest separator or indentation.
const MAX_SEPARATOR_BYTES: usize = 64;

/// The filter `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(crate) fn filter(
    state: &State,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    type Given = Option<Value>;
    weigh(state, value)?;
    let args = args.into_values();
    let (ensure_ascii, indent, separators, sort_keys, named): (Given, Given, Given, Given, Kwargs) =
        from_args(&args)?;
    let arg = |given: Given, name: &'static str| {
        let given = optional(given, &named, name)?;
        Ok::<_, Error>(given.filter(|given| !given.is_none()))
    };
    let flag = |given: Given, name: &'static str| {
        arg(given, name).map(|given| given.is_some_and(|given| given.is_true()))
    };
    let indent = match arg(indent, "indent")? {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let (item_separator, key_separator) = match arg(separators, "separators")? {
        Some(pair) => (
            pair.get_item_by_index(0)?.to_string(),
            pair.get_item_by_index(1)?.to_string(),
        ),
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
    };
    let is_long = |part: &String| part.len() > MAX_SEPARATOR_BYTES;
    if indent.as_ref().is_some_and(is_long) || is_long(&item_separator) || is_long(&key_separator) {
        let reason = format!("tojson: a separator has more than {MAX_SEPARATOR_BYTES} bytes");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    let mut writer = Writer {
        state,
        out: String::new(),
        num_charged: 0,
        indent,
        item_separator,
        key_separator,
        ensure_ascii: flag(ensure_ascii, "ensure_ascii")?,
        sort_keys: flag(sort_keys, "sort_keys")?,
    };
    named.assert_all_used()?;
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

struct Writer<'a, 't, 'env> {
    state: &'a State<'t, 'env>,
    out: String,
    /// The number of bytes of the output that are already charged.
    num_charged: usize,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Writer<'_, '_, '_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(not_serializable("a value nested this deep"));
        }
        let num_new = self.out.len() - self.num_charged;
        if num_new >= MAX_UNPAID_BYTES {
            charge(self.state, num_new)?;
            self.num_charged = self.out.len();
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                check_indexed(
                    value,
                    "tojson: an iterable that is no list has no JSON form",
                )?;
                self.out.push('[');
                let mut is_empty = true;
                for item in value.try_iter()? {
                    self.separate(is_empty, depth + 1);
                    is_empty = false;
                    self.value(&item, depth + 1)?;
                }
                self.close(']', is_empty, depth);
            }
            ValueKind::Map => {
                self.out.push('{');
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                for (index, key) in keys.iter().enumerate() {
                    self.separate(index == 0, depth + 1);
                    self.key(key)?;
                    self.out.push_str(&self.key_separator);
                    self.value(&value.get_item(key)?, depth + 1)?;
                }
                self.close('}', keys.is_empty(), depth);
            }
            _ if LongInteger::is(value) => {
                let _ = write!(self.out, "{value}");
            }
            kind => return Err(not_serializable(&kind.to_string())),
        }
        Ok(())
    }

    fn separate(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.out.push_str(&self.item_separator);
        }
        self.new_line(depth);
    }

    fn close(&mut self, bracket: char, is_empty: bool, depth: usize) {
        if !is_empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        match key.kind() {
            ValueKind::String => self.string(key.as_str().unwrap_or_default()),
            ValueKind::None | ValueKind::Bool | ValueKind::Number => {
                self.out.push('"');
                self.value(key, 0)?;
                self.out.push('"');
            }
            kind => return Err(not_serializable(&format!("a key that is a {kind}"))),
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        if value.is_integer() {
            let _ = write!(self.out, "{value}");
            return Ok(());
        }
        let number = f64::try_from(value.clone())?;
        if number.is_nan() {
            self.out.push_str("NaN");
        } else if number.is_infinite() {
            self.out.push_str(if number > 0.0 {
                "Infinity"
            } else {
                "-Infinity"
            });
        } else {
            self.out.push_str(&python_float(number));
        }
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn not_serializable(what: &str) -> Error {
    Error::new(
        ErrorKind::InvalidOperation,
        format!("tojson: {what} has no JSON form"),
    )
}
