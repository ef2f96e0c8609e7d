//! Tests, filters and functions of Jinja2 that differ in the template engine, or are missing.

use std::borrow::Cow;

use minijinja::value::{Kwargs, Rest, StringInput, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, tests};
use minijinja_contrib::globals::joiner;

use crate::python::python_argument::optional;
use crate::python::python_attribute::{ATTRIBUTE, attribute, attribute_only, is_callable};
use crate::python::python_format::formatted;
use crate::python::python_iterable::{generated, is_generator, is_unindexed, listed};
use crate::python::python_number::LongInteger;
use crate::python::python_order::{ORDER, is_in_order};
use crate::python::python_string::{LINE_ENDS, lines};
use crate::python::python_text::{self, python_str};
use crate::python::template_cost::{SLOT_BYTES, charge, charge_items, weigh, whole};
use crate::template::template_expression::{
    CONCATENATION, CONTAINMENT, REMAINDER, SAFE_SUM, SLICED,
};
use crate::template::template_source::ITERATED;

/// Filters of the engine whose first argument passes through `$convert`, and whose result through `$finish`.
macro_rules! add_filters {
    ($environment:ident, $convert:ident, $finish:expr, $($name:ident),*) => {$(
        {
            const ENGINES: &str = concat!("corella_", stringify!($name));
            fn converted(
                state: &mut State,
                value: Value,
                rest: Rest<ValueOrKwargs>,
            ) -> Result<Value, Error> {
                let args = [$convert(state, value)?].into_iter().chain(rest.into_values());
                let result = state.apply_filter(ENGINES, &args.collect::<Vec<_>>())?;
                $finish(result)
            }
            $environment.add_filter(ENGINES, filters::$name);
            $environment.add_filter(stringify!($name), converted);
        }
    )*};
}

pub fn add_builtins(environment: &mut Environment<'static>) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("wordcount", wordcount);
    environment.add_filter("string", |state: &State, value: &Value| {
        python_text::text_of(state, value).map(Cow::into_owned)
    });
    environment.add_filter("indent", indent);
    environment.add_filter("round", round);
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("join", join);
    environment.add_filter(ITERATED, iterated);
    add_filters!(environment, iterated, Ok, list);
    add_filters!(environment, weighed_items, Ok, sort, sum);
    add_filters!(environment, weighed_items, generated, unique, batch, slice);
    add_filters!(environment, indexed, Ok, last);
    environment.add_filter("items", |value: Value| generated(filters::items(&value)?));
    add_filters!(
        environment,
        weighed,
        Ok,
        groupby,
        dictsort,
        min,
        max,
        pprint
    );
    // Jinja2 does not have these functions, and some of them nest values or print much.
    environment.remove_global("debug");
    for name in ["chain", "zip", "lines", "split", "bool"] {
        environment.remove_filter(name);
    }
    add_filters!(
        environment,
        iterated_if_any,
        generated,
        map,
        select,
        reject,
        selectattr,
        rejectattr
    );
    environment.add_filter("reverse", reverse);
    environment.add_filter("attr", attribute_only);
    add_filters!(
        environment,
        text_of,
        Ok,
        trim,
        upper,
        lower,
        title,
        capitalize
    );
    environment.add_filter("replace", replace);
    environment.add_filter("format", format_filter);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_function(SLICED, sliced);
    environment.add_function(REMAINDER, remainder);
    environment.add_function(CONCATENATION, concatenation);
    environment.add_function(SAFE_SUM, safe_sum);
    environment.add_function(CONTAINMENT, contains);
    environment.add_test("in", contains);
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || LongInteger::is(value)
    });
    environment.add_test("integer", |value: &Value| {
        value.is_integer() || LongInteger::is(value)
    });
    environment.add_test("callable", is_callable);
    environment.add_function(ATTRIBUTE, attribute);
    environment.add_function(ORDER, is_in_order);
    environment.add_function("joiner", joiner);
}

/// Whether Python's `iter` accepts a value. It rejects `none`, and accepts an undefined name.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.is_undefined() || value.try_iter().is_ok())
}

