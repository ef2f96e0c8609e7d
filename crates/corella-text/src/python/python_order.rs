//! `left < right` and the like. Python compares numbers with numbers, texts with texts and lists with lists, and fails
//! for all other pairs.

use std::cmp::Ordering;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};

use crate::python::template_cost::{MAX_DEPTH, weigh};

/// The function that replaces `left < right`, with the operator as its second argument.
pub const ORDER: &str = "corella_order";
pub const OPERATORS: [&str; 4] = ["<", ">", "<=", ">="];

/// Whether `left` and `right` are in the order of `operator`.
pub fn is_in_order(
    state: &State,
    left: &Value,
    operator: &str,
    right: &Value,
) -> Result<bool, Error> {
    if left.as_object().is_some() && right.as_object().is_some() {
        weigh(state, left)?;
    }
    let ordering = compared(left, right, 0)?;
    Ok(match operator {
        "<" => ordering == Ordering::Less,
        ">" => ordering == Ordering::Greater,
        "<=" => ordering != Ordering::Greater,
        _ => ordering != Ordering::Less,
    })
}

fn compared(left: &Value, right: &Value, depth: usize) -> Result<Ordering, Error> {
    let is_list = |value: &Value| matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable);
    if let (Some(left), Some(right)) = (number(left), number(right)) {
        return Ok(left.cmp(&right));
    }
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        return Ok(left.cmp(right));
    }
    let are_lists = is_list(left) && is_list(right) && left.is_tuple() == right.is_tuple();
    if !are_lists || depth == MAX_DEPTH {
        let reason = format!("{} and {} have no order", left.kind(), right.kind());
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    // The first pair of different items decides; without such a pair, the lengths decide.
    let mut pairs = left.try_iter()?.zip(right.try_iter()?);
    match pairs.find(|(left, right)| left != right) {
        Some((left, right)) => compared(&left, &right, depth + 1),
        None => Ok(left.len().cmp(&right.len())),
    }
}

/// The value as a number, which is 0 or 1 for a flag; `None` for other values.
fn number(value: &Value) -> Option<Value> {
    match value.kind() {
        ValueKind::Number => Some(value.clone()),
        ValueKind::Bool => Some(Value::from(u8::from(value.is_true()))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_of_a_kind_have_an_order() {
        let environment = minijinja::Environment::new();
        let state = environment.empty_state();
        let list = |items: &[Value]| Value::from(items.to_vec());
        for (left, operator, right, expected) in [
            (1.into(), "<", 1.5.into(), true),
            (true.into(), ">=", 1.into(), true),
            ("b".into(), ">", "abc".into(), true),
            (list(&[1.into()]), "<", list(&[1.into(), 0.into()]), true),
            (
                list(&["a".into(), 1.into()]),
                "<=",
                list(&["b".into(), "c".into()]),
                true,
            ),
        ] {
            let found = is_in_order(&state, &left, operator, &right).expect("an order");
            assert_eq!(found, expected, "{left} {operator} {right}");
        }
        for (left, right) in [
            (Value::from(1), Value::from("1")),
            (().into(), 1.into()),
            (Value::UNDEFINED, Value::UNDEFINED),
            (list(&[1.into()]), list(&["a".into()])),
        ] {
            assert!(
                is_in_order(&state, &left, "<", &right).is_err(),
                "{left} {right}"
            );
        }
    }
}
