//! The detokenizer: token ids to text, one at a time. Only whole characters are returned, and no token is decoded
//! twice.

use crate::tokenizer::Tokenizer;

/// Turns tokens into text as they arrive. Joined together, the pieces equal the decoded whole.
///
/// Work and memory for a token do not depend on the number of earlier ones: at most three bytes of an unfinished
/// character are kept.
pub struct Detokenizer {
    tokenizer: Tokenizer,
    skip_special_tokens: bool,
    /// The special tokens that stay in the text.
    kept: Vec<u32>,
    is_first: bool,
    num_strippable: usize,
    /// The first bytes of a character whose rest has not arrived. They are a prefix of valid UTF-8, so if the text ends
    /// here, they become a single U+FFFD.
    unfinished: Vec<u8>,
}

impl Detokenizer {
    /// `prompt_tail` are the tokens before the first pushed one. Their text is not returned, but
    /// the pushed tokens continue it: a word keeps its leading space, and half a character is
    /// completed. The last token that is not special is enough, or the last four where tokens may
    /// be single bytes. With an empty `prompt_tail` the pushed tokens are a text of their own.
    pub fn new(tokenizer: Tokenizer, skip_special_tokens: bool, prompt_tail: &[u32]) -> Self {
        let num_strippable = tokenizer
            .pieces()
            .decoder()
            .strip_start()
            .map_or(0, |(_, num)| num);
        let mut detokenizer = Self {
            tokenizer,
            skip_special_tokens,
            kept: Vec::new(),
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

    /// Keeps the tokens with these texts in the text, even if they are special. These tokens mark the parts of a reply.
    pub fn keeping(mut self, markers: &[&str]) -> Self {
        let ids = markers
            .iter()
            .filter_map(|text| self.tokenizer.token_to_id(text));
        self.kept = ids.collect();
        self
    }

    /// Adds a token and returns the text that it completes, which is empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        self.push_into(id, &mut text);
        text
    }

    /// Returns U+FFFD if the text ends within a character. Call it once, at the end.
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
        if self.skip_special_tokens && pieces.is_special(id) && !self.kept.contains(&id) {
            return;
        }
        let start = out.len();
        if std::mem::take(&mut self.is_first) && pieces.decoder().minds_first() {
            // This branch runs once per text, so it may allocate.
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

/// Appends the text of `unfinished` and `bytes`, and keeps a character that is still unfinished.
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
