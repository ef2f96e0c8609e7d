//! GPT-2's byte alphabet: the character of each byte in a byte-level vocabulary.
//!
//! A printable Latin-1 character stands for its own byte. The other bytes, in order, have the
//! characters from U+0100 on.

pub(crate) fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7F) as u8),
        0x143 => Some(0xAD),
        _ => None,
    }
}

pub(crate) fn char_of_byte(byte: u8) -> char {
    let code = u32::from(byte);
    let code = match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => code,
        0x00..=0x20 => 0x100 + code,
        0x7F..=0xA0 => 0x121 + code - 0x7F,
        0xAD => 0x143,
    };
    char::from_u32(code).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_characters_stand_for_each_other() {
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of_char(char_of_byte(byte)), Some(byte));
        }
        assert_eq!(char_of_byte(b' '), 'Ġ');
        assert_eq!(char_of_byte(b'\n'), 'Ċ');
        assert_eq!(char_of_byte(b'A'), 'A');
    }
}
