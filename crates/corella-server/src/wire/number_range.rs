//! The numbers that a field takes.

use std::fmt;
use std::ops::{Bound, RangeBounds};

use serde_json::{Value, json};

/// A range, for a field's check, error and schema.
#[derive(Clone, Copy)]
pub struct NumberRange(pub Bound<f64>, pub Bound<f64>);

impl NumberRange {
    /// Checks the number, and the `f32` to which it is rounded. So a range up to 2 has no 2.00000001, which is rounded
    /// to 2, and a range above 0 has no number that is rounded to 0.
    pub fn contains(self, number: f64) -> bool {
        let has = |number: f64| (self.0, self.1).contains(&number);
        has(number) && has(f64::from(number as f32))
    }

    /// Returns the keywords for a JSON schema.
    pub fn keywords(self) -> Value {
        let mut keywords = json!({});
        match self.0 {
            Bound::Included(least) => keywords["minimum"] = least.into(),
            Bound::Excluded(below) => keywords["exclusiveMinimum"] = below.into(),
            Bound::Unbounded => {}
        }
        match self.1 {
            Bound::Included(most) => keywords["maximum"] = most.into(),
            Bound::Excluded(above) => keywords["exclusiveMaximum"] = above.into(),
            Bound::Unbounded => {}
        }
        keywords
    }
}

/// Completes "must be …". An excluded upper bound, the end of `f32`, is left out.
impl fmt::Display for NumberRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self(Bound::Included(least), Bound::Included(most)) => {
                write!(f, "between {least} and {most}")
            }
            Self(Bound::Excluded(below), Bound::Included(most)) => {
                write!(f, "above {below} and at most {most}")
            }
            Self(Bound::Included(least), _) => write!(f, "a number from {least} up"),
            Self(Bound::Excluded(below), _) => write!(f, "above {below}"),
            Self(Bound::Unbounded, _) => f.write_str("a number"),
        }
    }
}
