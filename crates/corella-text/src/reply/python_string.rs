//! Strings in Python's quotes, read during their arrival.

/// The quotes of a string: the character, and whether it occurs three times.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quote {
    mark: &'static str,
}

const QUOTES: [&str; 4] = ["'''", "\"\"\"", "'", "\""];

impl Quote {
    /// The quotes at the beginning of a text, and their length. `None` if more text decides.
    pub(crate) fn of(text: &str) -> Option<(Self, usize)> {
        let num_same = text
            .bytes()
            .take_while(|&byte| byte == text.as_bytes()[0])
            .count();
        if num_same == text.len() && num_same < 3 {
            return None;
        }
        let mark = QUOTES.into_iter().find(|mark| text.starts_with(mark))?;
        Some((Self { mark }, mark.len()))
    }
}

/// The next piece of a string.
pub(crate) enum Unescaped {
    /// The number of literal bytes.
    Text(usize),
    Escape(Escape),
    /// Quotes that may end the string, and their length in bytes.
    Quote(usize),
    Undecided,
}

pub(crate) struct Escape {
    /// The unescaped text.
    pub(crate) piece: String,
    pub(crate) len: usize,
}

/// Reads the next piece of a string.
pub(crate) fn unescape(text: &str, quote: Quote) -> Unescaped {
    let mark = quote.mark;
    let first = mark.as_bytes()[0] as char;
    let start = text.find(['\\', first]).unwrap_or(text.len());
    if start > 0 {
        return Unescaped::Text(start);
    }
    if text.starts_with('\\') {
        return match escape(text) {
            Some(escape) => Unescaped::Escape(escape),
            None => Unescaped::Undecided,
        };
    }
    if text.starts_with(mark) {
        return Unescaped::Quote(mark.len());
    }
    match mark.starts_with(text) {
        true => Unescaped::Undecided,
        false => Unescaped::Text(1),
    }
}

/// Reads an escape; `None` if more text decides. Unknown escapes stay unchanged.
fn escape(text: &str) -> Option<Escape> {
    let kind = text[1..].chars().next()?;
    let of = |piece: &str| {
        Some(Escape {
            piece: piece.to_owned(),
            len: 1 + kind.len_utf8(),
        })
    };
    let as_it_is = || of(&text[..1 + kind.len_utf8()]);
    let num_digits = match kind {
        'n' => return of("\n"),
        't' => return of("\t"),
        'r' => return of("\r"),
        'b' => return of("\u{8}"),
        'f' => return of("\u{c}"),
        'v' => return of("\u{b}"),
        'a' => return of("\u{7}"),
        '\n' => return of(""),
        '\\' | '\'' | '"' => return of(&kind.to_string()),
        '0' => return of("\0"),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => return as_it_is(),
    };
    let (code, mut len) = match hex(&text[2..], num_digits)? {
        Some(code) => (code, 2 + num_digits),
        None => return as_it_is(),
    };
    let mut number = code;
    // JSON writes a character beyond 16 bits as two such escapes.
    if kind == 'u' && (0xD800..0xDC00).contains(&code) {
        let rest = &text[len..];
        if "\\u".starts_with(rest) {
            return None;
        }
        if let Some(digits) = rest.strip_prefix("\\u")
            && let Some(low) = hex(digits, 4)?
            && (0xDC00..0xE000).contains(&low)
        {
            number = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            len += 6;
        }
    }
    Some(Escape {
        piece: char::from_u32(number).unwrap_or('\u{FFFD}').to_string(),
        len,
    })
}

/// A number of `num_digits` hexadecimal digits, if valid. `None` if more text decides.
fn hex(text: &str, num_digits: usize) -> Option<Option<u32>> {
    let digits = text.bytes().take(num_digits);
    if !digits.clone().all(|byte| byte.is_ascii_hexdigit()) {
        return Some(None);
    }
    if text.len() < num_digits {
        return None;
    }
    Some(u32::from_str_radix(&text[..num_digits], 16).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_python_and_json() {
        let cases = [
            (r"\n'", Some(("\n", 2))),
            (r"\'x", Some(("'", 2))),
            (r"\d+", Some((r"\d", 2))),
            (r"\x41b", Some(("A", 4))),
            (r"\xg1b", Some((r"\x", 2))),
            (r"\u00e9", Some(("é", 6))),
            (r"\ud83d\ude00!", Some(("😀", 12))),
            (r"\ud83dx", Some(("\u{FFFD}", 6))),
            (r"\U0001F600", Some(("😀", 10))),
            (r"\é", Some((r"\é", 3))),
            ("\\", None),
            (r"\u00e", None),
            (r"\ud83d\", None),
            (r"\ud83d\ude0", None),
        ];
        for (text, expected) in cases {
            let found = escape(text);
            let found = found.as_ref().map(|found| (&*found.piece, found.len));
            assert_eq!(found, expected, "{text}");
        }
    }
}
