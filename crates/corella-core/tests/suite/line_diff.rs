//! A unified diff of two texts by lines.

use std::fmt::Write;

/// Lines shown around each change.
const NUM_CONTEXT: usize = 3;

/// The changes that turn `expected` into `found`: unchanged lines begin with a space, missing lines
/// with `-`, and new lines with `+`. The result is empty for equal texts.
///
/// Time and memory grow with the product of the lengths, so the texts should be short.
pub fn line_diff(expected: &str, found: &str) -> String {
    let expected: Vec<&str> = expected.split_inclusive('\n').collect();
    let found: Vec<&str> = found.split_inclusive('\n').collect();
    let lines = marked_lines(&expected, &found);
    let is_near_change = |at: usize| {
        let end = lines.len().min(at + NUM_CONTEXT + 1);
        let near = &lines[at.saturating_sub(NUM_CONTEXT)..end];
        near.iter().any(|(mark, _)| *mark != ' ')
    };
    let mut diff = String::new();
    let mut line_number = 1;
    let mut is_in_hunk = false;
    for (at, (mark, line)) in lines.iter().enumerate() {
        let is_shown = is_near_change(at);
        if is_shown && !is_in_hunk {
            writeln!(diff, "@@ line {line_number} @@").unwrap();
        }
        if is_shown {
            write!(diff, "{mark}{line}").unwrap();
            if !line.ends_with('\n') {
                writeln!(diff, "\n\\ no newline at the end of the file").unwrap();
            }
        }
        is_in_hunk = is_shown;
        line_number += usize::from(*mark != '+');
    }
    diff
}

/// All lines of both texts in order. The lines of a longest common subsequence are unchanged.
fn marked_lines<'a>(expected: &[&'a str], found: &[&'a str]) -> Vec<(char, &'a str)> {
    // For each pair of ends, the length of their longest common subsequence.
    let mut common = vec![vec![0; found.len() + 1]; expected.len() + 1];
    for (i, line) in expected.iter().enumerate().rev() {
        for (j, other) in found.iter().enumerate().rev() {
            common[i][j] = match line == other {
                true => 1 + common[i + 1][j + 1],
                false => common[i + 1][j].max(common[i][j + 1]),
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut lines = Vec::new();
    while i < expected.len() || j < found.len() {
        if i < expected.len() && j < found.len() && expected[i] == found[j] {
            lines.push((' ', expected[i]));
            (i, j) = (i + 1, j + 1);
        } else if j == found.len() || i < expected.len() && common[i + 1][j] >= common[i][j + 1] {
            lines.push(('-', expected[i]));
            i += 1;
        } else {
            lines.push(('+', found[j]));
            j += 1;
        }
    }
    lines
}

#[test]
fn a_diff_shows_changed_lines_with_their_surroundings() {
    let expected = "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n11\n12\n13\n14\n15\n";
    let found = "1\n2\n3\n4\nfive\n6\n7\n8\n9\n10\n11\n12\n13\n15\nend\n";
    let diff = "@@ line 2 @@\n 2\n 3\n 4\n-5\n+five\n 6\n 7\n 8\n\
                @@ line 11 @@\n 11\n 12\n 13\n-14\n 15\n+end\n";
    assert_eq!(line_diff(expected, found), diff);
    assert_eq!(line_diff(expected, expected), "");
}

#[test]
fn a_missing_newline_is_a_difference() {
    assert_eq!(
        line_diff("a", "a\n"),
        "@@ line 1 @@\n-a\n\\ no newline at the end of the file\n+a\n"
    );
}

/// The lines without `+` are the expected text, the lines without `-` the found text, and the
/// fewest lines are marked, by a search over every subset of the expected lines.
#[test]
fn a_diff_leads_from_one_text_to_the_other_with_the_fewest_changes() {
    let mut state = 1_u64;
    let mut text = || {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        let letters =
            (0..(state >> 40) % 8).map(|at| ["a", "b", "c"][(state >> (at * 4 + 8)) as usize % 3]);
        letters.collect::<Vec<_>>()
    };
    for _ in 0..300 {
        let (expected, found) = (text(), text());
        let lines = marked_lines(&expected, &found);
        let without = |mark: char| -> Vec<_> {
            let kept = lines.iter().filter(|(other, _)| *other != mark);
            kept.map(|(_, line)| *line).collect()
        };
        assert_eq!(without('+'), expected);
        assert_eq!(without('-'), found);
        let is_subsequence = |chosen: u32| {
            let mut rest = found.iter();
            let mut chosen = expected
                .iter()
                .enumerate()
                .filter(|(at, _)| chosen >> at & 1 == 1);
            chosen.all(|(_, line)| rest.any(|other| other == line))
        };
        let subsets = 0..1_u32 << expected.len();
        let longest = subsets.filter(|&chosen| is_subsequence(chosen));
        let num_common = longest.map(u32::count_ones).max();
        let num_kept = lines.iter().filter(|(mark, _)| *mark == ' ').count() as u32;
        assert_eq!(Some(num_kept), num_common, "{expected:?} and {found:?}");
    }
}