/// Whether a value has a length and items; true for strings and mappings.
fn is_sequence(value: &Value) -> bool {
    let kinds = [
        ValueKind::String,
        ValueKind::Seq,
        ValueKind::Map,
        ValueKind::Undefined,
    ];
    let is_iterable = value.kind() == ValueKind::Iterable;
    kinds.contains(&value.kind()) || is_iterable && value.len().is_some() && !is_unindexed(value)
}

/// A whole number, or the default, 0, where Python's `int` and `float` fail. An undefined name is an error.
fn int(
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    check_defined(value)?;
    let default = optional(default, &named, "default")?.unwrap_or(0.into());
    let base = optional(base, &named, "base")?.unwrap_or(10);
    named.assert_all_used()?;
    if let Some(whole) = value.as_str().and_then(|text| whole_number(text, base)) {
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
    let default = optional(default, &named, "default")?.unwrap_or(0.0.into());
    named.assert_all_used()?;
    Ok(number_of(value).map_or(default, Value::from))
}

fn check_defined(value: &Value) -> Result<(), Error> {
    match value.is_undefined() {
        true => Err(Error::from(ErrorKind::UndefinedError)),
        false => Ok(()),
    }
}

/// Digits in a base, with Python's prefix for it.
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
    // Single underscores may separate digits.
    let groups = || digits.split('_');
    let is_digits = |group: &str| !group.is_empty() && group.chars().all(|c| c.is_digit(base));
    if !groups().all(is_digits) {
        return None;
    }
    let number = i128::from_str_radix(&groups().collect::<String>(), base).ok()?;
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

/// The number of runs of letters, digits and underscores.
fn wordcount(value: &Value) -> usize {
    let text = value.to_string();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words = text.split(|c| !is_word(c));
    words.filter(|word| !word.is_empty()).count()
}

/// The iterable of a loop or a filter. Python iterates over the characters of a string, but not over `none`, flags and
/// numbers.
fn iterated(state: &State, value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        charge_items(state, text.len())?;
        return Ok(text.chars().map(|c| Value::from(c.to_string())).collect());
    }
    match value.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            let reason = format!("{} cannot be iterated over", value.kind());
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        }
        _ => Ok(listed(value)),
    }
}

/// Refuses a generator, which has no last item.
fn indexed(_: &State, value: Value) -> Result<Value, Error> {
    match is_generator(&value) {
        true => Err(Error::new(
            ErrorKind::InvalidOperation,
            "a generator has no last item",
        )),
        false => Ok(value),
    }
}

/// The iterable of filters that compare items, or put them into lists.
fn weighed_items(state: &State, value: Value) -> Result<Value, Error> {
    iterated(state, weighed(state, value)?)
}

fn weighed(state: &State, value: Value) -> Result<Value, Error> {
    weigh(state, &value).map(|_| value)
}

/// Reverses a text to a text, and a generator to a list. Reversing any other value gives a generator.
fn reverse(state: &State, value: Value) -> Result<Value, Error> {
    charge_items(state, value.len().unwrap_or(0))?;
    let is_text = value.kind() == ValueKind::String;
    let is_finite = !is_generator(&value);
    let reversed = filters::reverse(&listed(value))?;
    match is_text || !is_finite {
        true => Ok(reversed),
        false => generated(reversed),
    }
}

/// The iterable of filters for which Jinja2 treats every false value as an empty list.
fn iterated_if_any(state: &State, value: Value) -> Result<Value, Error> {
    match value.is_true() {
        true => iterated(state, value),
        false => Ok(Value::from(Vec::<Value>::new())),
    }
}

/// The text of a value for filters of text.
fn text_of(state: &State, value: Value) -> Result<Value, Error> {
    Ok(match value.kind() {
        ValueKind::String => value,
        _ => Value::from(&*python_text::text_of(state, &value)?),
    })
}

/// Refuses values that cannot be sliced: `none`, undefined names, and generators.
fn sliced(state: &State, value: Value) -> Result<Value, Error> {
    match value.is_none() || value.is_undefined() || is_unindexed(&value) {
        true => Err(Error::new(
            ErrorKind::InvalidOperation,
            "it cannot be sliced",
        )),
        false => whole(state, value),
    }
}

fn default(
    value: Value,
    other: Option<Value>,
    is_for_false: Option<bool>,
    named: Kwargs,
) -> Result<Value, Error> {
    let other = optional(other, &named, "default_value")?.unwrap_or_else(|| "".into());
    let is_for_false = optional(is_for_false, &named, "boolean")?.unwrap_or(false);
    named.assert_all_used()?;
    Ok(
        match value.is_undefined() || is_for_false && !value.is_true() {
            true => other,
            false => value,
        },
    )
}

