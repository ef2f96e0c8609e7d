//! Regular expressions with look-aheads, rewritten without them. Validation libraries write conditions on a text before
//! the text's form: `^(?!\.)(?!.*\.\.)[a-z.]+$`. Such a text matches each of several patterns without look-ahead.

/// The error for every other look-around.
pub(crate) const LOOK_AROUND: &str = "the regular expression looks ahead or behind in a way that cannot be \
     followed: `(?=…)`, and `(?!…)` of up to two characters or a fixed beginning or end, are taken \
     directly behind `^`; write it without `(?=`, `(?!`, `(?<=` and `(?<!`, or use `format`";

/// Patterns of libraries with a look-ahead that is not at the beginning, each with an equal pattern without look-ahead.
const KNOWN: [(&str, &str); 2] = [
    // Zod's `z.iso.duration()`: each unit once, in order, and at least one of them.
    (
        r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        concat!(
            r"^P(?:\d+W|",
            r"(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)",
            r"(?:T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S))?|",
            r"T(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S))$",
        ),
    ),
    // Zod's IBAN: the check digits are none of 00, 01 and 99.
    (
        r"^[A-Z]{2}(?!00|01|99)\d{2}[A-Z0-9]{11,30}$",
        r"^[A-Z]{2}(?:0[2-9]|[1-8]\d|9[0-8])[A-Z0-9]{11,30}$",
    ),
];

/// The longest text that a `(?!…)` may exclude. Each of its characters is a case of its own.
const MAX_UNWANTED_CHARS: usize = 64;

/// The patterns that together equal `pattern`. `None` if it has no look-around.
///
/// # Errors
/// The pattern has another kind of look-around. The error says what to change.
pub(crate) fn without_look_ahead(pattern: &str) -> Result<Option<Vec<String>>, String> {
    if !looks_around(pattern) {
        return Ok(None);
    }
    if let Some((_, replacement)) = KNOWN.iter().find(|(known, _)| *known == pattern) {
        return Ok(Some(vec![(*replacement).to_owned()]));
    }
    split(pattern)
        .map(Some)
        .ok_or_else(|| LOOK_AROUND.to_owned())
}

fn split(pattern: &str) -> Option<Vec<String>> {
    let mut rest = pattern.strip_prefix('^')?;
    let mut patterns = Vec::new();
    loop {
        let (is_wanted, inner) = match (rest.strip_prefix("(?="), rest.strip_prefix("(?!")) {
            (Some(inner), _) => (true, inner),
            (_, Some(inner)) => (false, inner),
            (None, None) => break,
        };
        let end = Scan::new(inner)
            .find(|&(_, c, depth)| c == ')' && depth == 0)?
            .0;
        let body = &inner[..end];
        if looks_around(body) {
            return None;
        }
        match is_wanted {
            true => patterns.push(format!("^(?:{body})")),
            false => {
                for case in alternatives(body) {
                    patterns.push(unwanted(case)?);
                }
            }
        }
        rest = &inner[end + 1..];
    }
    // If a pattern has several cases, a look-ahead belongs only to the first.
    if looks_around(rest) || alternatives(rest).len() > 1 {
        return None;
    }
    patterns.insert(0, format!("^{rest}"));
    Some(patterns)
}

fn looks_around(pattern: &str) -> bool {
    Scan::new(pattern).any(|(at, c, _)| {
        let group = &pattern[at..];
        c == '('
            && ["(?=", "(?!", "(?<=", "(?<!"]
                .iter()
                .any(|mark| group.starts_with(mark))
    })
}

/// The parts between the `|` outside all groups.
fn alternatives(pattern: &str) -> Vec<&str> {
    let mut cases = Vec::new();
    let mut start = 0;
    for (at, c, depth) in Scan::new(pattern) {
        if c == '|' && depth == 0 {
            cases.push(&pattern[start..at]);
            start = at + 1;
        }
    }
    cases.push(&pattern[start..]);
    cases
}

/// The characters of a pattern that are neither escaped nor in a class, with their places and the number of groups open
/// before them.
struct Scan<'a> {
    chars: std::str::CharIndices<'a>,
    depth: usize,
}

impl<'a> Scan<'a> {
    fn new(pattern: &'a str) -> Self {
        Self {
            chars: pattern.char_indices(),
            depth: 0,
        }
    }
}

