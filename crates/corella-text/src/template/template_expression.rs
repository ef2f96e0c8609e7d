//! Expressions of templates with operators that differ between the template engine and Jinja2. They become calls of
//! functions:
//!
//! * `a % b` formats, if `a` is a string.
//! * `a ~ b` writes floats as Python does.
//! * `a + b` escapes one operand, if the other one is marked as safe.
//! * `a[b:c]` fails if `a` is `none` or undefined.
//! * `a.items`, not called, is the method of a mapping (`python_attribute`).
//! * `a < b` fails where Python has no order (`python_order`).
//! * `a in b` fails as in Python: `none` contains nothing, and a text contains only text.
//! * `a == b` costs fuel for the values in `a`, and `a + b` and `a * b` make no lazy list around another
//!   (`template_cost`).

use crate::python::python_attribute::{ATTRIBUTE, MAPPING_METHODS};
use crate::python::python_order::{OPERATORS, ORDER};
use crate::python::template_cost::{EQUALITY, WHOLE};

/// The functions that replace the operators.
pub const REMAINDER: &str = "corella_remainder";
pub const CONCATENATION: &str = "corella_concatenation";
pub const SAFE_SUM: &str = "corella_safe_sum";
pub const CONTAINMENT: &str = "corella_containment";
pub const SLICED: &str = "corella_sliced";

/// The deepest nesting of brackets. The engine refuses deeper ones.
const MAX_DEPTH: usize = 100;

#[derive(Clone, Copy, Debug)]
pub struct Token<'s> {
    pub text: &'s str,
    pub start: usize,
}

pub fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

fn is_string(text: &str) -> bool {
    text.starts_with(['\'', '"'])
}

/// The tokens before `close`, and the end of `close` in the text. A `close` within brackets does not count.
pub fn tokens_until<'s>(text: &'s str, close: &str) -> Option<(Vec<Token<'s>>, usize)> {
    const OPERATORS: [&str; 6] = ["==", "!=", "<=", ">=", "//", "**"];
    let mut tokens = Vec::new();
    let mut depth = 0_usize;
    let mut at = 0;
    loop {
        at = text.len() - text[at..].trim_start().len();
        let rest = &text[at..];
        if depth == 0 {
            let unsigned = rest.strip_prefix(['-', '+']).unwrap_or(rest);
            if unsigned.starts_with(close) {
                return Some((tokens, text.len() - unsigned.len() + close.len()));
            }
        }
        let first = rest.chars().next()?;
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let len = match first {
            '\'' | '"' => string_len(rest)?,
            c if c.is_ascii_digit() => number_len(rest),
            c if is_part(c) => rest.find(|c| !is_part(c)).unwrap_or(rest.len()),
            '(' | '[' | '{' => {
                depth += 1;
                1
            }
            ')' | ']' | '}' => {
                depth = depth.saturating_sub(1);
                1
            }
            _ if OPERATORS.iter().any(|operator| rest.starts_with(operator)) => 2,
            c => c.len_utf8(),
        };
        tokens.push(Token {
            text: &rest[..len],
            start: at,
        });
        at += len;
    }
}

fn string_len(text: &str) -> Option<usize> {
    let quote = text.as_bytes()[0];
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            byte if byte == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

fn number_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut len = 0;
    while let Some(byte) = bytes.get(len) {
        let goes_on = match byte {
            b'.' => is_digit(len + 1),
            b'-' | b'+' => bytes[len - 1].eq_ignore_ascii_case(&b'e') && is_digit(len + 1),
            byte => byte.is_ascii_alphanumeric() || *byte == b'_',
        };
        if !goes_on {
            break;
        }
        len += 1;
    }
    len
}

