//! Finds code that sleeps or compares times.
//!
//! Code is cut into statements, and these at commas and logical operators into pieces. Variables with points in time or
//! lengths of time are followed within a function. Fields and other functions are not followed, except functions of a
//! Python file that return a length of time.

/// An operation that a test should avoid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timing {
    Sleep,
    Comparison,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language {
    Rust,
    Python,
}

const COMPARISONS: [&str; 4] = [" < ", " > ", " <= ", " >= "];

/// Returns the lines that sleep or compare times, in code without comments and literals.
pub fn timings(code: &str, language: Language) -> Vec<(usize, Timing)> {
    // Line breaks become spaces, so that line ends do not change a comparison's form.
    let flat = code.replace(['\n', '\t'], " ");
    let statements = language.statements(code);
    let mut known = Known {
        measuring: measuring_functions(&flat, &statements, language),
        ..Known::default()
    };
    let mut found = Vec::new();
    for &(start, end) in &statements {
        let statement = &flat[start..end];
        if language.begins_scope(statement) {
            known.instants.clear();
            known.lengths.clear();
            // The clock of such a test only moves when all tasks wait.
            known.is_virtual = statement.contains("start_paused = true");
        }
        if known.is_virtual {
            continue;
        }
        for at in language.sleeps(statement) {
            found.push((start + at, Timing::Sleep));
        }
        for at in comparisons(statement, &known, language) {
            found.push((start + at, Timing::Comparison));
        }
        known.learn(statement, language);
    }
    let line = |at: usize| 1 + code[..at].matches('\n').count();
    let mut lines: Vec<(usize, Timing)> = found
        .into_iter()
        .map(|(at, timing)| (line(at), timing))
        .collect();
    lines.sort();
    lines.dedup();
    lines
}

/// Names of variables and functions with times.
#[derive(Default)]
struct Known {
    /// Variables that hold points in time.
    instants: Vec<String>,
    /// Variables that hold lengths of time.
    lengths: Vec<String>,
    /// Functions that return lengths of time.
    measuring: Vec<String>,
    /// Whether the function's clock is virtual.
    is_virtual: bool,
}

impl Known {
    /// Records a statement's assignments, or additions to a list.
    fn learn(&mut self, statement: &str, language: Language) {
        let length = self.length(statement, language);
        for method in [".push(", ".append("] {
            if let (Some(at), Some(_)) = (statement.find(method), length) {
                self.lengths
                    .extend(last_word(&statement[..at]).map(str::to_owned));
            }
        }
        let Some((names, value)) = language.assignment(statement) else {
            return;
        };
        if self.length(value, language).is_some() {
            self.lengths.extend(names);
        } else if language.is_instant(value) {
            self.instants.extend(names);
        }
    }

    /// Returns the place of a length of time in an expression.
    fn length(&self, text: &str, language: Language) -> Option<usize> {
        let direct = language
            .lengths()
            .iter()
            .filter_map(|term| text.find(term))
            .min();
        let variable = self
            .lengths
            .iter()
            .find_map(|name| words(text, name).next());
        let call = self
            .measuring
            .iter()
            .find_map(|name| words(text, name).find(|at| text[at + name.len()..].starts_with('(')));
        direct
            .or(variable)
            .or(call)
            .or_else(|| self.difference(text, language))
    }

    /// Returns the place of a subtraction from or of a point in time.
    fn difference(&self, text: &str, language: Language) -> Option<usize> {
        let is_taken_from = |end: usize| text[end..].starts_with(" - ");
        let is_taken = |start: usize| {
            let path = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ':');
            text[..start].trim_end_matches(path).ends_with(" - ")
        };
        let clocks = language.clocks().iter().flat_map(|clock| {
            text.match_indices(clock)
                .map(|(at, _)| (at, at + clock.len()))
        });
        let variables = self
            .instants
            .iter()
            .flat_map(|name| words(text, name).map(|at| (at, at + name.len())));
        let mut all = clocks.chain(variables);
        all.find(|&(start, end)| is_taken_from(end) || is_taken(start))
            .map(|(start, _)| start)
    }

    /// Returns the place of a comparison with a time on one of its sides.
    fn compared(&self, piece: &str, language: Language) -> Option<usize> {
        let clock = || language.clocks().iter().find_map(|clock| piece.find(clock));
        let instant = || {
            let sides = COMPARISONS.iter().flat_map(|operator| {
                piece.match_indices(operator).flat_map(|(at, _)| {
                    let left = last_word(&piece[..at]);
                    let right = first_word(&piece[at + operator.len()..]);
                    [(at, left), (at, right)]
                })
            });
            let mut sides = sides.filter_map(|(at, word)| Some((at, word?)));
            sides
                .find(|(_, word)| self.instants.iter().any(|name| name == word))
                .map(|(at, _)| at)
        };
        self.length(piece, language).or_else(clock).or_else(instant)
    }
}

