//! `n_indent`: ends an answer before the first line that is indented less.

/// Returns the text before the first line that is indented by less than `min_indent`, if there is one. As in llama.cpp,
/// the break before the line and the line's spaces stay.
pub fn cut_at_indent(text: &str, min_indent: usize) -> Option<&str> {
    if min_indent == 0 {
        return None;
    }
    for (break_at, _) in text.match_indices('\n') {
        let line = &text[break_at + 1..];
        let indent = line.len() - line.trim_start_matches([' ', '\t']).len();
        if indent < min_indent && indent < line.len() {
            return Some(&text[..break_at + 1 + indent]);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_may_be_indented_as_it_likes() {
        assert_eq!(cut_at_indent("a\n  b\n  c", 2), None);
        assert_eq!(cut_at_indent("a\n  b\n c\nd", 2), Some("a\n  b\n "));
        assert_eq!(cut_at_indent("a\n\n  b", 2), Some("a\n"));
        assert_eq!(cut_at_indent("a\n\tb\n", 1), None);
        assert_eq!(cut_at_indent("a\nb", 0), None);
    }
}
