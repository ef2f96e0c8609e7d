//! JSON values of which only the outline is kept, so that their size does not matter.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::wire::value_count::LONG_NUMBER;

/// A value without the values in it.
#[derive(Clone, Debug, PartialEq)]
pub enum ShallowValue {
    Bool(bool),
    Number(f64),
    Text(String),
    /// `null`, a list or an object.
    Other,
}

impl ShallowValue {
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

impl<'de> Deserialize<'de> for ShallowValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShallowVisitor)
    }
}

struct ShallowVisitor;

impl<'de> Visitor<'de> for ShallowVisitor {
    type Value = ShallowValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<ShallowValue, E> {
        Ok(ShallowValue::Bool(value))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<ShallowValue, E> {
        Ok(ShallowValue::Number(number as f64))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<ShallowValue, E> {
        Ok(ShallowValue::Number(number as f64))
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<ShallowValue, E> {
        Ok(ShallowValue::Number(number))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<ShallowValue, E> {
        Ok(ShallowValue::Text(text.to_owned()))
    }

    fn visit_unit<E: Error>(self) -> Result<ShallowValue, E> {
        Ok(ShallowValue::Other)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<ShallowValue, A::Error> {
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(ShallowValue::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<ShallowValue, A::Error> {
        let Some(key) = members.next_key::<String>()? else {
            return Ok(ShallowValue::Other);
        };
        if key == LONG_NUMBER {
            let digits = members.next_value::<String>()?;
            let number = digits.parse().map_err(A::Error::custom)?;
            return Ok(ShallowValue::Number(number));
        }
        members.next_value::<IgnoredAny>()?;
        while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(ShallowValue::Other)
    }
}

/// Whether a value is an empty text or an empty list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Emptiness(pub bool);

impl<'de> Deserialize<'de> for Emptiness {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EmptinessVisitor)
    }
}

struct EmptinessVisitor;

impl<'de> Visitor<'de> for EmptinessVisitor {
    type Value = Emptiness;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Emptiness, E> {
        Ok(Emptiness(false))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Emptiness, E> {
        Ok(Emptiness(false))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Emptiness, E> {
        Ok(Emptiness(false))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Emptiness, E> {
        Ok(Emptiness(false))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Emptiness, E> {
        Ok(Emptiness(text.is_empty()))
    }

    fn visit_unit<E: Error>(self) -> Result<Emptiness, E> {
        Ok(Emptiness(false))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Emptiness, A::Error> {
        let is_empty = items.next_element::<IgnoredAny>()?.is_none();
        while items.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Emptiness(is_empty))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Emptiness, A::Error> {
        while members.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Emptiness(false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_numbers_and_booleans_are_kept_and_other_values_are_not() {
        let text = |text: &str| ShallowValue::Text(text.to_owned());
        for (json, expected) in [
            (r#""a\"b""#, text("a\"b")),
            ("true", ShallowValue::Bool(true)),
            ("-3", ShallowValue::Number(-3.0)),
            (
                "18446744073709551615",
                ShallowValue::Number(1.8446744073709552e19),
            ),
            ("0.25", ShallowValue::Number(0.25)),
            ("1e300", ShallowValue::Number(1e300)),
            (
                "123456789012345678901",
                ShallowValue::Number(123456789012345678901.0),
            ),
            ("null", ShallowValue::Other),
            ("[]", ShallowValue::Other),
            (r#"[[], {"a": [1.5]}, "b"]"#, ShallowValue::Other),
            ("{}", ShallowValue::Other),
            (r#"{"a": {"b": 1.5}, "c": [null]}"#, ShallowValue::Other),
        ] {
            let value: ShallowValue = serde_json::from_str(json).expect("it is JSON");
            assert_eq!(value, expected, "{json}");
        }
        for json in ["[1", r#"{"a"}"#, "tru"] {
            assert!(
                serde_json::from_str::<ShallowValue>(json).is_err(),
                "{json}"
            );
        }
    }

    #[test]
    fn texts_and_lists_may_be_empty() {
        for (json, expected) in [
            (r#""""#, true),
            ("[]", true),
            (r#""a""#, false),
            ("[[], 1.5]", false),
            ("{}", false),
            (r#"{"a": [], "b": 2}"#, false),
            ("0", false),
            ("0.5", false),
            ("-1", false),
            ("false", false),
            ("null", false),
        ] {
            let value: Emptiness = serde_json::from_str(json).expect("it is JSON");
            assert_eq!(value, Emptiness(expected), "{json}");
        }
    }
}
