//! Added tokens, such as `<|im_end|>`: they are found in a text before it is split into words.

/// A set of added tokens to look for in a text.
pub(crate) struct AddedTokens {
    /// The tokens by their first byte, longer ones first, so that the longest match at a position is found.
    by_first_byte: Vec<Vec<(String, u32)>>,
}

/// A part of a text: an added token, or the text between two of them.
pub(crate) enum Section<'a> {
    Token(u32),
    Text(&'a str),
}

impl AddedTokens {
    pub(crate) fn new(tokens: impl IntoIterator<Item = (String, u32)>) -> Self {
        let mut by_first_byte: Vec<Vec<(String, u32)>> = vec![Vec::new(); 256];
        for (content, id) in tokens {
            if let Some(&first) = content.as_bytes().first() {
                by_first_byte[usize::from(first)].push((content, id));
            }
        }
        for tokens in &mut by_first_byte {
            tokens.sort_by_key(|(content, _)| std::cmp::Reverse(content.len()));
        }
        Self { by_first_byte }
    }

    /// Splits the text into added tokens and the texts between them. The token that begins first is found first. If
    /// several begin at one position, the longest is found. The search then continues after the token. The texts are
    /// never empty.
    pub(crate) fn sections<'a>(&'a self, text: &'a str) -> impl Iterator<Item = Section<'a>> {
        let mut rest = text;
        let mut next = None;
        std::iter::from_fn(move || {
            if let Some(id) = next.take() {
                return Some(Section::Token(id));
            }
            if rest.is_empty() {
                return None;
            }
            let (before, token) = match self.find(rest) {
                None => (std::mem::take(&mut rest), None),
                Some((start, len, id)) => {
                    let before = &rest[..start];
                    rest = &rest[start + len..];
                    (before, Some(id))
                }
            };
            if before.is_empty() {
                return token.map(Section::Token);
            }
            next = token;
            Some(Section::Text(before))
        })
    }

    fn find(&self, text: &str) -> Option<(usize, usize, u32)> {
        let bytes = text.as_bytes();
        bytes.iter().enumerate().find_map(|(start, &byte)| {
            self.by_first_byte[usize::from(byte)]
                .iter()
                .find(|(content, _)| bytes[start..].starts_with(content.as_bytes()))
                .map(|(content, id)| (start, content.len(), *id))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sections(tokens: &[&str], text: &str) -> Vec<String> {
        let tokens = tokens
            .iter()
            .zip(0..)
            .map(|(&token, id)| (token.to_owned(), id));
        let tokens = AddedTokens::new(tokens);
        let shown = |section| match section {
            Section::Token(id) => format!("#{id}"),
            Section::Text(text) => text.to_owned(),
        };
        tokens.sections(text).map(shown).collect()
    }

    #[test]
    fn the_first_and_of_these_the_longest_token_is_found() {
        let tokens = ["<a>", "<a><b>", "<b>", "  ", "é"];
        assert_eq!(sections(&tokens, "x<a>y"), ["x", "#0", "y"]);
        assert_eq!(sections(&tokens, "<a><b><b><a>"), ["#1", "#2", "#0"]);
        assert_eq!(sections(&tokens, "     <"), ["#3", "#3", " <"]);
        assert_eq!(sections(&tokens, "aéè"), ["a", "#4", "è"]);
        assert_eq!(sections(&[], "plain"), ["plain"]);
    }
}
