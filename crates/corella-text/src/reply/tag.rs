//! Finds tags in a growing text, and the part of its end that may still become a tag.

/// The tags in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sight {
    /// The first tag: the index of its first byte, and its index in the list of tags.
    Tag { start: usize, tag: usize },
    /// No tag so far. The bytes before this index belong to no tag.
    Clear(usize),
}

impl Sight {
    /// The bytes that belong to no tag, and the tag after them.
    pub(crate) fn parts(self) -> (usize, Option<usize>) {
        match self {
            Self::Tag { start, tag } => (start, Some(tag)),
            Self::Clear(settled) => (settled, None),
        }
    }
}

/// Looks for the first of `tags` in `text`.
pub(crate) fn find_tag(text: &str, tags: &[&str]) -> Sight {
    let found = tags.iter().enumerate();
    let found = found.filter_map(|(tag, string)| Some((text.find(string)?, tag)));
    if let Some((start, tag)) = found.min() {
        return Sight::Tag { start, tag };
    }
    let held = tags.iter().map(|tag| num_begun(text, tag)).max();
    Sight::Clear(text.len() - held.unwrap_or(0))
}

/// The length of the longest suffix of `text` that is a prefix of `tag`.
fn num_begun(text: &str, tag: &str) -> usize {
    let (text, tag) = (text.as_bytes(), tag.as_bytes());
    let longest = text.len().min(tag.len() - 1);
    let mut lengths = (1..=longest).rev();
    lengths
        .find(|&len| text.ends_with(&tag[..len]))
        .unwrap_or(0)
}

/// The beginning of `text`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beginning {
    /// The tag at this index of the list.
    Tag(usize),
    /// Perhaps a tag: more text decides.
    Undecided,
    Other,
}

/// Returns the tag in `tags` with which `text` begins.
pub(crate) fn begins_with(text: &str, tags: &[&str]) -> Beginning {
    match tags.iter().position(|tag| text.starts_with(tag)) {
        Some(tag) => Beginning::Tag(tag),
        None if tags.iter().any(|tag| tag.starts_with(text)) => Beginning::Undecided,
        None => Beginning::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_that_may_become_a_tag_is_not_settled() {
        let tags = ["<tool_call>", "</tool_call>"];
        assert_eq!(find_tag("a < b", &tags), Sight::Clear(5));
        assert_eq!(find_tag("a <", &tags), Sight::Clear(2));
        assert_eq!(find_tag("a <<tool", &tags), Sight::Clear(3));
        assert_eq!(find_tag("a </tool_call", &tags), Sight::Clear(2));
        let found = Sight::Tag { start: 1, tag: 1 };
        assert_eq!(find_tag("x</tool_call><tool_call>", &tags), found);
        assert_eq!(find_tag("", &tags), Sight::Clear(0));
    }

    #[test]
    fn a_tag_of_several_bytes_for_a_character_is_held_from_its_first() {
        assert_eq!(find_tag("é<｜", &["<｜tool▁sep｜>"]), Sight::Clear(2));
    }
}
