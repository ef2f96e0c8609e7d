//! Arguments of Python's functions.

use minijinja::Error;
use minijinja::value::{ArgType, Kwargs};

/// An optional argument that a caller gives by its place or by its name.
pub fn optional<'a, T>(
    given: Option<T>,
    named: &'a Kwargs,
    name: &'a str,
) -> Result<Option<T>, Error>
where
    T: ArgType<'a, Output = T>,
{
    match given {
        Some(given) => Ok(Some(given)),
        None => named.get(name),
    }
}