/// The expression with calls in place of operators; `None` if it needs no replacement, or is not an expression.
pub fn rewritten(tokens: &[Token<'_>]) -> Option<String> {
    rewrite(tokens, Parser::expression)
}

/// Like `rewritten`, for a place where commas may make a tuple.
pub fn rewritten_tuple(tokens: &[Token<'_>]) -> Option<String> {
    rewrite(tokens, Parser::tuple)
}

fn rewrite<'t>(
    tokens: &'t [Token<'t>],
    read: fn(&mut Parser<'t>) -> Option<Node>,
) -> Option<String> {
    let has = |operator: &str| tokens.iter().any(|token| token.text == operator);
    let names_method = tokens.iter().enumerate().any(|(at, token)| {
        let before = at.checked_sub(1).map(|at| tokens[at].text);
        let is_called = tokens.get(at + 1).is_some_and(|next| next.text == "(");
        before == Some(".") && MAPPING_METHODS.contains(&token.text) && !is_called
    });
    let rewritten = ["%", "~", "in", ":", "+", "*", "==", "!="].into_iter();
    let rewritten = rewritten.chain(OPERATORS);
    let has_any = rewritten.into_iter().any(has);
    if !has_any && !names_method {
        return None;
    }
    let mut parser = Parser {
        tokens,
        at: 0,
        depth: 0,
    };
    let node = read(&mut parser)?;
    (parser.at == tokens.len()).then_some(node.text)
}

const SAFE_FILTERS: [&str; 4] = ["safe", "escape", "e", "forceescape"];

/// A rewritten expression.
struct Node {
    text: String,
    /// Whether the expression is a string marked as safe.
    is_safe: bool,
    /// The kind of constant, if the expression is a single string or number of the source.
    constant: Option<Constant>,
}

#[derive(Clone, Copy, PartialEq)]
enum Constant {
    Text,
    Number,
}

impl Node {
    fn new(text: String) -> Self {
        Self {
            text,
            is_safe: false,
            constant: None,
        }
    }

    fn constant(text: String, constant: Constant) -> Self {
        Self {
            constant: Some(constant),
            ..Self::new(text)
        }
    }

    /// The text of an operand that may be a lazy list.
    fn whole(&self) -> String {
        match self.constant {
            None => format!("{WHOLE}({})", self.text),
            Some(_) => self.text.clone(),
        }
    }
}

/// Reads expressions as Jinja2's parser does.
struct Parser<'t> {
    tokens: &'t [Token<'t>],
    at: usize,
    depth: usize,
}

