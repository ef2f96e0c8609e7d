//! Limits the number of values in a body's JSON before any of them is kept.
//!
//! Fields such as schemas, template arguments and tools are kept as JSON values. An object of 8 bytes (`{"a":0},`) then
//! takes some 370, so a body of 8 MiB could take 400 MB, and the same again for each copy.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Numbers are not counted: a prompt may be a million token IDs, and each takes 32 bytes at most.
pub const MAX_VALUES: usize = 1 << 17;

/// Returns the first field with which a body has too many values. Invalid JSON has none: its reader reports the error.
pub fn crowded_field(body: &[u8]) -> Option<String> {
    // `""` and a comma is the shortest counted value.
    if body.len() < 3 * MAX_VALUES {
        return None;
    }
    let mut count = ValueCount {
        num_values: 0,
        field: None,
    };
    let mut json = serde_json::Deserializer::from_slice(body);
    // Counting ends with an error at the first value too many.
    let _ = FieldCounter(&mut count).deserialize(&mut json);
    count.field.filter(|_| count.num_values > MAX_VALUES)
}

struct ValueCount {
    num_values: usize,
    /// The field of the body being read.
    field: Option<String>,
}

impl ValueCount {
    /// Counts one more value. An error stops the reader.
    fn add<E: Error>(&mut self) -> Result<(), E> {
        self.num_values += 1;
        match self.num_values > MAX_VALUES {
            true => Err(E::custom("too many values")),
            false => Ok(()),
        }
    }
}

/// Counts the values of each field of a body.
struct FieldCounter<'a>(&'a mut ValueCount);

impl<'de> DeserializeSeed<'de> for FieldCounter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for FieldCounter<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        while let Some(name) = fields.next_key()? {
            self.0.field = Some(name);
            fields.next_value_seed(ValueCounter(self.0))?;
        }
        Ok(())
    }
}

/// Counts a value and the values in it.
struct ValueCounter<'a>(&'a mut ValueCount);

impl<'de> DeserializeSeed<'de> for ValueCounter<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueCounter<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.0.add()
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.0.add()
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.0.add()
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        self.0.add()?;
        while items.next_element_seed(ValueCounter(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<(), A::Error> {
        self.0.add()?;
        while members.next_key::<IgnoredAny>()?.is_some() {
            // The key counts, too.
            self.0.add()?;
            members.next_value_seed(ValueCounter(self.0))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(num_items: usize, item: &str) -> Vec<u8> {
        let items = vec![item; num_items].join(",");
        format!(r#"{{"model":"m","prompt":[1,2],"guided_json":{{"enum":[{items}]}}}}"#).into_bytes()
    }

    #[test]
    fn a_field_of_too_many_values_is_named() {
        let name = Some("guided_json".to_owned());
        // Besides the items, there are five: the model, the array of the prompt, the schema, its key and its array.
        let most = MAX_VALUES - 5;
        for item in [r#""""#, "null", "true", "[]", "{}"] {
            let filler = format!("{item}{}", " ".repeat(3));
            assert_eq!(crowded_field(&body(most, &filler)), None, "{item}");
            assert_eq!(crowded_field(&body(most + 1, &filler)), name, "{item}");
        }
        // An object, its key, and a number, which is not counted.
        assert_eq!(crowded_field(&body(most / 2, r#"{"a":0}"#)), None);
        assert_eq!(crowded_field(&body(most / 2 + 1, r#"{"a":0}"#)), name);
    }

    #[test]
    fn numbers_do_not_count_and_what_is_no_json_is_left_to_its_reader() {
        assert_eq!(crowded_field(&body(1_000_000, "1.5")), None);
        let mut cut_off = body(MAX_VALUES - 100, r#""""#);
        cut_off.truncate(cut_off.len() - 1);
        assert_eq!(crowded_field(&cut_off), None);
        assert_eq!(crowded_field(&[b'['; 1 << 20]), None);
    }
}
