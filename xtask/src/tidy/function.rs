//! Functions outside tests: few are long or take many arguments, and each of those gives its reason.

use std::collections::HashMap;

use super::rust_code::without_text;
use super::{Tree, test_code};

/// A limit that few functions exceed.
struct Limit {
    /// The complaint's words about a function beyond the limit.
    excess: &'static str,
    is_exceeded: fn(&Function<'_>) -> bool,
    /// The word before the reason, in a comment above the function.
    mark: &'static str,
    max_exceeding: usize,
}

const LINES: Limit = Limit {
    excess: "more than 80 lines",
    is_exceeded: |function| function.num_lines > 80,
    mark: "Long:",
    max_exceeding: 25,
};
const ARGUMENTS: Limit = Limit {
    excess: "more than six arguments",
    is_exceeded: |function| function.num_arguments > 6,
    mark: "Arguments:",
    max_exceeding: 5,
};

pub fn lines(tree: &Tree) -> Vec<String> {
    complaints(tree, &LINES)
}

pub fn arguments(tree: &Tree) -> Vec<String> {
    complaints(tree, &ARGUMENTS)
}

fn complaints(tree: &Tree, limit: &Limit) -> Vec<String> {
    let Limit { excess, mark, .. } = limit;
    let mut functions = functions(tree);
    functions.retain(limit.is_exceeded);
    let num_exceeding = functions.len();
    functions.retain(|function| !function.comment.contains(mark));
    let mut complaints: Vec<String> = functions
        .iter()
        .map(|Function { place, name, .. }| {
            format!(
                "{place}: {name} has {excess}: divide it, or say above it, after `{mark}`, why not"
            )
        })
        .collect();
    if num_exceeding > limit.max_exceeding {
        complaints.push(format!(
            "{num_exceeding} functions have {excess}, and {} may: divide one",
            limit.max_exceeding
        ));
    }
    complaints
}

struct Function<'a> {
    /// The function's file and line.
    place: String,
    name: &'a str,
    num_lines: usize,
    /// Without `self`.
    num_arguments: usize,
    /// The lines of comments above the function.
    comment: String,
}

/// Returns the functions of all crates, without those of tests and those without a body.
fn functions(tree: &Tree) -> Vec<Function<'_>> {
    let tests: HashMap<&str, String> = test_code::of_crates(tree).into_iter().collect();
    let mut functions = Vec::new();
    for (path, text) in tree.rust_files() {
        if !(path.starts_with("crates/") && path.contains("/src/")) {
            continue;
        }
        let code = without_text(text);
        for (at, _) in code.match_indices("fn ") {
            let is_word = !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            let test = tests.get(path);
            let is_of_test = test.is_some_and(|test| &test[at..at + 2] == "fn");
            if is_word && !is_of_test {
                functions.extend(function(path, text, &code, at));
            }
        }
    }
    functions
}

fn function<'a>(path: &str, text: &'a str, code: &str, at: usize) -> Option<Function<'a>> {
    let start = at + "fn ".len();
    let name_len = code[start..].find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
    let is_named = name_len > 0;
    let (arguments, body) = is_named.then(|| signature(&code[start + name_len..]))??;
    let end = start + name_len + body + block_len(&code[start + name_len + body..]);
    let line_start = text[..at].rfind('\n').map_or(0, |end| end + 1);
    let above = text[..line_start].lines().rev();
    let comment = above.take_while(|line| line.trim().starts_with(['/', '#']));
    Some(Function {
        place: format!("{path}:{}", 1 + text[..line_start].lines().count()),
        name: &text[start..start + name_len],
        num_lines: code[at..end].lines().count(),
        num_arguments: arguments,
        comment: comment.collect(),
    })
}

/// Returns the number of arguments after a name, and the index of the body; `None` without a body.
fn signature(code: &str) -> Option<(usize, usize)> {
    let (mut depth, mut angles, mut previous) = (0usize, 0usize, ' ');
    // The arguments, and the text since the last comma.
    let (mut arguments, mut current) = (None, String::new());
    let mut num_arguments = 0;
    for (index, c) in code.char_indices() {
        match c {
            '<' => angles += 1,
            '>' if previous != '-' => angles = angles.saturating_sub(1),
            '{' if depth == 0 => return Some((arguments?, index)),
            ';' if depth == 0 => return None,
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth -= 1,
            _ => {}
        }
        let is_list_end = depth == 0 && angles == 0 && c == ')';
        if arguments.is_none() && angles == 0 && (is_list_end || depth == 1 && c == ',') {
            let argument = current.trim_start_matches('(').trim();
            let is_receiver = argument.ends_with("self") || argument.starts_with("self:");
            num_arguments += usize::from(!argument.is_empty() && !is_receiver);
            current.clear();
        } else if depth > 0 && angles == 0 {
            current.push(c);
        }
        if is_list_end {
            arguments.get_or_insert(num_arguments);
        }
        previous = c;
    }
    None
}

/// Returns the length of a block, whose first brace begins `code`.
fn block_len(code: &str) -> usize {
    let mut depth = 0usize;
    let end = code.bytes().position(|byte| {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    end.map_or(code.len(), |end| end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(rule: fn(&Tree) -> Vec<String>, text: &str) -> usize {
        rule(&Tree::of(&[("crates/a/src/lib.rs", text)])).len()
    }

    fn long(head: &str, num_lines: usize) -> String {
        format!("{head} {{\n{}}}\n", "    g();\n".repeat(num_lines - 2))
    }

    #[test]
    fn a_long_function_gives_its_reason() {
        assert_eq!(check(lines, &long("pub fn f() -> [u8; 4]", 80)), 0);
        assert_eq!(check(lines, &long("pub fn f() -> [u8; 4]", 81)), 1);
        let reason = "/// Does much.\n// Long: one arm for each case.\n#[inline]\npub fn f()";
        assert_eq!(check(lines, &long(reason, 81)), 0);
        assert_eq!(
            check(lines, &long(&format!("{reason} {{}}\nfn g()"), 81)),
            1
        );
        assert_eq!(check(lines, &long("#[cfg(test)]\nfn f()", 81)), 0);
        assert_eq!(check(lines, &long("impl A for fn()", 81)), 0);
    }

    #[test]
    fn long_functions_are_few() {
        let reason = "// Long: a table.\nfn f()";
        assert_eq!(check(lines, &long(reason, 81).repeat(25)), 0);
        assert_eq!(check(lines, &long(reason, 81).repeat(26)), 1);
    }

    #[test]
    fn arguments_are_counted_without_self() {
        let six =
            "a: u8, (b, c): (u8, u8), d: F<G, H>, e: impl Fn(u8, u8) -> u8, f: [u8; 2], g: u8";
        for (list, num) in [
            (format!("&mut self, {six}"), 0),
            (format!("self: Arc<Self>, {six},"), 0),
            (format!("h: u8, {six}"), 1),
            (format!("{six}, h: u8,\n"), 1),
        ] {
            let code = format!("fn f<T: Fn(u8) -> u8, U>({list}) -> u8 where T: A {{}}");
            assert_eq!(check(arguments, &code), num, "{code}");
            let reason = format!("// Arguments: those of the table.\n{code}");
            assert_eq!(check(arguments, &reason), 0);
        }
        assert_eq!(
            check(arguments, &format!("trait A {{ fn f(h: u8, {six}); }}")),
            0
        );
    }
}
