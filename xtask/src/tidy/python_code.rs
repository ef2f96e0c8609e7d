//! Removes comments and literals from Python source, so that rules see only code.

/// Comments and the contents of string literals become spaces; lines stay.
pub fn without_text(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let length = match bytes[at] {
            b'#' => line_length(&bytes[at..]),
            b'"' | b'\'' => literal_length(&bytes[at..]),
            _ => 0,
        };
        if length == 0 {
            out.push(bytes[at]);
            at += 1;
            continue;
        }
        let blank = |&byte: &u8| if byte == b'\n' { b'\n' } else { b' ' };
        out.extend(bytes[at..at + length].iter().map(blank));
        at += length;
    }
    String::from_utf8(out).expect("whole comments and literals were replaced by ASCII")
}

fn line_length(rest: &[u8]) -> usize {
    rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len())
}

/// Returns the length of the literal that begins with a quote. Backslashes also keep a quote from ending a raw literal.
fn literal_length(rest: &[u8]) -> usize {
    let quote = rest[0];
    let is_triple = rest.starts_with(&[quote; 3]);
    let end: &[u8] = if is_triple { &[quote; 3] } else { &[quote] };
    let mut at = end.len();
    while at < rest.len() {
        if rest[at] == b'\\' {
            at += 2;
        } else if rest[at..].starts_with(end) {
            return at + end.len();
        } else if rest[at] == b'\n' && !is_triple {
            return at;
        } else {
            at += 1;
        }
    }
    rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_vanish() {
        for text in [
            "a # x ' x",
            "a \"x ' \\\" x\"\nb",
            "a 'x \" \\' # x' b",
            "a \"\"\"x \" x\nx '''\"\"\" b",
            "a '''x''' b",
            "a '' \"x\" b",
            "a 'é x' b",
        ] {
            let code = without_text(text);
            assert!(!code.contains('x'), "{text:?} became {code:?}");
            assert!(code.starts_with("a "), "{code:?}");
            assert_eq!(code.ends_with('b'), text.ends_with('b'), "{code:?}");
            assert_eq!(code.lines().count(), text.lines().count());
        }
    }

    #[test]
    fn code_stays() {
        let code = "def f(a: int = 1) -> str:\n    return a[0]\n";
        assert_eq!(without_text(code), code);
    }
}