/// Returns the places where a statement compares times.
fn comparisons(statement: &str, known: &Known, language: Language) -> Vec<usize> {
    let mut found = Vec::new();
    for (start, end) in language.pieces(statement) {
        let piece = &statement[start..end];
        if COMPARISONS.iter().any(|operator| piece.contains(operator)) {
            found.extend(known.compared(piece, language).map(|at| start + at));
        }
    }
    // An assertion may lack an operator: it may ask whether a range contains the time.
    for (start, end) in language.asserted(statement) {
        let length = known.length(&statement[start..end], language);
        found.extend(length.map(|at| start + at));
    }
    found
}

/// Returns the functions of a Python file that return a length of time.
fn measuring_functions(
    flat: &str,
    statements: &[(usize, usize)],
    language: Language,
) -> Vec<String> {
    let mut functions = Vec::new();
    if language == Language::Rust {
        return functions;
    }
    let mut function = None;
    let mut known = Known::default();
    for &(start, end) in statements {
        let statement = &flat[start..end];
        if let Some(at) = words(statement, "def").next() {
            function = first_word(&statement[at + 3..]);
            known = Known::default();
        }
        let value = statement.trim_start().strip_prefix("return ");
        if value.is_some_and(|value| known.length(value, language).is_some()) {
            functions.extend(function.map(str::to_owned));
        }
        known.learn(statement, language);
    }
    functions
}

impl Language {
    /// Calls that return a point in time.
    fn clocks(self) -> &'static [&'static str] {
        match self {
            Self::Rust => &["Instant::now()", "SystemTime::now()", "thread_time()"],
            Self::Python => &[
                "monotonic()",
                "perf_counter()",
                "process_time()",
                "time.time()",
                "monotonic_ns()",
                "perf_counter_ns()",
                "time_ns()",
            ],
        }
    }

    /// Calls that return a length of time.
    fn lengths(self) -> &'static [&'static str] {
        match self {
            Self::Rust => &[".elapsed()", "duration_since("],
            Self::Python => &[],
        }
    }

    /// Returns the places where a statement sleeps. A Python task that sleeps for 0 only lets others run.
    fn sleeps(self, statement: &str) -> Vec<usize> {
        let names: &[&str] = match self {
            Self::Rust => &["sleep", "sleep_until", "sleep_ms"],
            Self::Python => &["sleep", "wait_for_timeout"],
        };
        let calls = names.iter().flat_map(|name| {
            words(statement, name).filter(|at| {
                let rest = &statement[at + name.len()..];
                let before = statement[..*at].trim_end();
                rest.starts_with('(')
                    && !(self == Self::Python && rest.starts_with("(0)"))
                    && !["fn", "def"].contains(&last_word(before).unwrap_or_default())
            })
        });
        calls.collect()
    }

    /// Returns the bounds of statements: in Rust at semicolons and braces, in Python at line ends outside parentheses.
    fn statements(self, code: &str) -> Vec<(usize, usize)> {
        let mut statements = Vec::new();
        let (mut start, mut depth) = (0, 0usize);
        for (at, byte) in code.bytes().enumerate() {
            let ends = match (self, byte) {
                (Self::Rust, b';' | b'{' | b'}') => true,
                (Self::Python, b'\n' | b';') => depth == 0,
                _ => false,
            };
            match byte {
                b'(' | b'[' | b'{' => depth += 1,
                b')' | b']' | b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if ends {
                statements.push((start, at));
                start = at + 1;
            }
        }
        statements.push((start, code.len()));
        statements
    }

    /// Returns the parts of a statement between commas and logical operators.
    fn pieces(self, statement: &str) -> Vec<(usize, usize)> {
        let separators: &[&str] = match self {
            Self::Rust => &[",", "&&", "||"],
            Self::Python => &[",", " and ", " or "],
        };
        let mut cuts: Vec<(usize, usize)> = separators
            .iter()
            .flat_map(|separator| statement.match_indices(separator))
            .map(|(at, separator)| (at, at + separator.len()))
            .collect();
        cuts.sort();
        let mut start = 0;
        let mut pieces = Vec::new();
        for (end, next) in cuts {
            // Two operators may share a space.
            pieces.push((start, end.max(start)));
            start = next;
        }
        pieces.push((start, statement.len()));
        pieces
    }

    /// Returns the conditions that a statement asserts, without the message.
    fn asserted(self, statement: &str) -> Vec<(usize, usize)> {
        if self == Self::Python {
            let start = statement.len() - statement.trim_start().len();
            let rest = statement[start..].strip_prefix("assert ");
            return rest
                .map(|rest| (statement.len() - rest.len(), 1))
                .map(|(start, num)| (start, arguments_end(statement, start, num)))
                .into_iter()
                .collect();
        }
        let macros = [("assert!(", 1), ("assert_eq!(", 2), ("assert_ne!(", 2)];
        let calls = macros.iter().flat_map(|&(name, num)| {
            statement.match_indices(name).map(move |(at, _)| {
                let start = at + name.len();
                (start, arguments_end(statement, start, num))
            })
        });
        calls.collect()
    }

    /// Returns the names that a statement assigns to, and the value.
    fn assignment(self, statement: &str) -> Option<(Vec<String>, &str)> {
        let (pattern, value) = statement.split_once(" = ")?;
        let pattern = match self {
            Self::Rust => &pattern[words(pattern, "let").last()? + 3..],
            Self::Python => pattern,
        };
        let pattern = pattern.split(':').next().unwrap_or_default();
        let names = pattern.split(|c: char| !is_word(c)).filter(|name| {
            name.starts_with(|c: char| c.is_lowercase() || c == '_')
                && !["mut", "ref"].contains(name)
        });
        Some((names.map(str::to_owned).collect(), value))
    }

    /// Returns whether a value begins with a point in time, and so is one, or a tuple of several.
    fn is_instant(self, value: &str) -> bool {
        let value = value.trim_start().trim_start_matches('(');
        let path = |c: char| is_word(c) || matches!(c, ':' | '.');
        self.clocks().iter().any(|clock| {
            value
                .find(clock)
                .is_some_and(|at| value[..at].chars().all(path))
        })
    }

    /// Returns whether a statement is the head of a function. In Python, an inner function inherits the known names of
    /// the outer one.
    fn begins_scope(self, statement: &str) -> bool {
        match self {
            Self::Rust => words(statement, "fn").next().is_some(),
            Self::Python => {
                let statement = statement.strip_prefix("    ").unwrap_or(statement);
                ["def ", "async def ", "class "]
                    .iter()
                    .any(|word| statement.starts_with(word))
            }
        }
    }
}

