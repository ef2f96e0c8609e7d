//! Lists of slots in the server's shared memory, which the server writes in MessagePack.

use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Slot {
    pub offset: u64,
    #[serde(rename = "length")]
    pub num_bytes: u64,
}

#[derive(Deserialize)]
struct SlotList {
    slots: Vec<Slot>,
}

/// Reads the slots of an answer. `None` if the bytes are no list of slots.
pub fn read_slots(bytes: &[u8]) -> Option<Vec<Slot>> {
    let mut reader = Reader(bytes);
    let value = reader.value(MAX_DEPTH)?;
    if !reader.0.is_empty() {
        return None;
    }
    let list: SlotList = serde_json::from_value(value).ok()?;
    Some(list.slots)
}

/// Maps and arrays are nested at most this deep.
const MAX_DEPTH: u32 = 8;

/// Reads the types of MessagePack that the server writes: maps with text keys, arrays, texts, whole numbers that are not
/// negative, booleans and nil.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn value(&mut self, depth: u32) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        let kind = self.take(1)?[0];
        Some(match kind {
            0x00..=0x7f => kind.into(),
            0x80..=0x8f => self.map(usize::from(kind & 0x0f), depth)?,
            0x90..=0x9f => self.array(usize::from(kind & 0x0f), depth)?,
            0xa0..=0xbf => self.text(usize::from(kind & 0x1f))?.into(),
            0xc0 => Value::Null,
            0xc2 => false.into(),
            0xc3 => true.into(),
            0xcc..=0xcf => self.number(1 << (kind - 0xcc))?.into(),
            0xd9..=0xdb => {
                let len = self.number(1 << (kind - 0xd9))?;
                self.text(usize::try_from(len).ok()?)?.into()
            }
            0xdc | 0xdd => {
                let len = self.number(2 << (kind - 0xdc))?;
                self.array(usize::try_from(len).ok()?, depth)?
            }
            0xde | 0xdf => {
                let len = self.number(2 << (kind - 0xde))?;
                self.map(usize::try_from(len).ok()?, depth)?
            }
            _ => return None,
        })
    }

    fn map(&mut self, len: usize, depth: u32) -> Option<Value> {
        let mut map = Map::new();
        for _ in 0..len {
            let Value::String(key) = self.value(depth)? else {
                return None;
            };
            map.insert(key, self.value(depth)?);
        }
        Some(Value::Object(map))
    }

    fn array(&mut self, len: usize, depth: u32) -> Option<Value> {
        // No allocation by the announced length, which may be wrong.
        let mut array = Vec::new();
        for _ in 0..len {
            array.push(self.value(depth)?);
        }
        Some(Value::Array(array))
    }

    fn text(&mut self, len: usize) -> Option<String> {
        String::from_utf8(self.take(len)?.to_vec()).ok()
    }

    fn number(&mut self, num_bytes: usize) -> Option<u64> {
        let bytes = self.take(num_bytes)?.iter();
        Some(bytes.fold(0, |number, &byte| number << 8 | u64::from(byte)))
    }

    fn take(&mut self, num_bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(num_bytes)?;
        self.0 = rest;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An answer of LMCache 0.5.6.
    const ANSWER: &[u8] = b"\x82\xa5slots\x92\
        \x84\xa6offset\x00\xa6length\xce\x00\x10\x00\x00\xa5shape\x93\x01\x01\xce\x00\x10\x00\x00\xa5dtype\xa5uint8\
        \x84\xa6offset\xce\x00\x20\x00\x00\xa6length\xce\x00\x10\x00\x00\xa5shape\x93\x01\x01\xce\x00\x10\x00\x00\
        \xa5dtype\xa5uint8\xadchunk_indices\x92\x00\x02";

    #[test]
    fn slots_are_read_from_an_answer() {
        let num_bytes = 1 << 20;
        let slots = [0, 2 << 20].map(|offset| Slot { offset, num_bytes });
        assert_eq!(read_slots(ANSWER), Some(slots.to_vec()));
        assert_eq!(
            read_slots(b"\x82\xa5slots\x90\xadchunk_indices\x90"),
            Some(Vec::new())
        );
    }

    #[test]
    fn other_bytes_are_no_slots() {
        for len in 0..ANSWER.len() {
            assert_eq!(read_slots(&ANSWER[..len]), None, "{len}");
        }
        let deep = [0x91; 100];
        let long = b"\x81\xa5slots\xdd\xff\xff\xff\xff";
        let negative = b"\x81\xa5slots\x91\x82\xa6offset\xff\xa6length\x01";
        for bytes in [
            &b""[..],
            &deep[..],
            long,
            negative,
            b"\x80",
            b"\x81\xa5slots\xc0",
        ] {
            assert_eq!(read_slots(bytes), None, "{bytes:?}");
        }
    }
}
