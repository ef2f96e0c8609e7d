//! The work, the memory and the depth of values in templates. The engine charges fuel for its steps and for the data
//! that they make. Functions and filters of this crate charge here for the data that they make, before they make it.
//!
//! A value can grow deeper, without limit, only within a list, a mapping, a tuple or a namespace. So the source is
//! rewritten (`template_nesting`): each of these is checked when it is made. The engine would nest lazy lists in each
//! other, so `whole` turns each lazy list into a list of its items at once.

use minijinja::functions;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::globals::cycler;

use crate::python::python_attribute::has_type;
use crate::python::python_iterable::{is_unindexed, unindexed_items};

/// The function around a new list, mapping or tuple.
pub const NESTED: &str = "corella_nested";
/// The function around a new member of a namespace.
pub const MEMBER: &str = "corella_member";
/// The function around an operand that may be a lazy list.
pub const WHOLE: &str = "corella_whole";
/// The function that replaces `left == right`, with the operator as its second argument.
pub const EQUALITY: &str = "corella_equality";

/// The deepest nesting of values. Values of requests are less deep.
pub const MAX_DEPTH: usize = 256;

/// One fuel of the engine pays for this many bytes.
const BYTES_PER_FUEL: usize = 64;
/// The bytes of a value in a list.
pub const SLOT_BYTES: usize = 32;
/// The bytes of visited values are charged when at least this many are unpaid.
const CHARGED_AT_ONCE: usize = 64 * BYTES_PER_FUEL;

pub fn add_checks(environment: &mut Environment<'static>) {
    environment.add_function(NESTED, |state: &State, value: Value| {
        weigh(state, &value).map(|_| value)
    });
    environment.add_function(MEMBER, |value: Value| match is_shared(&value) {
        true => Err(shared_within_another()),
        false => Ok(value),
    });
    environment.add_function(WHOLE, whole);
    environment.add_function(EQUALITY, equality);
    environment.add_function(
        "namespace",
        |state: &State, members: Option<ValueOrKwargs>| {
            let members = members.map(ValueOrKwargs::into_value);
            if let Some(members) = &members {
                weigh(state, members)?;
            }
            functions::namespace(members.map(ValueOrKwargs::from))
        },
    );
    environment.add_function(
        "dict",
        |state: &State, members: Option<Value>, more: Kwargs| {
            let dict = functions::dict(members, more)?;
            weigh(state, &dict).map(|_| dict)
        },
    );
    environment.add_function("cycler", |state: &State, items: Rest<Value>| {
        weigh(state, &Value::from(Tuple::from(items.0.clone())))?;
        cycler(items.0)
    });
}

/// Charges for this many bytes of work or memory.
pub fn charge(state: &State, num_bytes: usize) -> Result<(), Error> {
    state.consume_fuel((num_bytes / BYTES_PER_FUEL) as u64)
}

/// Charges for `num_items` more values in a list.
pub fn charge_items(state: &State, num_items: usize) -> Result<(), Error> {
    charge(state, num_items.saturating_mul(SLOT_BYTES))
}

/// Charges for a value and all values in it, and refuses a value that is too deep. Returns the value's size in bytes.
pub fn weigh(state: &State, value: &Value) -> Result<usize, Error> {
    let mut scale = Scale {
        state,
        num_bytes: 0,
        num_charged: 0,
    };
    scale.add(value, 0)?;
    charge(state, scale.num_bytes - scale.num_charged)?;
    Ok(scale.num_bytes)
}

struct Scale<'a, 't, 'env> {
    state: &'a State<'t, 'env>,
    num_bytes: usize,
    num_charged: usize,
}

impl Scale<'_, '_, '_> {
    fn add(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.num_bytes += SLOT_BYTES + value.as_str().map_or(0, str::len);
        if self.num_bytes - self.num_charged >= CHARGED_AT_ONCE {
            charge(self.state, self.num_bytes - self.num_charged)?;
            self.num_charged = self.num_bytes;
        }
        let Some(object) = value.as_object() else {
            return Ok(());
        };
        if depth > MAX_DEPTH {
            let reason = format!("a value is nested more than {MAX_DEPTH} levels deep");
            return Err(Error::new(ErrorKind::InvalidOperation, reason));
        }
        // A cycler does not show its items.
        if depth > 0 && (is_shared(value) || has_type(value, &["Cycler"])) {
            return Err(shared_within_another());
        }
        if let Some(items) = unindexed_items(value) {
            return items.iter().try_for_each(|item| self.add(item, depth + 1));
        }
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                for item in value.try_iter()? {
                    self.add(&item, depth + 1)?;
                }
            }
            ValueKind::Map => {
                for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                    self.add(&key, depth + 1)?;
                    self.add(&value, depth + 1)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// Whether a value can change after other values contain it. Such a value could then make the containing values deeper,
/// or contain them itself.
fn is_shared(value: &Value) -> bool {
    has_type(value, &["Namespace", "Loop"])
}

fn shared_within_another() -> Error {
    let reason = "a namespace, loop or cycler cannot be part of another value";
    Error::new(ErrorKind::InvalidOperation, reason)
}

fn equality(state: &State, left: &Value, operator: &str, right: &Value) -> Result<bool, Error> {
    if left.as_object().is_some() && right.as_object().is_some() {
        weigh(state, left)?;
    }
    Ok((left == right) == (operator == "=="))
}

/// The value itself, or for a lazy list, a list of its items.
pub fn whole(state: &State, value: Value) -> Result<Value, Error> {
    if is_unindexed(&value) {
        let reason = "a generator or view can be neither added nor multiplied";
        return Err(Error::new(ErrorKind::InvalidOperation, reason));
    }
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    charge_items(state, value.len().unwrap_or(0))?;
    Ok(value.try_iter()?.collect())
}
