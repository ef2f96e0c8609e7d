//! Reads the fields of a message in the encoding of Protocol Buffers.

/// A field's number and value.
pub type Field<'a> = (u32, Value<'a>);

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    Number(u64),
    Fixed32(u32),
    Fixed64(u64),
    /// A text, bytes or a message.
    Bytes(&'a [u8]),
}

/// The fields of a message, in their stored order. An error ends them.
pub struct Message<'a> {
    bytes: &'a [u8],
}

impl<'a> Message<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(len)?;
        self.bytes = rest;
        Some(taken)
    }

    /// A number in groups of seven bits, the lowest first.
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(number);
            }
        }
        None
    }

    fn field(&mut self) -> Option<Field<'a>> {
        let tag = self.number()?;
        let value = match tag & 7 {
            0 => Value::Number(self.number()?),
            1 => Value::Fixed64(u64::from_le_bytes(self.take(8)?.try_into().ok()?)),
            2 => {
                let len = usize::try_from(self.number()?).ok()?;
                Value::Bytes(self.take(len)?)
            }
            5 => Value::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        let number = u32::try_from(tag >> 3).ok()?;
        (number > 0).then_some((number, value))
    }
}

impl<'a> Iterator for Message<'a> {
    type Item = Result<Field<'a>, &'static str>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.bytes.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.bytes = &[];
        }
        Some(field.ok_or("a field is damaged or cut off"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_every_kind() {
        // The example of the encoding's documentation: field 1 is 150.
        let fields: Vec<_> = Message::new(&[0x08, 0x96, 0x01]).collect();
        assert_eq!(fields, [Ok((1, Value::Number(150)))]);
        // And field 2 is "testing".
        let text = [&[0x12, 0x07][..], b"testing"].concat();
        let fields: Vec<_> = Message::new(&text).collect();
        assert_eq!(fields, [Ok((2, Value::Bytes(b"testing")))]);
        let fields: Vec<_> =
            Message::new(&[0x1D, 0, 0, 0x80, 0x3F, 0x09, 1, 0, 0, 0, 0, 0, 0, 0]).collect();
        let one = 1.0_f32.to_bits();
        assert_eq!(
            fields,
            [Ok((3, Value::Fixed32(one))), Ok((1, Value::Fixed64(1)))]
        );
    }

    #[test]
    fn damage_ends_a_message_with_an_error() {
        for bytes in [
            &[0x08][..],
            &[0x12, 5, b'x'],
            &[0x0B],
            &[0x00, 0x01],
            &[0xFF; 12],
            &[
                0x12, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01,
            ],
        ] {
            let fields: Vec<_> = Message::new(bytes).collect();
            assert!(matches!(fields[..], [Err(_)]), "{bytes:?}: {fields:?}");
        }
    }
}
