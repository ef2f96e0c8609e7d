//! Iterable values of Python that are no lists: generators, which most filters of Jinja2 return, and the views of a
//! mapping. They have no items by index and no JSON form.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Enumerator, Object, ObjectRepr};
use minijinja::{Error, ErrorKind, Value};

use crate::python::python_text::python_str;

/// A generator gives its items once. It is true even when empty, and has no length.
#[derive(Debug)]
pub struct Generator {
    items: Vec<Value>,
    num_given: AtomicUsize,
}

impl Generator {
    pub fn value(items: Vec<Value>) -> Value {
        let num_given = AtomicUsize::new(0);
        Value::from_object(Self { items, num_given })
    }

    fn next(&self) -> Option<Value> {
        let at = self.num_given.fetch_add(1, Ordering::Relaxed);
        self.items.get(at).cloned()
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let generator = self.clone();
        Enumerator::Iter(Box::new(std::iter::from_fn(move || generator.next())))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }

    fn is_true(self: &Arc<Self>) -> bool {
        true
    }
}

/// The view that `keys`, `values` and `items` of a mapping return.
#[derive(Debug)]
pub struct View {
    /// `dict_keys`, for example.
    name: &'static str,
    items: Vec<Value>,
}

impl View {
    pub fn value(name: &'static str, items: Vec<Value>) -> Value {
        Value::from_object(Self { name, items })
    }
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _: &Value) -> Option<Value> {
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.items.len())
    }
}

/// Python's text for an iterable that is no list.
pub fn iterable_str(value: &Value) -> Option<String> {
    if let Some(view) = value.downcast_object_ref::<View>() {
        let items = python_str(&Value::from(view.items.clone()));
        return Some(format!("{}({items})", view.name));
    }
    is_generator(value).then(|| "<generator object>".to_owned())
}

pub fn is_generator(value: &Value) -> bool {
    value.downcast_object_ref::<Generator>().is_some()
}

/// Whether a value is iterable, but has no items by index.
pub fn is_unindexed(value: &Value) -> bool {
    unindexed_items(value).is_some()
}

/// The items of a generator or a view. The generator still gives them afterwards.
pub fn unindexed_items(value: &Value) -> Option<&[Value]> {
    let generator = value.downcast_object_ref::<Generator>();
    let view = value.downcast_object_ref::<View>();
    generator
        .map(|generator| generator.items.as_slice())
        .or(view.map(|view| view.items.as_slice()))
}

/// The value, or a list of a generator's remaining items.
pub fn listed(value: Value) -> Value {
    match value.downcast_object_ref::<Generator>() {
        Some(generator) => std::iter::from_fn(|| generator.next()).collect(),
        None => value,
    }
}

/// The generator that Jinja2's filter returns where the engine's filter returns a list.
pub fn generated(list: Value) -> Result<Value, Error> {
    Ok(Generator::value(list.try_iter()?.collect()))
}

/// The error for an operation that generators and views lack.
pub fn check_indexed(value: &Value, what: &'static str) -> Result<(), Error> {
    match is_unindexed(value) {
        true => Err(Error::new(ErrorKind::InvalidOperation, what)),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_generator_gives_each_item_once() {
        let generator = Generator::value(vec![1.into(), 2.into(), 3.into()]);
        assert_eq!(generator.try_iter().expect("items").next(), Some(1.into()));
        assert_eq!(listed(generator.clone()), Value::from(vec![2, 3]));
        assert_eq!(generator.try_iter().expect("items").next(), None);
        assert!(generator.is_true());
        assert_eq!(generator.len(), None);
    }

    #[test]
    fn a_view_gives_its_items_again_and_has_a_length() {
        let view = View::value("dict_keys", vec!["a".into()]);
        for _ in 0..2 {
            assert_eq!(view.try_iter().expect("items").count(), 1);
        }
        assert_eq!(view.len(), Some(1));
        assert!(!View::value("dict_keys", Vec::new()).is_true());
        assert_eq!(iterable_str(&view).as_deref(), Some("dict_keys(['a'])"));
    }
}
