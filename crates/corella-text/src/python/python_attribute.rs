//! `value.name`: Python looks up a method of a mapping before Jinja2 looks up a member of that name. So `schema.items`
//! is never the member `items` of a JSON schema.

use std::sync::Arc;

use minijinja::value::{Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

/// The function that replaces `value.name` for these names.
pub const ATTRIBUTE: &str = "corella_attribute";

/// The methods of Python's `dict`.
pub const MAPPING_METHODS: [&str; 11] = [
    "clear",
    "copy",
    "fromkeys",
    "get",
    "items",
    "keys",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "values",
];

/// Methods that change a value. Transformers forbids them, so Jinja2 does not find them.
const CHANGING_METHODS: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// A method that is not called. It counts as true, and is printed as in Python, except for the address.
#[derive(Debug)]
struct Method {
    value: Value,
    name: String,
}

impl Object for Method {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        self.value.call_method(state, &self.name, args)
    }

    fn render(self: &Arc<Self>, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "<built-in method {} of dict object>", self.name)
    }
}

/// `value.name`
pub fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::from(ErrorKind::UndefinedError));
    }
    if !is_mapping(value) || !MAPPING_METHODS.contains(&name) {
        return value.get_attr(name);
    }
    if CHANGING_METHODS.contains(&name) {
        return Ok(Value::UNDEFINED);
    }
    let (value, name) = (value.clone(), name.to_owned());
    Ok(Value::from_object(Method { value, name }))
}

/// The filter `attr`, which ignores the members of a mapping.
pub fn attribute_only(value: &Value, name: &Value) -> Result<Value, Error> {
    let name = name.as_str().unwrap_or_default();
    if value.is_undefined() {
        return Ok(Value::UNDEFINED);
    }
    match is_mapping(value) && !MAPPING_METHODS.contains(&name) {
        true => Ok(Value::UNDEFINED),
        false => attribute(value, name),
    }
}

/// Whether a value is a mapping, and not one of the engine's similar objects.
fn is_mapping(value: &Value) -> bool {
    value.kind() == ValueKind::Map && !has_type(value, &["Namespace", "Macro", "Loop", "Module"])
}

/// Returns whether a value can be called: a function, a macro, or an undefined name, whose call fails.
pub fn is_callable(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Plain | ValueKind::Undefined) || has_type(value, &["Macro"])
}

/// Whether a value is an object of the engine with one of these types.
pub fn has_type(value: &Value, names: &[&str]) -> bool {
    let Some(object) = value.as_object() else {
        return false;
    };
    let name = object.type_name().rsplit("::").next().unwrap_or_default();
    names.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_method_hides_the_member_of_its_name() {
        let schema = Value::from_pairs([("items", 1), ("pop", 2), ("type", 3)]);
        let found = |name: &str| attribute(&schema, name).expect("a mapping has attributes");
        assert!(is_callable(&found("items")));
        assert!(found("items").is_true());
        assert!(found("pop").is_undefined());
        assert_eq!(found("type"), Value::from(3));
        assert!(
            attribute_only(&schema, &"type".into())
                .expect("undefined")
                .is_undefined()
        );
        assert!(attribute(&Value::UNDEFINED, "items").is_err());
    }
}
