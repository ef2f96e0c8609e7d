//! Base64 (RFC 4648, with padding), in which etcd's JSON has keys and values.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |at: usize| u32::from(group.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let letter = ALPHABET[(bits >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= group.len() {
                letter.into()
            } else {
                '='
            });
        }
    }
    text
}

pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let letters = text.trim_end_matches('=');
    if text.len() - letters.len() > 2 {
        return None;
    }
    let mut bytes = Vec::with_capacity(letters.len() / 4 * 3 + 2);
    for group in letters.as_bytes().chunks(4) {
        let mut bits = 0;
        for letter in group {
            let value = ALPHABET.iter().position(|other| other == letter)?;
            bits = bits << 6 | value as u32;
        }
        bits <<= 6 * (4 - group.len());
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 4648, section 10.
    #[test]
    fn the_standards_examples_hold() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(encode(bytes.as_bytes()), text);
            assert_eq!(decode(text).as_deref(), Some(bytes.as_bytes()));
        }
        assert_eq!(encode(&[0xfb, 0xff, 0xfe]), "+//+");
        assert_eq!(decode("+//+"), Some(vec![0xfb, 0xff, 0xfe]));
    }

    #[test]
    fn what_is_no_base64_is_refused() {
        for text in ["Z", "Zg", "Zg=", "Z===", "====", "Zg-=", "Zm 9"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