impl<'t> Parser<'t> {
    fn peek(&self) -> &'t str {
        self.tokens.get(self.at).map_or("", |token| token.text)
    }

    fn next(&mut self) -> Option<&'t str> {
        let token = self.tokens.get(self.at)?;
        self.at += 1;
        Some(token.text)
    }

    fn takes(&mut self, text: &str) -> bool {
        let is_next = self.peek() == text;
        self.at += usize::from(is_next);
        is_next
    }

    fn tuple(&mut self) -> Option<Node> {
        let first = self.expression()?;
        if self.peek() != "," {
            return Some(first);
        }
        let mut text = first.text;
        while self.takes(",") {
            if matches!(self.peek(), "" | ")") {
                text.push(',');
                break;
            }
            text = format!("{text}, {}", self.expression()?.text);
        }
        Some(Node::new(text))
    }

    fn expression(&mut self) -> Option<Node> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        let mut node = self.binary(0)?;
        while self.takes("if") {
            let condition = self.binary(0)?;
            let mut text = format!("{} if {}", node.text, condition.text);
            if self.takes("else") {
                text = format!("{text} else {}", self.expression()?.text);
            }
            node = Node::new(text);
        }
        self.depth -= 1;
        Some(node)
    }

    /// The operators of each level, in increasing precedence.
    fn binary(&mut self, level: usize) -> Option<Node> {
        const LEVELS: [&[&str]; 8] = [
            &["or"],
            &["and"],
            &["not"],
            &["==", "!=", "<", ">", "<=", ">=", "in", "not"],
            &["+", "-"],
            &["~"],
            &["*", "/", "//", "%"],
            &["**"],
        ];
        let Some(operators) = LEVELS.get(level) else {
            return self.unary(true);
        };
        if level == 2 {
            let mut num_negations = 0;
            while self.takes("not") {
                num_negations += 1;
            }
            let node = self.binary(3)?;
            return Some(match num_negations {
                0 => node,
                _ => Node::new("not ".repeat(num_negations) + &node.text),
            });
        }
        let mut left = self.binary(level + 1)?;
        // `a in b == c` compares neighbours, and is left to the engine.
        let is_comparison = level == 3;
        let mut chain = String::new();
        let mut num_operators = 0;
        while operators.contains(&self.peek()) {
            let mut operator = self.next()?.to_owned();
            if operator == "not" {
                if !self.takes("in") {
                    return None;
                }
                operator.push_str(" in");
            }
            let right = self.binary(level + 1)?;
            num_operators += 1;
            if is_comparison && num_operators == 1 {
                chain.clone_from(&left.text);
            }
            if is_comparison {
                chain = format!("{chain} {operator} {}", right.text);
            }
            left = match is_comparison && num_operators > 1 {
                true => Node::new(chain.clone()),
                false => joined(left, &operator, right),
            };
        }
        Some(left)
    }

    fn unary(&mut self, with_filter: bool) -> Option<Node> {
        if matches!(self.peek(), "-" | "+") {
            let sign = self.next()?;
            self.depth += 1;
            let operand = (self.depth <= MAX_DEPTH).then(|| self.unary(false))??;
            self.depth -= 1;
            let node = Node::new(format!("{sign}{}", operand.text));
            return match with_filter {
                true => self.filters(node),
                false => Some(node),
            };
        }
        let mut node = self.primary()?;
        node = self.postfix(node)?;
        match with_filter {
            true => self.filters(node),
            false => Some(node),
        }
    }

    fn primary(&mut self) -> Option<Node> {
        let token = self.next()?;
        match token {
            "(" => {
                if self.takes(")") {
                    return Some(Node::new("()".to_owned()));
                }
                let inner = self.tuple()?;
                let text = format!("({})", inner.text);
                let is_safe = inner.is_safe;
                self.takes(")").then_some(Node {
                    is_safe,
                    ..Node::new(text)
                })
            }
            "[" => self
                .listed("]", |parser| Some(parser.expression()?.text))
                .map(|items| Node::new(format!("[{items}]"))),
            "{" => {
                let member = |parser: &mut Self| {
                    let key = parser.expression()?.text;
                    let value = parser.takes(":").then(|| parser.expression())??.text;
                    Some(format!("{key}: {value}"))
                };
                self.listed("}", member)
                    .map(|members| Node::new(format!("{{{members}}}")))
            }
            string if is_string(string) => {
                let mut text = string.to_owned();
                while is_string(self.peek()) {
                    text = format!("{text} {}", self.next()?);
                }
                Some(Node::constant(text, Constant::Text))
            }
            "not" | "if" | "else" | "and" | "or" | "in" | "is" => None,
            number if number.starts_with(|c: char| c.is_ascii_digit()) => {
                Some(Node::constant(number.to_owned(), Constant::Number))
            }
            name if is_name(name) => Some(Node::new(name.to_owned())),
            _ => None,
        }
    }

    /// The expressions between brackets, up to the closing one, separated by commas.
    fn listed(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Option<String>,
    ) -> Option<String> {
        let mut items = Vec::new();
        loop {
            if self.takes(close) {
                return Some(items.join(", "));
            }
            if !items.is_empty() && !self.takes(",") {
                return None;
            }
            if self.takes(close) {
                return Some(items.join(", "));
            }
            items.push(item(self)?);
        }
    }

    fn postfix(&mut self, mut node: Node) -> Option<Node> {
        loop {
            if self.takes(".") {
                let name = self.next()?;
                let is_method = MAPPING_METHODS.contains(&name) && self.peek() != "(";
                node = Node::new(match is_method {
                    true => format!("{ATTRIBUTE}({}, '{name}')", node.text),
                    false => format!("{}.{name}", node.text),
                });
            } else if self.takes("[") {
                let (index, is_slice) = self.subscript()?;
                node = Node::new(match is_slice {
                    true => format!("{SLICED}({})[{index}]", node.text),
                    false => format!("{}[{index}]", node.text),
                });
            } else if self.takes("(") {
                node = Node::new(format!("{}({})", node.text, self.arguments()?));
            } else {
                return Some(node);
            }
        }
    }

    /// The expressions between square brackets after a value, and whether they are a slice.
    fn subscript(&mut self) -> Option<(String, bool)> {
        let mut text = String::new();
        let mut is_slice = false;
        loop {
            match self.peek() {
                "]" => {
                    self.at += 1;
                    return Some((text, is_slice));
                }
                separator @ (":" | ",") => {
                    self.at += 1;
                    is_slice |= separator == ":";
                    text.push_str(separator);
                }
                _ => text.push_str(&self.expression()?.text),
            }
        }
    }

    fn arguments(&mut self) -> Option<String> {
        self.listed(")", |parser| {
            let mut text = String::new();
            while matches!(parser.peek(), "*" | "**") {
                text.push_str(parser.next()?);
            }
            let behind = parser.tokens.get(parser.at + 1);
            if is_name(parser.peek()) && behind.is_some_and(|token| token.text == "=") {
                text = format!("{}=", parser.next()?);
                parser.at += 1;
            }
            Some(text + &parser.expression()?.text)
        })
    }

    /// Reads filters and tests, which bind more tightly than every operator.
    fn filters(&mut self, mut node: Node) -> Option<Node> {
        loop {
            if self.takes("|") {
                let name = self.dotted_name()?;
                let mut text = format!("{}|{name}", node.text);
                if self.takes("(") {
                    text = format!("{text}({})", self.arguments()?);
                }
                let is_safe = SAFE_FILTERS.contains(&name.as_str());
                node = Node {
                    is_safe,
                    ..Node::new(text)
                };
            } else if self.takes("is") {
                let negation = if self.takes("not") { "not " } else { "" };
                let name = self.dotted_name()?;
                let mut text = format!("{} is {negation}{name}", node.text);
                if self.takes("(") {
                    text = format!("{text}({})", self.arguments()?);
                } else if self.begins_argument() {
                    let argument = self.primary()?;
                    text = format!("{text} {}", self.postfix(argument)?.text);
                }
                node = Node::new(text);
            } else if self.takes("(") {
                node = Node::new(format!("{}({})", node.text, self.arguments()?));
            } else {
                return Some(node);
            }
        }
    }

    /// Whether the argument of a test comes next. Such an argument needs no brackets.
    fn begins_argument(&self) -> bool {
        let next = self.peek();
        let is_keyword = ["else", "or", "and", "is", "if", "in", "not"].contains(&next);
        let is_value = next.starts_with(|c: char| c.is_alphanumeric() || "_'\"[{".contains(c));
        is_value && !is_keyword
    }

    fn dotted_name(&mut self) -> Option<String> {
        let mut name = self.next()?.to_owned();
        if !is_name(&name) {
            return None;
        }
        while self.takes(".") {
            name = format!("{name}.{}", self.next()?);
        }
        Some(name)
    }
}

