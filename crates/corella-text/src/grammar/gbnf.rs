//! Translates grammars from GBNF, llama.cpp's notation, to Lark's.
//!
//! Recursive rules, and rules that use them, become rules of Lark. All others become terminals. A terminal is one
//! regular expression, which takes little work for a mask, and it matches as much text as it can.

use std::collections::HashMap;

use crate::GrammarError;

/// Whether a grammar is in GBNF, which has lines that begin with a name and `::=`.
pub(crate) fn is_gbnf(grammar: &str) -> bool {
    let begins_rule = |line: &str| {
        let line = line.trim_start();
        let behind = line.trim_start_matches(is_of_name);
        behind.len() < line.len() && behind.trim_start().starts_with(DEFINITION)
    };
    grammar.lines().any(begins_rule)
}

/// Returns the grammar in Lark's notation.
///
/// # Errors
/// The first mistake, with its line.
pub(crate) fn in_lark(gbnf: &str) -> Result<String, GrammarError> {
    let mut parser = Parser {
        rest: gbnf,
        ids: HashMap::new(),
        rules: Vec::new(),
    };
    let parsed = parser.parse();
    parsed.map_err(|reason| {
        let before = &gbnf[..gbnf.len() - parser.rest.len()];
        let line = 1 + before.matches('\n').count();
        GrammarError::at_root(format!("line {line}: {reason}"))
    })?;
    let root = parser.rule("root");
    let is_undefined = |rule: &&Rule| rule.pieces.is_none();
    match parser.rules.iter().find(is_undefined) {
        Some(Rule { name, .. }) => Err(GrammarError::at_root(format!("it has no rule `{name}`"))),
        None => Ok(written(&parser.rules, root)),
    }
}

const DEFINITION: &str = "::=";

struct Rule<'a> {
    /// Empty for a group in brackets.
    name: &'a str,
    /// Absent until the rule is defined.
    pieces: Option<Vec<Piece>>,
}

enum Piece {
    /// A text in Lark's notation.
    Text(String),
    /// A class of characters, as the inner text of a regular expression.
    Class(String),
    /// A reference to a rule by its index.
    Rule(usize),
}

struct Parser<'a> {
    rest: &'a str,
    ids: HashMap<&'a str, usize>,
    rules: Vec<Rule<'a>>,
}

impl<'a> Parser<'a> {
    fn parse(&mut self) -> Result<(), String> {
        self.skip_space();
        while !self.rest.is_empty() {
            let name = self.take_name();
            self.skip_space();
            if name.is_empty() || !self.take(DEFINITION) {
                return Err("a rule must begin as `name ::=` does".to_owned());
            }
            let rule = self.rule(name);
            if self.rules[rule].pieces.is_some() {
                return Err(format!("the rule `{name}` is there twice"));
            }
            let pieces = self.alternatives()?;
            if self.rest.starts_with(')') {
                return Err("`)` closes no bracket".to_owned());
            }
            self.rules[rule].pieces = Some(pieces);
        }
        Ok(())
    }