fn replace(
    state: &mut State,
    value: &Value,
    old: &Value,
    new: &Value,
    rest: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let rest = rest.into_values();
    let (count, named): (Option<Value>, Kwargs) = from_args(&rest)?;
    let count = optional(count, &named, "count")?;
    named.assert_all_used()?;
    let text = |value: &Value| Ok::<_, Error>(Value::from(&*python_text::text_of(state, value)?));
    let (value, mut args) = (text(value)?, vec![text(old)?, text(new)?]);
    args.extend(count.filter(|count| !count.is_none()));
    value.call_method(state, "replace", &args)
}

/// The engine's filter `join`, with floats and lists in Python's notation.
fn join(
    state: &mut State,
    value: Value,
    joiner: Option<StringInput<'_>>,
    attribute: Option<&str>,
    named: Kwargs,
) -> Result<Value, Error> {
    let num_bytes = weigh(state, &value)?;
    let value = iterated(state, value)?;
    let joiner_bytes = joiner.as_ref().map_or(0, |joiner| joiner.as_str().len());
    charge(state, joiner_bytes.saturating_mul(num_bytes / SLOT_BYTES))?;
    let has_attribute = attribute.is_some() || named.has("attribute");
    let is_text = |item: Value| item.as_str().is_some();
    let value = match has_attribute || value.try_iter()?.all(is_text) {
        true => value,
        false => { value.try_iter()? }
            .map(|item| Value::from(python_str(&item)))
            .collect(),
    };
    filters::join(state, &value, joiner, attribute, named)
}