fn joined(left: Node, operator: &str, right: Node) -> Node {
    let (a, b) = (&left.text, &right.text);
    let constants = [left.constant, right.constant];
    let is_variable = constants == [None, None];
    let has_text = constants.contains(&Some(Constant::Text));
    match operator {
        "%" => Node::new(format!("{REMAINDER}({a}, {b})")),
        "~" => Node::new(format!("{CONCATENATION}({a}, {b})")),
        "in" => Node::new(format!("{CONTAINMENT}({a}, {b})")),
        "<" | ">" | "<=" | ">=" => Node::new(format!("{ORDER}({a}, '{operator}', {b})")),
        "not in" => Node::new(format!("(not {CONTAINMENT}({a}, {b}))")),
        "+" if left.is_safe || right.is_safe => Node {
            is_safe: true,
            ..Node::new(format!("{SAFE_SUM}({a}, {b})"))
        },
        "==" | "!=" if is_variable => Node::new(format!("{EQUALITY}({a}, '{operator}', {b})")),
        "+" if is_variable => Node::new(format!("{} + {}", left.whole(), right.whole())),
        // A number may be a factor of a list.
        "*" if !has_text => Node::new(format!("{} * {}", left.whole(), right.whole())),
        operator => Node::new(format!("{a} {operator} {b}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(expression: &str) -> Option<String> {
        let text = format!("{expression} }}}}");
        let (tokens, _) = tokens_until(&text, "}}")?;
        rewritten_tuple(&tokens)
    }

    #[test]
    fn operators_become_calls() {
        let cases = [
            ("a % b", "corella_remainder(a, b)"),
            (
                "a * b % c - d",
                "corella_remainder(corella_whole(a) * corella_whole(b), c) - d",
            ),
            ("a % 2 == 0 and b", "corella_remainder(a, 2) == 0 and b"),
            ("'%s' % (a, b)", "corella_remainder('%s', (a, b))"),
            ("-a % -2 | abs", "corella_remainder(-a, -2|abs)"),
            (
                "a ~ b ~ c",
                "corella_concatenation(corella_concatenation(a, b), c)",
            ),
            (
                "a + b ~ c",
                "corella_whole(a) + corella_whole(corella_concatenation(b, c))",
            ),
            ("a + 1 == 'b'", "a + 1 == 'b'"),
            ("'-' * b + 'c'", "'-' * b + 'c'"),
            (
                "a * 2 + b != c",
                "corella_equality(corella_whole(corella_whole(a) * 2) + corella_whole(b), '!=', c)",
            ),
            ("a < b < c", "a < b < c"),
            ("a == b in c % d", "a == b in corella_remainder(c, d)"),
            (
                "a ~ (b if c is not none else d[1:-1].e(f, g=h)|i('x'))",
                "corella_concatenation(a, (b if c is not none else corella_sliced(d)[1:-1].e(f, g=h)|i('x')))",
            ),
            (
                "[a ~ 'b', {'c': d % 1.5}]",
                "[corella_concatenation(a, 'b'), {'c': corella_remainder(d, 1.5)}]",
            ),
            (
                "'a'|safe + b + c",
                "corella_safe_sum(corella_safe_sum('a'|safe, b), c)",
            ),
            (
                "not a is divisibleby 3 or b not in c ~ d",
                "not a is divisibleby 3 or (not corella_containment(b, corella_concatenation(c, d)))",
            ),
            ("a ~ b, c", "corella_concatenation(a, b), c"),
            (
                "a.items.b or c.items() and d < e + 1",
                "corella_attribute(a, 'items').b or c.items() and corella_order(d, '<', e + 1)",
            ),
        ];
        for (expression, expected) in cases {
            assert_eq!(new(expression).as_deref(), Some(expected), "{expression}");
        }
    }

    #[test]
    fn what_is_no_expression_stays() {
        for expression in [
            "a - b",
            "a ~",
            "~ a",
            "a ~ b c",
            "a % (b",
            "'~'",
            "a ~ if",
            "a is ~ b",
            "a.items()",
        ] {
            assert_eq!(new(expression), None, "{expression}");
        }
        let deep = format!("{}a ~ b{}", "(".repeat(10_000), ")".repeat(10_000));
        assert_eq!(new(&deep), None);
    }
}
