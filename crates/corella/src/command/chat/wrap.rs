//! Breaks streamed text at the spaces before a margin.

use unicode_width::UnicodeWidthChar;

/// Holds back a word until its end is known.
#[derive(Default)]
pub struct Wrap {
    /// The number of cells used in the current line.
    column: usize,
    /// Spaces after the shown text. They are dropped at a line break.
    spaces: String,
    word: String,
    /// Whether a part of the word was shown, because it is longer than a line. The terminal then breaks it, so that a
    /// copied word is whole.
    is_begun: bool,
}

const TAB_CELLS: usize = 8;

impl Wrap {
    /// Takes text, and returns the part to show in lines of `margin` cells.
    pub fn push(&mut self, text: &str, margin: usize) -> String {
        let mut shown = String::new();
        for character in text.chars() {
            match character {
                '\n' => {
                    self.end_word(&mut shown, margin);
                    self.spaces.clear();
                    self.column = 0;
                    shown.push('\n');
                }
                ' ' | '\t' => {
                    self.end_word(&mut shown, margin);
                    self.spaces.push(character);
                }
                _ => {
                    self.word.push(character);
                    // Chinese and Japanese have no spaces: a line may end after each character.
                    if character.width() == Some(2) {
                        self.end_word(&mut shown, margin);
                    } else if self.word_width() >= margin {
                        self.place_word(&mut shown, margin);
                        self.is_begun = true;
                    }
                }
            }
        }
        shown
    }

    /// Returns the text that was held back.
    pub fn finish(&mut self, margin: usize) -> String {
        let mut shown = String::new();
        self.place_word(&mut shown, margin);
        shown.push_str(&std::mem::take(&mut self.spaces));
        shown
    }

    fn end_word(&mut self, shown: &mut String, margin: usize) {
        self.place_word(shown, margin);
        self.is_begun = false;
    }

    fn place_word(&mut self, shown: &mut String, margin: usize) {
        if self.word.is_empty() {
            return;
        }
        let word_width = self.word_width();
        let begin = self.spaces.chars().fold(self.column, after_space);
        // Spaces at the beginning of a line indent it. A break before the first word would not help.
        if self.column > 0 && begin + word_width > margin && !self.is_begun {
            shown.push('\n');
            self.column = word_width;
        } else {
            shown.push_str(&self.spaces);
            self.column = begin + word_width;
            if self.is_begun {
                self.column %= margin;
            }
        }
        self.spaces.clear();
        shown.push_str(&self.word);
        self.word.clear();
    }

    fn word_width(&self) -> usize {
        self.word
            .chars()
            .filter_map(|character| character.width())
            .sum()
    }
}

fn after_space(column: usize, space: char) -> usize {
    match space {
        '\t' => (column / TAB_CELLS + 1) * TAB_CELLS,
        _ => column + 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wrapped(text: &str, margin: usize) -> String {
        let mut wrap = Wrap::default();
        wrap.push(text, margin) + &wrap.finish(margin)
    }

    #[test]
    fn lines_end_at_spaces() {
        for (text, expected) in [
            ("one two three", "one two\nthree"),
            ("one two  three", "one two\nthree"),
            ("exactly8 and", "exactly8\nand"),
            ("a\n\n    b c", "a\n\n    b c"),
            ("a\n    bcd ef", "a\n    bcd\nef"),
            ("end ", "end "),
            ("a\tb", "a\nb"),
            ("a longerthanthat b", "a\nlongerthanthat b"),
            ("你好世界你好", "你好世界\n你好"),
        ] {
            assert_eq!(wrapped(text, 8), expected, "{text:?}");
        }
    }

    #[test]
    fn parts_of_words_may_come_one_by_one() {
        let text = "Once upon a time, a fox found\na lantern in the deep snow. 世界 ok";
        let whole = wrapped(text, 12);
        assert!(
            whole.lines().all(|line| line.chars().count() <= 12),
            "{whole}"
        );
        let mut wrap = Wrap::default();
        let mut shown: String = text
            .chars()
            .map(|character| wrap.push(&character.to_string(), 12))
            .collect();
        shown += &wrap.finish(12);
        assert_eq!(shown, whole);
    }
}
