//! Token ids to text, one at a time: only whole characters come out, and nothing is decoded twice.

use crate::tokenizer::Tokenizer;

/// Turns tokens into text as they arrive. The pieces joined are the whole decode.
///
/// Work and memory per token do not depend on how many came before: what is kept is at most
/// three bytes of an unfinished character.
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    is_first: bool,
    num_strippable: usize,
    /// The start of a character whose rest has not come. A prefix of valid UTF-8, so one U+FFFD.
    unfinished: Vec<u8>,
}

impl Detokenizer {
    /// `prompt_tail` is what precedes the first pushed token: its text is not returned, but the
    /// pushed tokens read as its continuation (a word after it keeps its space, half a character
    /// at its end is completed). The last token that is not special is enough, or four where
    /// tokens may be single bytes; empty decodes the pushed tokens by themselves.
    pub fn new(tokenizer: Tokenizer, skip_special_tokens: bool, prompt_tail: &[u32]) -> Self {
        let num_strippable = tokenizer
            .pieces()
            .decoder()
            .strip_start()
            .map_or(0, |(_, num)| num);
        let mut detokenizer = Self {
            tokenizer,
            skip_special_tokens,
            is_first: true,
            num_strippable,
            unfinished: Vec::with_capacity(8),
        };
        let mut unwanted = String::new();
        for &id in prompt_tail {
            detokenizer.push_into(id, &mut unwanted);
            unwanted.clear();
        }
        detokenizer
    }

    /// The text that `id` completes; empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        self.push_into(id, &mut text);
        text
    }

    /// Call once, at the end: U+FFFD if the text ends within a character.
    pub fn finish(&mut self) -> String {
        let mut text = String::new();
        self.finish_into(&mut text);
        text
    }

    pub(crate) fn push_into(&mut self, id: u32, out: &mut String) {
        let pieces = self.tokenizer.pieces();
        let Some(bytes) = pieces.bytes(id) else {
            return;
        };
        if self.skip_special_tokens && pieces.is_special(id) {
            return;
        }
        let start = out.len();
        if std::mem::take(&mut self.is_first) && pieces.decoder().minds_first() {
            // Once per text, so it may allocate.
            let token = self.tokenizer.id_to_token(id).unwrap_or_default();
            let mut first = Vec::new();
            pieces.decoder().append(&token, true, &mut first);
            append_utf8(&mut self.unfinished, &first, out);
        } else {
            append_utf8(&mut self.unfinished, bytes, out);
        }
        self.strip_start(start, out);
    }

    pub(crate) fn finish_into(&mut self, out: &mut String) {
        if !self.unfinished.is_empty() {
            self.unfinished.clear();
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }

    fn strip_start(&mut self, start: usize, out: &mut String) {
        if self.num_strippable == 0 {
            return;
        }
        let Some((strip, _)) = self.tokenizer.pieces().decoder().strip_start() else {
            return;
        };
        let mut end = start;
        for c in out[start..].chars() {
            if c != strip || self.num_strippable == 0 {
                self.num_strippable = 0;
                break;
            }
            self.num_strippable -= 1;
            end += c.len_utf8();
        }
        out.replace_range(start..end, "");
    }
}

/// Appends what `unfinished` and `bytes` spell; keeps back a character that is still unfinished.
fn append_utf8(unfinished: &mut Vec<u8>, bytes: &[u8], out: &mut String) {
    if unfinished.is_empty()
        && let Ok(text) = std::str::from_utf8(bytes)
    {
        return out.push_str(text);
    }
    unfinished.extend_from_slice(bytes);
    let mut start = 0;
    loop {
        match std::str::from_utf8(&unfinished[start..]) {
            Ok(text) => {
                out.push_str(text);
                unfinished.clear();
                return;
            }
            Err(error) => {
                let valid_end = start + error.valid_up_to();
                out.push_str(std::str::from_utf8(&unfinished[start..valid_end]).unwrap_or(""));
                match error.error_len() {
                    Some(len) => {
                        out.push(char::REPLACEMENT_CHARACTER);
                        start = valid_end + len;
                    }
                    None => {
                        unfinished.drain(..valid_end);
                        return;
                    }
                }
            }
        }
    }
}
