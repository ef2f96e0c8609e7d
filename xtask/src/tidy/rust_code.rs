//! Removes comments and literals from Rust source, so that rules see only code.

/// Comments and the contents of string and character literals become spaces; lines stay.
pub fn without_text(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let length = text_length(bytes, at);
        if length == 0 {
            out.push(bytes[at]);
            at += 1;
            continue;
        }
        out.extend(
            bytes[at..at + length]
                .iter()
                .map(|&byte| if byte == b'\n' { b'\n' } else { b' ' }),
        );
        at += length;
    }
    String::from_utf8(out).expect("whole comments and literals were replaced by ASCII")
}

/// Returns the length of the comment or literal at `at`, or 0 if there is none.
fn text_length(bytes: &[u8], at: usize) -> usize {
    let rest = &bytes[at..];
    let after_word = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
    match rest {
        [b'/', b'/', ..] => rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment(rest),
        [b'"', ..] => quoted(rest, b'"'),
        [b'\'', ..] if is_char(rest) => quoted(rest, b'\''),
        [b'r' | b'b' | b'c', ..] if !after_word => raw_string(rest),
        _ => 0,
    }
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0usize, 0);
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                at += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Returns whether a quote begins a character literal, and not a lifetime or a label.
fn is_char(rest: &[u8]) -> bool {
    match rest {
        [_, b'\\', ..] => true,
        [_, first, tail @ ..] => {
            let width = match first {
                0xf0.. => 4,
                0xe0.. => 3,
                0xc0.. => 2,
                _ => 1,
            };
            tail.get(width - 1) == Some(&b'\'')
        }
        _ => false,
    }
}

/// Returns the length of a raw string: `r"…"` or `r#"…"#`, with any number of `#` and an optional `b` or `c`.
fn raw_string(rest: &[u8]) -> usize {
    let prefix = match rest {
        [b'r', ..] => 1,
        [b'b' | b'c', b'r', ..] => 2,
        _ => return 0,
    };
    let signs = rest[prefix..].iter().take_while(|&&b| b == b'#').count();
    let start = prefix + signs;
    if rest.get(start) != Some(&b'"') {
        return 0;
    }
    let mut end = vec![b'"'];
    end.resize(signs + 1, b'#');
    rest[start + 1..]
        .windows(end.len())
        .position(|window| window == end)
        .map_or(rest.len(), |at| start + 1 + at + end.len())
}

/// The source before its module of tests, which stands last.
pub fn without_tests(source: &str) -> &str {
    let end = source.match_indices("\nmod tests").find_map(|(at, _)| {
        let attribute = source[..at].lines().next_back()?;
        let is_of_tests = attribute.starts_with("#[cfg(") && has_word(attribute, "test");
        is_of_tests.then(|| at - attribute.len())
    });
    &source[..end.unwrap_or(source.len())]
}

pub fn has_word(code: &str, word: &str) -> bool {
    let part_of_word = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        !code[..at].ends_with(part_of_word) && !code[at + word.len()..].starts_with(part_of_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_vanish() {
        for text in [
            "a /* x /* x */ x */ b",
            "a // x",
            "a \"x \\\" x\" b",
            "a r#\"x \" x\"# b",
            "a br\"x\\\" b",
            "a 'x' b",
            "a '\\'' b",
            "a '\u{1f642}' b",
        ] {
            let code = without_text(text);
            assert!(!code.contains('x'), "{text:?} became {code:?}");
            assert_eq!(code.starts_with("a "), text.starts_with("a "));
            assert_eq!(code.ends_with(" b"), text.ends_with(" b"), "{code:?}");
        }
    }

    #[test]
    fn code_stays() {
        for code in [
            "fn f<'a>(x: &'a str) -> &'a str { x }",
            "let r = br; r#type",
            "'outer: loop { break 'outer }",
        ] {
            assert_eq!(without_text(code), code);
        }
        assert_eq!(without_text("\"a\nb\"\nc"), "  \n  \nc");
    }

    #[test]
    fn tests_stand_last() {
        assert_eq!(without_tests("a\n#[cfg(test)]\nmod tests {\nb"), "a\n");
        assert_eq!(
            without_tests("a\n#[cfg(all(test, unix))]\nmod tests;\n"),
            "a\n"
        );
        assert_eq!(
            without_tests("a\n#[cfg(unix)]\nmod tests;\n"),
            "a\n#[cfg(unix)]\nmod tests;\n"
        );
        assert_eq!(without_tests("#[test]\nfn a() {}"), "#[test]\nfn a() {}");
    }

    #[test]
    fn words_are_whole() {
        assert!(has_word("use libc::c_int;", "libc"));
        assert!(!has_word("use libc_extra;", "libc"));
        assert!(!has_word("my_libc::x", "libc"));
    }
}