impl Iterator for Scan<'_> {
    type Item = (usize, char, usize);

    fn next(&mut self) -> Option<Self::Item> {
        let depth = self.depth;
        let (at, c) = self.chars.next()?;
        match c {
            '\\' => {
                self.chars.next();
            }
            '[' => {
                while let Some((_, inner)) = self.chars.next() {
                    match inner {
                        '\\' => {
                            self.chars.next();
                        }
                        ']' => break,
                        _ => {}
                    }
                }
            }
            '(' => self.depth += 1,
            ')' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        Some((at, c, depth))
    }
}

/// One character of a text: its class, and the class of all other characters.
#[derive(PartialEq)]
struct Set {
    own: String,
    other: String,
}

/// A pattern of all texts that do not match `^case`, or `None` if that is too complex. The pattern may exclude further
/// texts of several lines, because a `.` of `case` matches no line break.
fn unwanted(case: &str) -> Option<String> {
    let starts = [".*", ".*?", "[\\s\\S]*", "[\\S\\s]*", "[^]*"];
    let start = starts
        .iter()
        .filter(|start| case.starts_with(**start))
        .max_by_key(|start| start.len());
    let mut rest = start.map_or(case, |start| &case[start.len()..]);
    let is_end = rest.ends_with('$') && !rest.ends_with("\\$");
    if is_end {
        rest = &rest[..rest.len() - 1];
    }
    let mut sets = Vec::new();
    while !rest.is_empty() {
        let (set, behind) = first_set(rest)?;
        sets.push(set);
        if sets.len() > MAX_UNWANTED_CHARS {
            return None;
        }
        rest = behind;
    }
    let anything = "(?s:.*)";
    match (start.is_some(), is_end, &sets[..]) {
        (false, true, []) => Some("^(?s:.+)$".to_owned()),
        (_, _, []) => None,
        (true, false, [set]) => Some(format!("^{}*$", set.other)),
        (true, false, [first, second]) if first == second => {
            let Set { own, other } = first;
            Some(format!("^(?:{other}|{own}{other})*{own}?$"))
        }
        (true, false, _) => None,
        // The text is shorter, or one of its characters differs.
        (is_anywhere, _, sets) => {
            let count = sets.len();
            let before = if is_anywhere { anything } else { "" };
            let after = if is_end { "" } else { anything };
            let mut cases = vec![format!("(?s:.{{0,{}}})", count - 1)];
            cases.extend(sets.iter().enumerate().map(|(at, Set { other, .. })| {
                let left = count - at - 1;
                format!("{before}(?s:.{{{at}}}){other}(?s:.{{{left}}}){after}")
            }));
            if is_end && !is_anywhere {
                cases.push(format!("(?s:.{{{},}})", count + 1));
            }
            Some(format!("^(?:{})$", cases.join("|")))
        }
    }
}

/// The first character set of `text`, and the rest of `text`.
fn first_set(text: &str) -> Option<(Set, &str)> {
    let first = text.chars().next()?;
    let (set, behind) = match first {
        '[' => {
            let end = class_end(text)?;
            let inner = &text[1..end];
            let (own, other) = match inner.strip_prefix('^') {
                Some(inner) => (format!("[^{inner}]"), format!("[{inner}]")),
                None => (format!("[{inner}]"), format!("[^{inner}]")),
            };
            // JavaScript's `[]` and `[^]`.
            if inner.trim_start_matches('^').is_empty() {
                return None;
            }
            (Set { own, other }, &text[end + 1..])
        }
        '\\' => {
            let escaped = text[1..].chars().next()?;
            let behind = &text[1 + escaped.len_utf8()..];
            let set = match escaped {
                'd' | 'w' | 's' => Set {
                    own: format!("\\{escaped}"),
                    other: format!("\\{}", escaped.to_ascii_uppercase()),
                },
                'D' | 'W' | 'S' => Set {
                    own: format!("\\{escaped}"),
                    other: format!("\\{}", escaped.to_ascii_lowercase()),
                },
                _ if escaped.is_alphanumeric() => return None,
                _ => literal(escaped),
            };
            (set, behind)
        }
        '^' | '$' | '.' | '|' | '?' | '*' | '+' | '(' | ')' | ']' | '{' | '}' => return None,
        _ => (literal(first), &text[first.len_utf8()..]),
    };
    let is_repeated = behind.starts_with(['*', '+', '?', '{']);
    (!is_repeated).then_some((set, behind))
}

fn literal(c: char) -> Set {
    let code = u32::from(c);
    Set {
        own: format!("\\x{{{code:x}}}"),
        other: format!("[^\\x{{{code:x}}}]"),
    }
}

/// The end of the class at the beginning of `text`.
fn class_end(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            ']' => return Some(at),
            _ => {}
        }
    }
    None
}