/// A break after the text begins one more line, without an indent.
fn indent(state: &State, text: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    /// The widest indent. A wider one would fill the memory.
    const MAX_WIDTH: usize = 1000;
    type Given = (Option<Value>, Option<bool>, Option<bool>, Kwargs);
    let args = args.into_values();
    let (width, first, blank, named): Given = from_args(&args)?;
    let Some(text) = text.as_str() else {
        let reason = "indent: only text can be indented";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    };
    let width = optional(width, &named, "width")?;
    let indentation = match width {
        None => "    ".to_owned(),
        Some(width) => match width.as_str() {
            Some(text) => text.to_owned(),
            None => {
                let width = i64::try_from(width)?.max(0);
                " ".repeat(
                    usize::try_from(width)
                        .unwrap_or(usize::MAX)
                        .min(MAX_WIDTH + 1),
                )
            }
        },
    };
    if indentation.len() > MAX_WIDTH {
        let reason = format!("indent: width is more than {MAX_WIDTH}");
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    let first = optional(first, &named, "first")?.unwrap_or(false);
    let blank = optional(blank, &named, "blank")?.unwrap_or(false);
    named.assert_all_used()?;
    let num_lines = 1 + text.matches(LINE_ENDS).count();
    charge(state, num_lines.saturating_mul(indentation.len()))?;
    let text = format!("{text}\n");
    let mut out = String::with_capacity(text.len());
    for (index, (line, _)) in lines(&text).into_iter().enumerate() {
        let is_indented = match index {
            0 => first,
            _ => blank || !line.is_empty(),
        };
        if index > 0 {
            out.push('\n');
        }
        if is_indented {
            out.push_str(&indentation);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// `value in container`
fn contains(state: &State, value: &Value, container: &Value) -> Result<bool, Error> {
    let takes_value = match container.kind() {
        ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::Plain => false,
        ValueKind::String => value.kind() == ValueKind::String,
        _ => true,
    };
    if value.as_object().is_some() {
        weigh(state, container)?;
    }
    if !takes_value {
        let reason = format!(
            "{} cannot be looked for in {}",
            value.kind(),
            container.kind()
        );
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    tests::is_in(state, value, container)
}

/// `left ~ right`
fn concatenation(state: &State, left: &Value, right: &Value) -> Result<String, Error> {
    // The engine charges for the result.
    Ok(python_text::text_of(state, left)?.into_owned() + &python_text::text_of(state, right)?)
}

/// `text | format(…)`: the values are positional or named.
fn format_filter(state: &State, text: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = args.into_values();
    let (positional, named): (&[Value], Kwargs) = from_args(&args)?;
    let names: Vec<String> = named.args().map(str::to_owned).collect();
    let values = match names.is_empty() {
        true => Value::from(Tuple::from(positional.to_vec())),
        false if positional.is_empty() => { names.iter() }
            .map(|name| Ok((name.clone(), named.get::<Value>(name)?)))
            .collect::<Result<Vec<_>, Error>>()
            .map(Value::from_pairs)?,
        false => {
            let reason = "format: values are given by place or by name";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
    };
    formatted(state, &python_text::text_of(state, text)?, &values).map(Value::from)
}

/// `left % right`: formats a string, or computes a remainder.
fn remainder(state: &State, left: Value, right: Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        return formatted(state, text, &right).map(Value::from);
    }
    let impossible = || {
        Error::new(
            ErrorKind::InvalidOperation,
            "% needs two numbers, or a text before it",
        )
    };
    let is_float = |value: &Value| value.kind() == ValueKind::Number && !value.is_integer();
    let (Some(a), Some(b)) = (plain_number(&left), plain_number(&right)) else {
        return Err(impossible());
    };
    if b == 0.0 {
        return Err(impossible());
    }
    if is_float(&left) || is_float(&right) {
        let rest = a % b;
        return Ok(Value::from(match rest == 0.0 {
            true => 0.0_f64.copysign(b),
            false if (rest < 0.0) != (b < 0.0) => rest + b,
            false => rest,
        }));
    }
    let (a, b) = (i128::try_from(left)?, i128::try_from(right)?);
    let rest = a.checked_rem(b).ok_or_else(impossible)?;
    let rest = match rest != 0 && (rest < 0) != (b < 0) {
        true => rest + b,
        false => rest,
    };
    Ok(i64::try_from(rest).map_or_else(|_| Value::from(rest), Value::from))
}

/// The value of a number or a flag.
fn plain_number(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Number | ValueKind::Bool => number_of(value),
        _ => None,
    }
}

/// `left + right` with one side marked as safe. The other side is escaped.
fn safe_sum(state: &State, left: &Value, right: &Value) -> Result<Value, Error> {
    let mut sum = String::new();
    for part in [left, right] {
        let Some(text) = part.as_str() else {
            let reason = "only text can be added to text";
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        };
        match part.is_safe() {
            true => {
                charge(state, text.len())?;
                sum.push_str(text);
            }
            false => sum.push_str(&escaped(state, text)?),
        }
    }
    Ok(Value::from_safe_string(sum))
}

fn escape(state: &State, value: &Value) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = python_text::text_of(state, value)?;
    escaped(state, &text).map(Value::from_safe_string)
}

/// HTML escapes in the form of the package MarkupSafe.
fn escaped(state: &State, text: &str) -> Result<String, Error> {
    let num_escapes = text.matches(['&', '<', '>', '"', '\'']).count();
    charge(state, text.len() + num_escapes * "&amp;".len())?;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&#34;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    Ok(out)
}

/// Rounds halves to even digits, as Python does.
fn round(
    value: &Value,
    precision: Option<i32>,
    method: Option<&str>,
    named: Kwargs,
) -> Result<Value, Error> {
    let precision = optional(precision, &named, "precision")?.unwrap_or(0);
    let method = optional(method, &named, "method")?.unwrap_or("common");
    named.assert_all_used()?;
    let invalid = |reason| Error::new(ErrorKind::InvalidOperation, reason);
    let number = plain_number(value).ok_or_else(|| invalid("round: only numbers have digits"))?;
    let scale = 10_f64.powi(precision);
    let rounded = match method {
        "common" if value.kind() != ValueKind::Number || value.is_integer() => {
            return Ok(value.clone());
        }
        "common" => match usize::try_from(precision) {
            Ok(digits) => format!("{number:.*}", digits.min(300))
                .parse()
                .unwrap_or(number),
            Err(_) => (number * scale).round_ties_even() / scale,
        },
        "ceil" => (number * scale).ceil() / scale,
        "floor" => (number * scale).floor() / scale,
        _ => return Err(invalid("round: method must be common, ceil or floor")),
    };
    Ok(Value::from(rounded))
}
