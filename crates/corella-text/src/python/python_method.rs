//! Python's methods of values: minijinja-contrib's, and others used by templates.

use minijinja::value::{Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use crate::python::python_iterable::View;
use crate::python::python_string::string_method;
use crate::python::template_cost::{charge_items, weigh};

/// Calls a method of Python's values that the engine's values lack.
pub fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(state, text, method, args)
    {
        return result;
    }
    if value.as_str().is_none() && matches!(method, "index" | "count") {
        weigh(state, value)?;
    }
    if let Some(result) = mapping_method(state, value, method, args) {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `keys`, `values` and `items` of a mapping, and `copy`.
fn mapping_method(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Option<Result<Value, Error>> {
    let name = match (value.kind(), method) {
        (ValueKind::Map, "keys") => "dict_keys",
        (ValueKind::Map, "values") => "dict_values",
        (ValueKind::Map, "items") => "dict_items",
        // Values never change.
        (ValueKind::Map | ValueKind::Seq | ValueKind::Iterable, "copy") => {
            return Some(from_args(args).map(|()| value.clone()));
        }
        (ValueKind::Seq | ValueKind::Iterable, "index") => return Some(index_of(value, args)),
        _ => return None,
    };
    if let Err(error) = charge_items(state, 3 * value.len().unwrap_or(0)) {
        return Some(Err(error));
    }
    let pairs = value.as_object()?.try_iter_pairs()?;
    let items = pairs.map(|(key, value)| match method {
        "keys" => key,
        "values" => value,
        _ => Value::from(Tuple::from([key, value])),
    });
    let items = items.collect();
    Some(from_args(args).map(|()| View::value(name, items)))
}

fn index_of(list: &Value, args: &[Value]) -> Result<Value, Error> {
    let (item,): (&Value,) = from_args(args)?;
    let at = list.try_iter()?.position(|other| other == *item);
    at.map(Value::from)
        .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "it is not in the list"))
}
