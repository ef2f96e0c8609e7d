//! Counts the fields of a protobuf message before they are decoded. A field may take two bytes on the wire and some dozens
//! in memory.

use crate::wire::value_count::MAX_VALUES;

/// Messages in messages are counted down to this depth. `GenerateRequest` reaches it by lists in
/// `kv_transfer_params`, whose deeper values count with their outer ones.
const MAX_DEPTH: u32 = 8;

/// Returns whether a message has too many fields, those of its messages included. The fields in `prompt` count once each,
/// because they have text and packed numbers alone. The decoder reports invalid messages.
pub fn is_crowded(message: &[u8], prompt: &[u64]) -> bool {
    // A field takes at least two bytes.
    message.len() >= 2 * MAX_VALUES
        && num_fields(message, prompt, MAX_DEPTH).is_some_and(|num_fields| num_fields > MAX_VALUES)
}

/// Returns `None` for bytes that are no message, such as most texts.
fn num_fields(mut bytes: &[u8], uncounted: &[u64], depth: u32) -> Option<usize> {
    let mut num_fields = 0;
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let (number, wire_type) = (tag >> 3, tag & 7);
        let num_bytes = match wire_type {
            0 => {
                varint(&mut bytes)?;
                0
            }
            1 => 8,
            2 => varint(&mut bytes)?.try_into().ok()?,
            5 => 4,
            _ => return None,
        };
        let (field, rest) = bytes.split_at_checked(num_bytes)?;
        bytes = rest;
        num_fields += 1;
        if wire_type == 2 && depth > 0 && !uncounted.contains(&number) {
            num_fields += self::num_fields(field, &[], depth - 1).unwrap_or(0);
        }
    }
    Some(num_fields)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..70).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Field `number` with these bytes.
    fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
        let mut message = vec![number << 3 | 2];
        let mut length = bytes.len();
        while length >= 0x80 {
            message.push(length as u8 | 0x80);
            length >>= 7;
        }
        message.push(length as u8);
        message.extend_from_slice(bytes);
        message
    }

    #[test]
    fn fields_count_wherever_they_are_but_prompts_count_once() {
        let empty = |num: usize| field(14, &[]).repeat(num);
        assert!(!is_crowded(&empty(MAX_VALUES), &[]));
        assert!(is_crowded(&empty(MAX_VALUES + 1), &[]));
        // The outer fields count, too.
        for depth in 1..=8 {
            let nested = |num| (0..depth).fold(empty(num), |message, _| field(7, &message));
            let most = MAX_VALUES - depth;
            assert!(!is_crowded(&nested(most), &[]), "{depth}");
            assert!(is_crowded(&nested(most + 1), &[]), "{depth}");
        }
        let prompt = field(4, &empty(MAX_VALUES + 1));
        assert!(!is_crowded(&prompt, &[4]));
        assert!(is_crowded(&prompt, &[3]));
        // A text and a message that ends early are counted by none of their bytes.
        assert!(!is_crowded(
            &field(3, "{\"a\": 1}".repeat(1 << 17).as_bytes()),
            &[]
        ));
        assert!(!is_crowded(&empty(MAX_VALUES + 1)[1..], &[]));
        assert_eq!(num_fields(&[0x08, 0xff, 0xff, 0xff], &[], 1), None);
        assert_eq!(
            num_fields(
                &[
                    0x08, 0x96, 0x01, 0x0d, 0, 0, 0, 0, 0x09, 1, 2, 3, 4, 5, 6, 7, 8
                ],
                &[],
                1
            ),
            Some(3)
        );
    }
}