    /// Reads up to the next rule, a closing bracket, or the end.
    fn alternatives(&mut self) -> Result<Vec<Piece>, String> {
        let mut pieces = Vec::new();
        let mut can_repeat = false;
        loop {
            self.skip_space();
            let Some(first) = self.rest.chars().next() else {
                return Ok(pieces);
            };
            let piece = match first {
                ')' => return Ok(pieces),
                '|' => {
                    self.take("|");
                    pieces.push(Piece::Text("|".to_owned()));
                    can_repeat = false;
                    continue;
                }
                '*' | '+' | '?' | '{' => {
                    let count = self.count()?;
                    match pieces.last_mut().filter(|_| can_repeat) {
                        None => return Err(format!("`{count}` repeats nothing")),
                        Some(Piece::Class(class)) => class.push_str(&count),
                        Some(_) => pieces.push(Piece::Text(count)),
                    }
                    can_repeat = false;
                    continue;
                }
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.take(".");
                    Piece::Class(ANY.to_owned())
                }
                '(' => self.group()?,
                first if is_of_name(first) => {
                    let before = self.rest;
                    let name = self.take_name();
                    self.skip_space();
                    if self.rest.starts_with(DEFINITION) {
                        self.rest = before;
                        return Ok(pieces);
                    }
                    Piece::Rule(self.rule(name))
                }
                first => return Err(format!("`{first}` has no meaning here")),
            };
            pieces.push(piece);
            can_repeat = true;
        }
    }

    fn group(&mut self) -> Result<Piece, String> {
        self.take("(");
        let pieces = Some(self.alternatives()?);
        if !self.take(")") {
            return Err("a bracket `(` is not closed".to_owned());
        }
        self.rules.push(Rule { name: "", pieces });
        Ok(Piece::Rule(self.rules.len() - 1))
    }

    /// Reads `*`, `+`, `?`, or numbers in braces.
    fn count(&mut self) -> Result<String, String> {
        let length = match self.rest.starts_with('{') {
            false => 1,
            true => 1 + self.rest.find('}').ok_or("a brace `{` is not closed")?,
        };
        let count = &self.rest[..length];
        let is_count = |c: char| c.is_ascii_digit() || "{,} *+?".contains(c);
        if !count.chars().all(is_count) {
            return Err(format!("`{count}` must have numbers, as `{{2,4}}` has"));
        }
        self.rest = &self.rest[length..];
        Ok(count.replace(' ', "").replace("{,", "{0,"))
    }

    fn literal(&mut self) -> Result<Piece, String> {
        self.take("\"");
        let mut text = String::new();
        while !self.take("\"") {
            text.push(self.character()?);
        }
        let quoted = serde_json::Value::from(text).to_string();
        // Lark's parser takes no control character in a text.
        Ok(Piece::Text(quoted.replace('\u{7f}', "\\u007f")))
    }

    fn class(&mut self) -> Result<Piece, String> {
        self.take("[");
        let is_negated = self.take("^");
        let mut ranges = String::new();
        while !self.take("]") {
            let first = self.character()?;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            let last = match is_range && self.take("-") {
                true => self.character()?,
                false => first,
            };
            if first > last {
                return Err(format!("the range `{first}-{last}` goes down"));
            }
            let [first, last] = [first, last].map(u32::from);
            ranges += &format!("\\u{{{first:x}}}-\\u{{{last:x}}}");
        }
        match (ranges.is_empty(), is_negated) {
            (true, false) => Err("the class `[]` has no character".to_owned()),
            (true, true) => Ok(Piece::Class(ANY.to_owned())),
            (false, true) => Ok(Piece::Class(format!("[^{ranges}]"))),
            (false, false) => Ok(Piece::Class(format!("[{ranges}]"))),
        }
    }

    /// Reads a character of a text or a class, which may be escaped.
    fn character(&mut self) -> Result<char, String> {
        let first = self.next_char()?;
        if first != '\\' {
            return Ok(first);
        }
        let num_digits = match self.next_char()? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other if other.is_ascii_punctuation() => return Ok(other),
            other => return Err(format!("`\\{other}` is no escape of GBNF")),
        };
        let digits = self.rest.get(..num_digits).unwrap_or_default();
        let code = u32::from_str_radix(digits, 16)
            .ok()
            .and_then(char::from_u32);
        let escaped = code.ok_or_else(|| format!("`{digits}` is no code of a character"))?;
        self.rest = &self.rest[num_digits..];
        Ok(escaped)
    }

    fn next_char(&mut self) -> Result<char, String> {
        let next = self
            .rest
            .chars()
            .next()
            .ok_or("a text or class does not end")?;
        self.rest = &self.rest[next.len_utf8()..];
        Ok(next)
    }

    fn take(&mut self, text: &str) -> bool {
        let behind = self.rest.strip_prefix(text);
        self.rest = behind.unwrap_or(self.rest);
        behind.is_some()
    }

    fn take_name(&mut self) -> &'a str {
        let behind = self.rest.trim_start_matches(is_of_name);
        let name = &self.rest[..self.rest.len() - behind.len()];
        self.rest = behind;
        name
    }

    /// Skips comments, too.
    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
        while self.rest.starts_with('#') {
            let end = self.rest.find('\n').unwrap_or(self.rest.len());
            self.rest = self.rest[end..].trim_start();
        }
    }

    fn rule(&mut self, name: &'a str) -> usize {
        let next = self.rules.len();
        let rule = *self.ids.entry(name).or_insert(next);
        if rule == next {
            self.rules.push(Rule { name, pieces: None });
        }
        rule
    }
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// The class of all characters.
const ANY: &str = "[\\u{0}-\\u{10ffff}]";

/// Writes the rules with new names, because in Lark the case of the letters tells terminals from rules.
fn written(rules: &[Rule], root: usize) -> String {
    let is_terminal = terminals(rules);
    let name = |rule: usize| match is_terminal[rule] {
        true => format!("T{rule}"),
        false => format!("r{rule}"),
    };
    let mut lark = format!("start: {}\n", name(root));
    for (rule, Rule { pieces, .. }) in rules.iter().enumerate() {
        lark += &format!("{}:", name(rule));
        for piece in pieces.iter().flatten() {
            lark.push(' ');
            match piece {
                Piece::Text(text) => lark += text,
                Piece::Class(class) => lark += &format!("/{class}/"),
                Piece::Rule(other) => lark += &name(*other),
            }
        }
        lark.push('\n');
    }
    lark
}

/// Returns for each rule whether it becomes a terminal: it is not recursive, and uses only terminals.
fn terminals(rules: &[Rule]) -> Vec<bool> {
    let mut users = vec![Vec::new(); rules.len()];
    let mut num_open = vec![0; rules.len()];
    for (rule, Rule { pieces, .. }) in rules.iter().enumerate() {
        for piece in pieces.iter().flatten() {
            if let Piece::Rule(used) = piece {
                users[*used].push(rule);
                num_open[rule] += 1;
            }
        }
    }
    let mut is_terminal = vec![false; rules.len()];
    let mut found: Vec<usize> = (0..rules.len())
        .filter(|&rule| num_open[rule] == 0)
        .collect();
    while let Some(rule) = found.pop() {
        is_terminal[rule] = true;
        for &user in &users[rule] {
            num_open[user] -= 1;
            if num_open[user] == 0 {
                found.push(user);
            }
        }
    }
    is_terminal
}
