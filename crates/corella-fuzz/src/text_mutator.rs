//! Changes of texts in some notation: templates, grammars, regular expressions, configuration files.

use crate::Random;

/// Characters of several bytes, line ends, invisible ones, and ones that end texts in other notations.
const CHARACTERS: [char; 14] = [
    '\0',
    '\n',
    '\r',
    '\t',
    '"',
    '\'',
    '\\',
    '\u{7f}',
    'é',
    '\u{200b}',
    '\u{feff}',
    '\u{fffd}',
    '😀',
    '\u{10ffff}',
];
const MAX_RUN: usize = 400;

/// Makes a few changes, each at a boundary between characters. `words` are pieces of the notation, and `other` is a
/// text in it.
pub fn mutate_text(random: &mut Random, text: &mut String, words: &[&str], other: &str) {
    for _ in 0..1 + random.magnitude_below(5) {
        let mut characters: Vec<char> = text.chars().collect();
        mutate_once(random, &mut characters, words, other);
        *text = characters.into_iter().collect();
    }
}

fn mutate_once(random: &mut Random, text: &mut Vec<char>, words: &[&str], other: &str) {
    let at = random.below(text.len() + 1);
    let len = random.magnitude_below((text.len() - at).min(MAX_RUN) + 1);
    match random.below(8) {
        0 => drop(text.drain(at..at + len)),
        1 => {
            let run = text[at..at + len].to_vec();
            let times = 1 + random.magnitude_below(MAX_RUN / run.len().max(1));
            text.splice(at..at, run.repeat(times));
        }
        2 | 3 if !words.is_empty() => {
            let word = random.pick(words);
            let replaced = if random.once_in(2) { len } else { 0 };
            text.splice(at..at + replaced, word.chars());
        }
        4 => {
            let character = random.pick(&CHARACTERS);
            let times = 1 + random.magnitude_below(MAX_RUN);
            text.splice(at..at, std::iter::repeat_n(character, times));
        }
        5 => {
            let other: Vec<char> = other.chars().collect();
            let from = random.below(other.len() + 1);
            let taken = random.magnitude_below((other.len() - from).min(MAX_RUN) + 1);
            text.splice(at..at + len, other[from..from + taken].iter().copied());
        }
        6 => {
            let number = (1u64 << random.below(64)).wrapping_sub(random.below(2) as u64);
            text.splice(at..at + len.min(3), number.to_string().chars());
        }
        _ => {
            let to = random.below(text.len() - len + 1);
            let run: Vec<char> = text.drain(at..at + len).collect();
            text.splice(to..to, run);
        }
    }
}