/// Returns the end of this many arguments from `start` on.
fn arguments_end(text: &str, start: usize, num_arguments: usize) -> usize {
    let (mut depth, mut left) = (0usize, num_arguments);
    for (at, byte) in text.bytes().enumerate().skip(start) {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' if depth == 0 => return at,
            b')' | b']' | b'}' => depth -= 1,
            b',' if depth == 0 => {
                left -= 1;
                if left == 0 {
                    return at;
                }
            }
            _ => {}
        }
    }
    text.len()
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Returns the places of a whole word in a text.
fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let places = text.match_indices(word).map(|(at, _)| at);
    places.filter(move |at| {
        !text[..*at].ends_with(is_word) && !text[at + word.len()..].starts_with(is_word)
    })
}

/// Returns the word at the end of a text, if any.
fn last_word(text: &str) -> Option<&str> {
    let start = text.trim_end_matches(is_word).len();
    (start < text.len()).then(|| &text[start..])
}

/// Returns the word at the beginning of a text, after spaces and references.
fn first_word(text: &str) -> Option<&str> {
    let text = text.trim_start_matches([' ', '&', '*']);
    let end = text.find(|c| !is_word(c)).unwrap_or(text.len());
    (end > 0).then(|| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rust(body: &str) -> Vec<(usize, Timing)> {
        timings(&format!("fn test() {{ {body} }}"), Language::Rust)
    }

    fn python(text: &str) -> Vec<(usize, Timing)> {
        timings(text, Language::Python)
    }

    #[test]
    fn rust_that_sleeps_is_found() {
        for body in [
            "std::thread::sleep(PAUSE);",
            "tokio::time::sleep(PAUSE).await;",
            "sleep_until(deadline).await;",
            "let pause = sleep(PAUSE);",
        ] {
            assert_eq!(rust(body), [(1, Timing::Sleep)], "{body}");
        }
        for body in [
            "node.asleep(1);",
            "fn sleep(a: u8) {}",
            "let sleep = 1;",
            "a.sleepy()",
        ] {
            assert!(rust(body).is_empty(), "{body}");
        }
    }

    #[test]
    fn rust_that_compares_times_is_found() {
        for body in [
            "assert!(start.elapsed() < LIMIT);",
            "assert!(LIMIT > start.elapsed(),     );",
            "while start.elapsed() < pause && !is_over() { f(); }",
            "if start.elapsed()\n    >= LIMIT { f(); }",
            "assert!((LEAST..MOST).contains(&start.elapsed()));",
            "assert_eq!(start.elapsed().as_secs(), 0);",
            "assert!(Instant::now() < deadline);",
            "let now = Instant::now(); assert!(is_over && now >= deadline);",
            "let now = Instant::now(); assert!(deadline <= now);",
            "let waited = at.elapsed(); let other = 1; assert!(other == 1 && waited < LIMIT);",
            "let late = Instant::now().duration_since(deadline); assert!(late < LIMIT);",
            "let (wall, other) = (Instant::now(), 0); assert!(f() - wall < LIMIT);",
            "let rate = 5.0 / at.elapsed().as_secs_f64(); assert!(rate > 3.0);",
            "assert!(thread_time() - start < LIMIT);",
            "times.push(at.elapsed()); assert!(times.iter().max() < LIMIT);",
            "assert!(most(start.elapsed(), 3) < LIMIT);",
        ] {
            let found = rust(body);
            assert_eq!(found.len(), 1, "{body} gave {found:?}");
            assert_eq!(found[0].1, Timing::Comparison);
        }
    }

    #[test]
    fn rust_may_use_times_otherwise() {
        for body in [
            "let end = Instant::now() + LONG; load(end);",
            "println(start.elapsed());",
            "assert!(num < 3, start.elapsed());",
            "assert_eq!(num, 3, start.elapsed());",
            "let now = Instant::now(); assert!(log.is_due(now)); assert_eq!(log.take(5, now), 5);",
            "let meter = Meter::new(Instant::now()); assert!(meter.rate() < 3.0);",
            "file.set_modified(SystemTime::now() - DAY); assert!(num < 3);",
            "f(Instant::now(), 3 < 4);",
            "let waited = at.elapsed(); } fn other() { assert!(waited < 3);",
            "let f: fn(u8) -> Vec<u8> = |x| vec![x]; let y = start.elapsed();",
        ] {
            assert!(rust(body).is_empty(), "{body} gave {:?}", rust(body));
        }
    }

    #[test]
    fn a_paused_clock_may_be_looked_at() {
        let test = "#[tokio::test(start_paused = true)] async fn a() { sleep(LONG).await; }";
        assert!(timings(test, Language::Rust).is_empty());
        let other = format!("{test} fn b() {{ sleep(LONG); }}");
        assert_eq!(timings(&other, Language::Rust).len(), 1);
    }

    #[test]
    fn lines_are_those_of_the_sleep_and_of_the_time() {
        let code = "fn f() {\n    assert!(\n        is_over\n            && start.elapsed()\n                < LIMIT\n    );\n    sleep(PAUSE);\n}\n";
        let found = [(4, Timing::Comparison), (7, Timing::Sleep)];
        assert_eq!(timings(code, Language::Rust), found);
    }

    #[test]
    fn python_that_sleeps_is_found() {
        for text in [
            "time.sleep(1)",
            "await asyncio.sleep(0.5)",
            "page.wait_for_timeout(300)",
        ] {
            assert_eq!(python(text), [(1, Timing::Sleep)], "{text}");
        }
        for text in ["await asyncio.sleep(0)", "def sleep(a):", "asleep(1)"] {
            assert!(python(text).is_empty(), "{text}");
        }
    }

    #[test]
    fn python_that_compares_times_is_found() {
        for text in [
            "assert time.monotonic() - start < 3",
            "assert 1 <= time.monotonic() - start < 30",
            "while not over and time.monotonic() < deadline:",
            "start = time.perf_counter()\nassert is_over and end > start",
            "start = monotonic()\nwaited = f() - start\nassert waited < 3, waited",
            "times.append(time.monotonic() - at)\nassert sorted(times)[1] < 3",
            "assert (\n    time.time()\n    < deadline\n)",
            "def measure():\n    start = monotonic()\n    return end() - start\n\ndef test():\n    assert measure() < 1",
            "waited = time.monotonic() - start\nassert waited == approx(1)",
        ] {
            let found = python(text);
            assert_eq!(found.len(), 1, "{text} gave {found:?}");
            assert_eq!(found[0].1, Timing::Comparison);
        }
    }

    #[test]
    fn python_may_use_times_otherwise() {
        for text in [
            "deadline = time.monotonic() + 3\nget(timeout=deadline - time.monotonic())",
            "assert num < 3, time.monotonic() - start",
            "log(time.monotonic() - start)",
            "begun = time.time_ns()\nassert spans[0] == begun",
            "def a():\n    waited = time.monotonic() - b\n\ndef c():\n    assert waited < 3",
        ] {
            assert!(python(text).is_empty(), "{text} gave {:?}", python(text));
        }
    }
}
