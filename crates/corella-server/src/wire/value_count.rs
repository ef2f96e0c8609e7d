//! Limits the number of values in a body's JSON before any of them is kept.
//!
//! Fields such as schemas, template arguments and tools are kept as JSON values. An object of 8 bytes (`{"a":0},`) then
//! takes some 370 bytes, so a body of 8 MiB could take 400 MB, and the same again for each copy.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Limits the values of a body. Numbers outside of objects do not count: a prompt may be a million token ids, which are
/// not kept as JSON values.
pub const MAX_VALUES: usize = 1 << 17;

/// Returns the field in which a body exceeds the limit of values. Invalid JSON has no such field: the body's parser
/// reports the error.
pub fn crowded_field(body: &[u8]) -> Option<String> {
    // A value and its comma take at least two bytes.
    if body.len() < 2 * MAX_VALUES {
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

/// The key under which the package `serde_json` passes on a number with a fraction, an exponent or many digits.
pub const LONG_NUMBER: &str = "$serde_json::private::Number";

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
            fields.next_value_seed(ValueCounter {
                count: self.0,
                counts_numbers: false,
                is_in_object: false,
            })?;
        }
        Ok(())
    }
}

/// Counts a value and the values in it.
struct ValueCounter<'a> {
    count: &'a mut ValueCount,
    counts_numbers: bool,
    is_in_object: bool,
}

impl ValueCounter<'_> {
    fn part(&mut self, is_in_object: bool, counts_numbers: bool) -> ValueCounter<'_> {
        ValueCounter {
            count: self.count,
            counts_numbers,
            is_in_object,
        }
    }

    fn add_number<E: Error>(self) -> Result<(), E> {
        match self.counts_numbers {
            true => self.count.add(),
            false => Ok(()),
        }
    }
}

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
        self.add_number()
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.add_number()
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.count.add()
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.count.add()
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.count.add()
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut items: A) -> Result<(), A::Error> {
        self.count.add()?;
        let is_in_object = self.is_in_object;
        while items
            .next_element_seed(self.part(is_in_object, is_in_object))?
            .is_some()
        {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut members: A) -> Result<(), A::Error> {
        let mut key = members.next_key::<String>()?;
        if key.as_deref() == Some(LONG_NUMBER) {
            members.next_value::<IgnoredAny>()?;
            return self.add_number();
        }
        self.count.add()?;
        while key.is_some() {
            // The key counts. A number as its value does not count again.
            self.count.add()?;
            members.next_value_seed(self.part(true, false))?;
            key = members.next_key()?;
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
        // An object and its key count. A number does not count again.
        for number in ["0", "0.5"] {
            let item = format!(r#"{{"a":{number}}}"#);
            assert_eq!(crowded_field(&body(most / 2, &item)), None, "{number}");
            assert_eq!(crowded_field(&body(most / 2 + 1, &item)), name, "{number}");
        }
        for number in ["-10", "0.5", "1e9", "123456789012345678901"] {
            assert_eq!(crowded_field(&body(most, number)), None, "{number}");
            assert_eq!(crowded_field(&body(most + 1, number)), name, "{number}");
        }
    }

    #[test]
    fn token_ids_do_not_count_and_what_is_no_json_is_left_to_its_reader() {
        let ids = vec!["[1,23]"; 2 + MAX_VALUES / 2].join(",");
        assert_eq!(
            crowded_field(format!(r#"{{"prompt":[[{ids}]]}}"#).as_bytes()),
            None
        );
        let mut cut_off = body(MAX_VALUES - 100, r#""""#);
        cut_off.truncate(cut_off.len() - 1);
        assert_eq!(crowded_field(&cut_off), None);
        assert_eq!(crowded_field(&[b'['; 1 << 20]), None);
    }
}
