//! Finds the end of a JSON value during its arrival in pieces.

/// Reads one value. It only counts brackets and recognises strings: the model's text reaches the caller unchanged.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JsonExtent {
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    in_scalar: bool,
}

impl JsonExtent {
    /// Reads more of the value, from its first byte on. Returns the number of its bytes in `text`, and whether it is
    /// complete. A number is complete when another character follows it.
    pub(crate) fn read(&mut self, text: &str) -> (usize, bool) {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_string {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => {
                        self.in_string = false;
                        if self.depth == 0 {
                            return (at + 1, true);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            match byte {
                b'"' if !self.in_scalar => self.in_string = true,
                b'{' | b'[' if !self.in_scalar => self.depth += 1,
                b'}' | b']' if self.depth > 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return (at + 1, true);
                    }
                }
                _ if self.depth > 0 => {}
                b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.' => {
                    self.in_scalar = true;
                }
                _ => return (at, true),
            }
        }
        (text.len(), false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_ends_where_json_says_so() {
        let cases = [
            (r#"{"a": "}\"{"} x"#, 13),
            (r#"[1, [2]], 3"#, 8),
            (r#""a\\" b"#, 5),
            ("12, 3", 2),
            ("null}", 4),
            ("}", 0),
        ];
        for (text, len) in cases {
            assert_eq!(JsonExtent::default().read(text), (len, true), "{text}");
            let mut extent = JsonExtent::default();
            let mut read = 0;
            for byte in text.split_inclusive(|_: char| true) {
                let (len, is_complete) = extent.read(byte);
                read += len;
                if is_complete {
                    break;
                }
            }
            assert_eq!(read, len, "{text}");
        }
        assert_eq!(JsonExtent::default().read(r#"{"a": "}"#), (8, false));
    }
}
